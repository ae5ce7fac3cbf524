"""The whole network: gradients, recomputation, compilation, determinism, and the doors that refuse wrong input."""

import re

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from m2forge.kernels.head_loss import linear_cross_entropy
from m2forge.model.build import build
from m2forge.model.config import AttentionConfig, FamilyName, ModelConfig, MoEConfig, WindowConfig
from m2forge.model.plan import Documents
from m2forge.model.preset import PRESETS
from m2forge.model.transformer import Output, Transformer, aux_loss
from tests.conftest import FEW_CASES, LONG
from tests.model.bias import set_biases
from tests.model.draw import FAMILIES, model_configs

AUX_WEIGHT = 0.01


def small_config(**fields: object) -> ModelConfig:
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, rotary_dim=4, qk_norm="flat")
    data: dict[str, object] = {
        "vocab_size": 48,
        "hidden_size": 24,
        "num_layers": 2,
        "attention": attention,
        "moe": MoEConfig(num_experts=6, top_k=2, intermediate_size=12, aux_loss_weight=AUX_WEIGHT),
        "num_mtp": 1,
    }
    return ModelConfig.model_validate(data | fields)


def small_model(config: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> Transformer:
    """Weights large enough that every part matters."""
    model = build(config, dtype=dtype, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    set_biases(model, std=0.1)
    return model


def random_tokens(config: ModelConfig, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def whole_loss(model: Transformer, output: Output, tokens: Tensor) -> Tensor:
    """Everything that training adds up: main, multi-token prediction, balance."""
    target = tokens.flatten().roll(-1)
    loss, _ = linear_cross_entropy(output.hidden_ND, model.head_weight, target)
    for hidden_ND in output.mtp_hidden_ND:
        loss = loss + 0.3 * linear_cross_entropy(hidden_ND, model.head_weight, target)[0]
    if output.affinity_LE is None or output.load_LE is None:
        return loss
    return loss + AUX_WEIGHT * aux_loss(output.load_LE, output.affinity_LE, tokens.numel())


def backward(model: Transformer, tokens: Tensor) -> tuple[Output, dict[str, Tensor]]:
    model.zero_grad()
    output = model(tokens)
    whole_loss(model, output, tokens).backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@FEW_CASES
@given(data=st.data())
def test_gradients_equal_finite_differences(family: FamilyName, data: st.DataObject) -> None:
    config = data.draw(model_configs(family, num_mtp=data.draw(st.integers(0, 2))))
    model = small_model(config, torch.float64, seed=data.draw(st.integers(0, 2**20)))
    tokens = random_tokens(config, 2, data.draw(st.integers(2, 8)))
    output, gradients = backward(model, tokens)
    generator = torch.Generator().manual_seed(1)
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in gradients}
    direction = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in parameters.items()}
    slope = sum((gradients[name] * direction[name]).sum().item() for name in parameters)

    @torch.no_grad()
    def loss_at(step: float) -> tuple[float, Tensor | None]:
        for name, parameter in parameters.items():
            parameter.add_(direction[name], alpha=step)
        moved = model(tokens)
        loss = whole_loss(model, moved, tokens).item()
        for name, parameter in parameters.items():
            parameter.sub_(direction[name], alpha=step)
        return loss, moved.load_LE

    size = 1e-6
    (above, load_above), (below, load_below) = loss_at(size), loss_at(-size)
    # An expert was exchanged between the two points: the loss jumps there
    assume(
        output.load_LE is None
        or (load_above is not None and load_below is not None and torch.equal(load_above, load_below))
    )
    # Rounding of the loss, 1e-16, over the step; the curvature adds the square of the step.
    assert (above - below) / (2 * size) == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_two_backward_passes_are_equal_to_the_bit() -> None:
    config = small_config()
    model, tokens = small_model(config), random_tokens(config, 4, 33)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)  # a race needs more than one
    first, second = backward(model, tokens)[1], backward(model, tokens)[1]
    torch.set_num_threads(threads)
    assert first.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("num_mtp", [0, 2])
def test_recomputed_blocks_give_equal_gradients_and_one_load(num_mtp: int) -> None:
    config = small_config(num_mtp=num_mtp)
    model, tokens = small_model(config), random_tokens(config, 3, 17)
    kept, kept_gradients = backward(model, tokens)
    model.recompute = "block"
    runs: list[object] = []
    model.blocks[0].register_forward_pre_hook(lambda *_: runs.append(1))
    again, again_gradients = backward(model, tokens)
    assert len(runs) == 2  # forward, and once more in the backward pass
    assert kept.load_LE is not None
    assert again.load_LE is not None
    assert torch.equal(kept.load_LE, again.load_LE)
    assert kept_gradients.keys() == again_gradients.keys()
    assert all(torch.equal(kept_gradients[name], again_gradients[name]) for name in kept_gradients)


def test_recomputed_blocks_serve_packed_documents() -> None:
    config = small_config()
    model, tokens, plan = small_model(config), random_tokens(config, 20), Documents([7, 13])
    gradients = []
    for recompute in ("none", "block"):
        model.recompute = recompute
        model.zero_grad()
        whole_loss(model, model(tokens, plan), tokens).backward()
        gradients.append([p.grad for p in model.parameters()])
    for kept, again in zip(*gradients, strict=True):
        assert kept is not None
        assert again is not None
        assert torch.equal(kept, again)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its own parts
def test_compiled_blocks_give_the_same_logits_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    # The compiler's cache of graphs does not notice that one of our operators has changed. What it keeps of C++ it
    # finds by the source.
    monkeypatch.setattr(torch._inductor.config, "fx_graph_cache", False)
    monkeypatch.setattr(torch._functorch.config, "enable_autograd_cache", False)
    # Generating vectorized loops takes seconds more, and how loops are vectorized is the compiler's own matter.
    monkeypatch.setattr(torch._inductor.config.cpp, "simdlen", 1)
    # A module of multi-token prediction has a block of the same class, compiled apart.
    config = small_config(num_layers=1, num_mtp=1 if LONG else 0)
    model, tokens = small_model(config), random_tokens(config, 2, 16)
    plain, plain_gradients = backward(model, tokens)
    torch.compiler.reset()
    model.compile_blocks()
    try:
        compiled, compiled_gradients = backward(model, tokens)
    finally:
        torch.compiler.reset()
    # Fused loops round differently in float32.
    for ours, theirs in zip(
        (compiled.hidden_ND, *compiled.mtp_hidden_ND), (plain.hidden_ND, *plain.mtp_hidden_ND), strict=True
    ):
        torch.testing.assert_close(model.logits(ours), model.logits(theirs), atol=1e-5, rtol=1e-4)
    assert plain.load_LE is not None
    assert compiled.load_LE is not None
    assert torch.equal(plain.load_LE, compiled.load_LE)
    for name, gradient in plain_gradients.items():
        largest = gradient.abs().max().item()
        torch.testing.assert_close(compiled_gradients[name], gradient, rtol=0, atol=1e-4 * largest + 1e-7)


# -- outputs ----------------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_loads_count_top_k_rows_per_token_in_every_moe_layer(data: st.DataObject) -> None:
    config = data.draw(model_configs(num_mtp=data.draw(st.integers(0, 2))))
    shape = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    output = build(config)(random_tokens(config, *shape))
    layers = [*range(config.num_layers), *[config.num_layers - 1] * config.num_mtp]
    num_mixtures = sum(config.is_sparse(layer) for layer in layers)
    if config.moe is None or num_mixtures == 0:
        assert output.load_LE is None
        return
    assert output.load_LE is not None
    assert output.load_LE.shape == (num_mixtures, config.moe.num_experts)
    assert output.load_LE.sum(-1).tolist() == [shape[0] * shape[1] * config.moe.top_k] * num_mixtures


def test_one_token_reaches_the_experts_that_the_load_names() -> None:
    config = small_config(num_mtp=0)
    model = small_model(config)
    load_LE = model(torch.tensor([[3]])).load_LE
    assert load_LE is not None
    assert sorted(load_LE[0].tolist()) == [0, 0, 0, 0, 1, 1]


def test_a_float32_head_gives_float32_logits_of_bfloat16_weights() -> None:
    rounded = small_model(small_config(), torch.bfloat16)
    exact = small_model(small_config(float32_head=True), torch.bfloat16)
    hidden = rounded(random_tokens(rounded.config, 2, 5)).hidden_ND
    assert hidden.dtype == rounded.logits(hidden).dtype == torch.bfloat16
    logits = exact.logits(hidden)
    assert logits.dtype == torch.float32
    # Products of bfloat16 numbers are exact in float32; only the sums round.
    expected = hidden.double() @ exact.head_weight.double().t()
    torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=1e-5)
    assert (rounded.logits(hidden).double() - expected).abs().max() > 1e-4
    rows = exact.logits(hidden.view(2, 5, -1))
    assert torch.equal(rows, logits.view(2, 5, -1))


def test_a_tied_head_is_the_embedding_and_learns_from_both_ends() -> None:
    config = small_config(family="llama", moe=None, intermediate_size=32, tied_head=True, num_mtp=0)
    model, tokens = small_model(config), random_tokens(config, 2, 6)
    assert model.head is None
    assert model.head_weight is model.embedding.weight
    gradient = backward(model, tokens)[1]["embedding.weight"]
    unseen = sorted(set(range(48)) - set(tokens.flatten().tolist()))
    assert gradient[unseen].abs().sum() > 0  # only the head touches tokens that are not in the input

    untied = small_model(config.model_copy(update={"tied_head": False}))
    untied.load_state_dict(model.state_dict() | {"head.weight": model.embedding.weight})
    both = backward(untied, tokens)[1]
    # Two float32 sums in another order.
    torch.testing.assert_close(gradient, both["embedding.weight"] + both["head.weight"], atol=1e-6, rtol=1e-5)


# -- care -------------------------------------------------------------------------------------------------------------


def test_fresh_weights_depend_on_the_seed_alone() -> None:
    config = small_config()
    model, same, other = build(config, seed=7), build(config, seed=7), build(config, seed=8)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, same.state_dict()[name]), name
        if tensor.dim() > 1:
            assert not torch.equal(tensor, other.state_dict()[name]), name
            # A thousand draws or more: the deviation is within a tenth of what was asked for.
            assert tensor.numel() < 1000 or tensor.std().item() == pytest.approx(config.init_std, rel=0.1)
        else:
            assert tensor.unique().tolist() == [0.0 if name.endswith("bias") else 1.0], name
    model.update_router_biases(torch.arange(6).repeat(3, 1))
    model.init_weights(7)
    assert all(torch.equal(tensor, same.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_flat_tokens_need_a_plan() -> None:
    model = build(small_config())
    with pytest.raises(
        ValueError, match=re.escape("tokens of shape (5,) need a plan; without one give (rows, length)")
    ):
        model(torch.arange(5))


def test_loads_of_another_number_of_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="loads of"):
        build(small_config()).update_router_biases(torch.zeros(9, 6))


@given(config=model_configs(), data=st.data())
def test_a_slice_keeps_the_first_layers(config: ModelConfig, data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(1, config.num_layers))
    whole, part = build(config), config.with_layers(num_layers)
    assert part.with_layers(num_layers) == part
    assert config.with_layers(config.num_layers) == config
    for layer in range(num_layers):
        assert part.is_sparse(layer) == config.is_sparse(layer)
        assert part.is_windowed(layer) == config.is_windowed(layer)
    shapes = {name: tensor.shape for name, tensor in whole.state_dict().items()}
    for name, tensor in build(part).state_dict().items():
        assert shapes[name] == tensor.shape


@pytest.mark.parametrize("name", PRESETS)
def test_presets_can_be_sliced(name: str) -> None:
    assert PRESETS[name].with_layers(1).num_layers == 1


def test_a_dense_slice_of_a_windowed_network_loses_only_the_rest() -> None:
    attention = small_config().attention.model_copy(update={"window": WindowConfig(size=4, layers=(0, 2), num_sinks=1)})
    moe = MoEConfig(num_experts=4, top_k=2, intermediate_size=8, dense_layers=(1, 3))
    config = small_config(num_layers=4, attention=attention, moe=moe, intermediate_size=16)
    part = config.with_layers(2)
    assert part.attention.window == WindowConfig(size=4, layers=(0,), num_sinks=1)
    assert part.moe is not None
    assert part.moe.dense_layers == (1,)


ATTENTION = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rotary_dim": 4}
MIXTURE = {"num_experts": 4, "top_k": 2, "intermediate_size": 8}
NETWORK = {"vocab_size": 8, "hidden_size": 8, "num_layers": 2, "attention": ATTENTION, "moe": MIXTURE}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": ATTENTION | {"num_kv_heads": 3}}, r"num_heads \(4\) must be a multiple of num_kv_heads \(3\)"),
        ({"attention": ATTENTION | {"rotary_dim": 10}}, r"rotary_dim \(10\) must be even and at most head_dim \(8\)"),
        ({"attention": ATTENTION | {"rotary_dim": 3}}, r"rotary_dim \(3\) must be even"),
        (
            {"attention": ATTENTION | {"window": {"size": 4, "layers": (2,)}}},
            r"must lie in 0\.\.1, each once, got \[2\]",
        ),
        ({"attention": ATTENTION | {"window": {"size": 0, "layers": (0,)}}}, "greater than 0"),
        ({"moe": MIXTURE | {"top_k": 5}}, r"top_k \(5\) exceeds num_experts \(4\)"),
        ({"moe": MIXTURE | {"bias_update": "gradient"}}, "needs selection_bias = true and aux_loss_weight > 0"),
        (
            {"moe": MIXTURE | {"dense_layers": (5,)}, "intermediate_size": 8},
            r"must lie in 0\.\.1, each once, got \[5\]",
        ),
        ({"moe": MIXTURE | {"dense_layers": (1,)}}, "intermediate_size is needed"),
        ({"moe": None}, "intermediate_size is needed"),
        ({"num_layers": 0}, "greater than 0"),
        ({"hiden_size": 8}, "hiden_size"),
    ],
)
def test_impossible_networks_are_refused(changes: dict[str, object], message: str) -> None:
    ModelConfig.model_validate(NETWORK)
    with pytest.raises(ValidationError, match=message):
        ModelConfig.model_validate(NETWORK | changes)


def test_plan_for_other_tokens_is_refused() -> None:
    config = small_config()
    with pytest.raises(ValueError, match="the plan is for 8 tokens, got 10"):
        small_model(config)(random_tokens(config, 1, 10).flatten(), Documents([4, 4]))
