"""Logits and gradients equal transformers' on random small networks of all families."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn import Module
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from m2forge.kernels.head_loss import linear_cross_entropy
from m2forge.model.architecture import from_public, public_parts, to_public
from m2forge.model.build import build
from m2forge.model.config import FamilyName, ModelConfig
from m2forge.model.preset import PRESETS
from m2forge.model.rotary import frequencies
from m2forge.model.transformer import Router, Transformer
from tests.conftest import FEW_CASES
from tests.model.bias import set_biases
from tests.model.draw import FAMILIES, model_configs
from tests.model.peer import grad_of, transformers_twin, twin_gradient

ROUTING_MARGIN = 1e-5
"""Below this the two float32 computations may choose different experts; such cases say nothing."""


def routing_margin(model: Transformer, tokens: torch.Tensor) -> float:
    """Smallest gap between the last chosen and the first refused expert."""
    margins = [float("inf")]

    def watch(router: Module, inputs: tuple[torch.Tensor], _: object) -> None:
        assert isinstance(router, Router)
        logits = inputs[0] @ router.weight.t()
        scores = logits.sigmoid() if router.config.scoring == "sigmoid" else logits.softmax(-1)
        ranked = (scores if router.bias is None else scores + router.bias).sort(-1, descending=True).values
        k = router.config.top_k
        if k < ranked.shape[-1]:
            margins.append((ranked[:, k - 1] - ranked[:, k]).min().item())

    hooks = [router.register_forward_hook(watch) for router in model.routers()]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return min(margins)


@pytest.mark.parametrize("family", FAMILIES)
@FEW_CASES
@given(data=st.data())
def test_logits_and_gradients_equal_transformers(family: FamilyName, data: st.DataObject) -> None:
    config = data.draw(model_configs(family))
    seed = data.draw(st.integers(0, 2**20))
    generator = torch.Generator().manual_seed(seed)
    shape = (data.draw(st.integers(1, 3)), data.draw(st.integers(3, 24)))
    tokens = torch.randint(0, config.vocab_size, shape, generator=generator)
    model = build(config, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1).add_(0.1 if parameter.dim() == 1 else 0)
    set_biases(model, std=0.1, seed=seed)
    assume(routing_margin(model, tokens) >= ROUTING_MARGIN)
    twin = transformers_twin(model)

    output = model(tokens)
    logits = model.logits(output.hidden_ND).view(*shape, -1)
    expected = twin(tokens, use_cache=False).logits
    # float32 rounding over at most three layers of width 30.
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)

    position = torch.arange(tokens.numel()).view(shape)[:, :-1].flatten()
    loss, _ = linear_cross_entropy(output.hidden_ND, model.head_weight, tokens[:, 1:].flatten(), position_M=position)
    expected_loss = twin(tokens, labels=tokens, use_cache=False).loss
    torch.testing.assert_close(loss, expected_loss, atol=1e-5, rtol=1e-5)
    loss.backward()
    expected_loss.backward()
    gradients = {name: grad_of(parameter) for name, parameter in model.named_parameters()}
    # A gradient that is zero in exact arithmetic is rounding noise here: measured against the largest one.
    noise = 1e-6 * max(gradient.norm() for gradient in gradients.values())
    for name, part in public_parts(config):
        if part.name not in gradients:
            continue  # the selection bias has no gradient on either side
        ours, theirs = part.of(gradients[part.name]), twin_gradient(name, twin, config.family == "minimax_m2")
        error, scale = (ours - theirs).norm(), theirs.norm()
        assert error <= 1e-4 * scale + noise, f"{name}: relative error {error / scale:.1e}"


@given(config=model_configs())
def test_public_configuration_reads_back_equal(config: ModelConfig) -> None:
    assert from_public(to_public(config)) == config


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_expressible_in_the_public_format(name: str) -> None:
    config = PRESETS[name]
    back = from_public(to_public(config))
    assert config.moe is not None
    assert back.moe is not None
    # How it trains is ours alone; what it computes must survive.
    moe = back.moe.model_copy(update={"bias_rate": config.moe.bias_rate})
    assert back.model_copy(update={"num_mtp": config.num_mtp, "moe": moe}) == config


PUBLIC: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    "keys",
    [
        {"factor": 4.0, "original_max_position_embeddings": 1024},
        {"factor": 4.0},
        {"factor": None, "original_max_position_embeddings": 512},
        {"factor": 0.5, "original_max_position_embeddings": 512},
        {"factor": 40.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.8},
        {"factor": 40.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0},
        {"factor": 8, "original_max_position_embeddings": 64, "beta_fast": 1.1, "beta_slow": 1, "truncate": True},
        {"factor": 8.0, "original_max_position_embeddings": 256, "beta_fast": None, "truncate": False},
        {"factor": 2.0, "original_max_position_embeddings": 512, "attention_factor": 1.5, "mscale": 2.0},
    ],
)
def test_yarn_is_read_as_transformers_reads_it(keys: dict[str, float | None]) -> None:
    public = PUBLIC | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **keys}}
    theirs = AutoConfig.for_model(**public)
    frequency_R, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    ours = from_public(public).attention
    torch.testing.assert_close(frequencies(ours), frequency_R, rtol=1e-6, atol=0)
    assert ours.rotary_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"sliding_window": None},
        {"sliding_window": 7},
        {"use_sliding_window": True, "sliding_window": 7},
        {"use_sliding_window": True, "max_window_layers": 1},
    ],
)
def test_windows_are_read_as_transformers_reads_them(family: FamilyName, keys: dict[str, int | None]) -> None:
    """Absent keys too: each has a default, which is not the same as null."""
    public = PUBLIC | {"model_type": family, "num_hidden_layers": 30} | keys
    theirs, ours = AutoConfig.for_model(**public), from_public(public).attention.window
    sliding = [kind == "sliding_attention" for kind in getattr(theirs, "layer_types", ["sliding_attention"] * 30)]
    layers = tuple(layer for layer, is_sliding in enumerate(sliding) if is_sliding and theirs.sliding_window)
    assert (ours.size if ours else None, ours.layers if ours else ()) == (
        theirs.sliding_window if layers else None,
        layers,
    )
