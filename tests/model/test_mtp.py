"""Multi-token prediction: the chain computes its formula, sees no further than it may, and grows by copies."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m2forge.kernels.expert import expert_ffn_plain
from m2forge.kernels.head_loss import linear_cross_entropy
from m2forge.model.build import build
from m2forge.model.config import AttentionConfig, ModelConfig, MoEConfig
from m2forge.model.plan import Documents
from m2forge.model.preset import PRESETS
from m2forge.model.transformer import Block, MixtureFFN, MTPModule, MTPSource, Transformer
from tests.model.bias import set_biases
from tests.model.draw import FAMILIES, model_configs

EXACT = 1e-10
"""Float64 sums of another order, through two layers and three modules."""


def small_model(num_mtp: int, dtype: torch.dtype = torch.float64) -> Transformer:
    config = ModelConfig(
        vocab_size=40,
        hidden_size=24,
        num_layers=2,
        attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, rotary_dim=4, qk_norm="flat"),
        moe=MoEConfig(num_experts=6, top_k=2, intermediate_size=10),
        num_mtp=num_mtp,
    )
    model = build(config, dtype=dtype, seed=3)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(4)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.2)
    set_biases(model, std=0.1)
    return model


def random_tokens(*shape: int, vocab_size: int = 40) -> Tensor:
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(5))


# -- the chain against its formula, token by token --------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x_LHK: Tensor, config: AttentionConfig) -> Tensor:
    """Rotation as a product of complex numbers."""
    half = config.rotary_dim // 2
    frequency = config.rope_theta ** -(torch.arange(half, dtype=torch.float32) * 2 / config.rotary_dim)
    angle = torch.arange(x_LHK.shape[0])[:, None] * frequency.double()
    pairs = torch.complex(x_LHK[..., :half], x_LHK[..., half : 2 * half])
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((pairs.real, pairs.imag, x_LHK[..., 2 * half :]), dim=-1)


def slow_block(block: Block, x_LD: Tensor, config: ModelConfig) -> Tensor:
    """One layer over one causal document."""
    c, weights = config.attention, dict(block.named_parameters())
    h_LD = rms(x_LD, weights["attention_norm.weight"], config.norm_eps)
    q, k, v = (h_LD @ weights["attention.qkv.weight"].t()).split((c.q_width, c.kv_width, c.kv_width), -1)
    q = rms(q, weights["attention.q_norm.weight"], config.norm_eps).view(-1, c.num_heads, c.head_dim)
    k = rms(k, weights["attention.k_norm.weight"], config.norm_eps).view(-1, c.num_kv_heads, c.head_dim)
    v = v.view(-1, c.num_kv_heads, c.head_dim).repeat_interleave(c.num_heads // c.num_kv_heads, 1)
    q, k = turned(q, c), turned(k, c).repeat_interleave(c.num_heads // c.num_kv_heads, 1)
    score_HLL = torch.einsum("qhd,khd->hqk", q, k) / c.head_dim**0.5
    ahead = torch.ones(len(x_LD), len(x_LD), dtype=torch.bool).triu(1)
    mixed = torch.einsum("hqk,khd->qhd", score_HLL.masked_fill(ahead, -torch.inf).softmax(-1), v).flatten(1)
    x_LD = x_LD + mixed @ weights["attention.out.weight"].t()
    h_LD = rms(x_LD, weights["ffn_norm.weight"], config.norm_eps)
    ffn = block.ffn
    assert isinstance(ffn, MixtureFFN)
    assert ffn.router.bias is not None
    assert config.moe is not None
    scores = torch.sigmoid(h_LD @ ffn.router.weight.t())
    chosen = (scores + ffn.router.bias).topk(config.moe.top_k).indices
    weight = scores.gather(1, chosen)
    return x_LD + expert_ffn_plain(h_LD, ffn.w13, ffn.w2, weight / weight.sum(-1, keepdim=True), chosen)


def slow_chain(model: Transformer, tokens_L: Tensor) -> list[Tensor]:
    """Final hidden states of the main model and of each module, for one document."""
    config = model.config
    embedding_LD = model.embedding.weight[tokens_L]
    state_LD = embedding_LD
    for block in model.blocks:
        assert isinstance(block, Block)
        state_LD = slow_block(block, state_LD, config)
    finals = [rms(state_LD, model.norm.weight, config.norm_eps)]
    for module in model.mtp:
        assert isinstance(module, MTPModule)
        rows = []
        for n in range(len(tokens_L)):
            parent_D = state_LD[n - 1] if n else torch.zeros_like(state_LD[0])
            pair = (
                rms(parent_D, module.state_norm.weight, config.norm_eps),
                rms(embedding_LD[n], module.embedding_norm.weight, config.norm_eps),
            )
            rows.append(module.projection.weight @ torch.cat(pair))
        state_LD = slow_block(module.block, torch.stack(rows), config)
        finals.append(rms(state_LD, module.norm.weight, config.norm_eps))
    return finals


def test_the_chain_equals_its_formula_read_off_token_by_token() -> None:
    model, tokens = small_model(num_mtp=3), random_tokens(2, 9)
    output = model(tokens)
    actual = [hidden.view(2, 9, -1) for hidden in (output.hidden_ND, *output.mtp_hidden_ND)]
    for row in range(2):
        for ours, slow in zip(actual, slow_chain(model, tokens[row]), strict=True):
            torch.testing.assert_close(ours[row], slow, atol=EXACT, rtol=EXACT)


@given(data=st.data())
def test_a_later_token_changes_nothing_before_it(data: st.DataObject) -> None:
    config = data.draw(model_configs(data.draw(st.sampled_from(FAMILIES)), num_mtp=data.draw(st.integers(1, 3))))
    model = build(config, dtype=torch.float64, seed=data.draw(st.integers(0, 2**20)))
    length = data.draw(st.integers(2, 12))
    changed_at = data.draw(st.integers(1, length - 1))
    tokens = random_tokens(1, length, vocab_size=config.vocab_size)
    other = tokens.clone()
    other[0, changed_at] = (tokens[0, changed_at] + 1) % config.vocab_size
    for ours, theirs in zip(model(tokens).mtp_hidden_ND, model(other).mtp_hidden_ND, strict=True):
        # The same numbers, possibly summed over experts in products of other sizes.
        torch.testing.assert_close(ours[:changed_at], theirs[:changed_at], atol=EXACT, rtol=EXACT)
        assert (ours[changed_at] - theirs[changed_at]).abs().max() > 1e-6


def test_documents_do_not_leak_through_the_chain() -> None:
    model, tokens = small_model(num_mtp=3), random_tokens(12)
    other = tokens.clone()
    other[:5] = (tokens[:5] + 1) % 40
    plan = Documents([5, 7])
    for ours, theirs in zip(model(tokens, plan).mtp_hidden_ND, model(other, plan).mtp_hidden_ND, strict=True):
        torch.testing.assert_close(ours[5:], theirs[5:], atol=EXACT, rtol=EXACT)
        assert (ours[:5] - theirs[:5]).abs().max() > 1e-3


def test_each_module_reads_the_main_state_one_token_further_back() -> None:
    """The gradient of module i at token n reaches main states up to n − i, and every embedding up to n."""
    model, tokens = small_model(num_mtp=3), random_tokens(1, 8)
    states: list[Tensor] = []

    def keep(block: object, inputs: object, out: tuple[Tensor, object]) -> None:
        out[0].retain_grad()
        states.append(out[0])

    model.blocks[-1].register_forward_hook(keep)
    for depth in (1, 2, 3):
        states.clear()
        model(tokens).mtp_hidden_ND[depth - 1][6].square().sum().backward()
        assert states[0].grad is not None
        reached = states[0].grad.abs().amax(-1) > 0
        assert reached.tolist() == [n <= 6 - depth for n in range(8)]


# -- growing ----------------------------------------------------------------------------------------------------------


def weights_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("source", ["main", "mtp1"])
def test_expansion_copies_its_sources_and_keeps_the_first_module(source: MTPSource) -> None:
    model, tokens = small_model(num_mtp=1), random_tokens(2, 6)
    before, first = model(tokens), weights_of(model.mtp[0])
    model.expand_mtp(3, source)
    assert model.config.num_mtp == 3
    assert len(model.mtp) == 3

    block = weights_of(model.get_submodule("blocks.1" if source == "main" else "mtp.0.block"))
    norm = weights_of(model.get_submodule("norm" if source == "main" else "mtp.0.norm"))
    expected = {name: first[name] for name in first if not name.startswith(("block.", "norm."))}
    expected |= {f"block.{name}": tensor for name, tensor in block.items()}
    expected |= {f"norm.{name}": tensor for name, tensor in norm.items()}
    assert "block.ffn.router.bias" in expected
    for module, sources in zip(model.mtp, (first, expected, expected), strict=True):
        actual = weights_of(module)
        assert actual.keys() == sources.keys()
        assert all(torch.equal(actual[name], sources[name]) for name in actual)

    after = model(tokens)
    assert torch.equal(after.hidden_ND, before.hidden_ND)
    assert torch.equal(after.mtp_hidden_ND[0], before.mtp_hidden_ND[0])
    assert [tuple(hidden.shape) for hidden in after.mtp_hidden_ND] == [(12, 24)] * 3
    assert all(hidden.isfinite().all() for hidden in after.mtp_hidden_ND)
    assert after.load_LE is not None
    assert after.load_LE.shape == (5, 6)


def test_copies_share_no_memory_with_their_sources() -> None:
    model = small_model(num_mtp=1)
    model.expand_mtp(3)
    pointers = [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
    assert len(pointers) == len(set(pointers))


def test_expansion_to_the_present_length_changes_nothing() -> None:
    model = small_model(num_mtp=2)
    before = weights_of(model)
    model.expand_mtp(2)
    after = weights_of(model)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_impossible_expansions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no first module .* num_mtp = 1"):
        small_model(num_mtp=0).expand_mtp(2)
    with pytest.raises(ValueError, match="cannot expand from 3 modules to 2"):
        small_model(num_mtp=3).expand_mtp(2)


# -- freezing ---------------------------------------------------------------------------------------------------------


def total_loss(model: Transformer, tokens: Tensor) -> Tensor:
    output, target = model(tokens[:, :-1]), tokens[:, 1:].flatten()
    hiddens = (output.hidden_ND, *output.mtp_hidden_ND)
    return torch.stack([linear_cross_entropy(h, model.head_weight, target)[0] for h in hiddens]).sum()


@pytest.mark.parametrize("source", ["main", "mtp1"])
def test_a_frozen_main_model_learns_nothing_and_the_modules_do(source: MTPSource) -> None:
    model, tokens = small_model(num_mtp=1), random_tokens(3, 9)
    model.expand_mtp(3, source)
    model.freeze_main()
    total_loss(model, tokens).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None and bool(parameter.grad.any())) == name.startswith("mtp."), name

    before = weights_of(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.update_router_biases(torch.arange(6).repeat(5, 1))
    changed = {name for name, tensor in weights_of(model).items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if name.startswith("mtp.")}


def test_unfreezing_lets_everything_learn_again() -> None:
    model, tokens = small_model(num_mtp=1), random_tokens(3, 9)
    model.freeze_main()
    model.freeze_main(frozen=False)
    total_loss(model, tokens).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.update_router_biases(torch.arange(6).repeat(3, 1))
    before = [router.bias for router in small_model(num_mtp=1).routers()]
    for router, bias in zip(model.routers(), before, strict=True):
        assert router.bias is not None
        assert bias is not None
        assert not torch.equal(router.bias, bias)


def test_modules_expanded_from_a_frozen_main_model_still_learn() -> None:
    model = small_model(num_mtp=1)
    model.freeze_main()
    model.expand_mtp(3)
    assert all(parameter.requires_grad for parameter in model.mtp.parameters())


def test_a_frozen_model_moves_on_with_its_modules_in_bfloat16() -> None:
    model = build(PRESETS["m2-nano"], dtype=torch.bfloat16)
    model.freeze_main()
    loss = total_loss(model, random_tokens(2, 17, vocab_size=256))
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.mtp.parameters())
