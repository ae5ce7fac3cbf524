"""One step of the engine over trees against the plain loop over independent rows, in float64."""

import copy

import pytest
import torch
from hypothesis import assume, event

from m2forge.model.transformer import Transformer
from m2forge.train.config import OptimizerConfig, PolicyConfig, RouterBias
from m2forge.train.engine import TrainEngine
from m2forge.train.optimizer import Optimizer
from m2forge.tree.pack import pack_trees
from m2forge.tree.token_tree import TokenTree
from tests.train.naive import Naive, naive_step, watch_gradients, watch_margin

CONFIG = OptimizerConfig(max_norm=1e9, eps=1e-2)
"""An eps above rounding, so that a gradient of nothing but rounding makes no step."""


def assert_same_step(model: Transformer, trees: list[TokenTree], config: PolicyConfig, router_bias: RouterBias) -> None:
    """Gradients, loss, figures, weights and biases. A case in which rounding may choose other experts is discarded."""
    plain = copy.deepcopy(model)
    margin = watch_margin(plain)
    expected = naive_step(plain, trees, config)
    if margin() < 1e-9:
        event("discarded: routing margin")
    assume(margin() >= 1e-9)
    expected.total.backward()
    theirs = {name: weight.grad for name, weight in plain.named_parameters() if weight.grad is not None}

    engine = TrainEngine(model, CONFIG, policy=config, router_bias=router_bias)
    ours = watch_gradients(engine)
    report = engine.step(trees, lr=1e-2)
    values = report.read()
    event(f"packs: {min(3, len(pack_trees(trees, config.pack_tokens)))}")
    assert report.problems == ()
    assert not report.is_empty
    assert_same_gradients(ours, theirs)
    assert abs(values["loss"] - expected.main.item()) <= 1e-9 * expected.magnitude
    check_figures(values, expected, trees, config.loss)

    Optimizer(plain, CONFIG).step(1e-2)
    if router_bias == "balanced":
        plain.update_router_biases(expected.load_LE)
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=1e-9, atol=1e-11)


def assert_same_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    # Where paths have one token, the gradients of queries and keys are 0, and what is found of them is rounding.
    rounding = 1e-15 * max(gradient.abs().max().item() for gradient in theirs.values())
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        allowed = max(1e-9 * expected.abs().max().item(), rounding)
        assert (ours[name] - expected).abs().max().item() <= allowed, name


def check_figures(values: dict[str, float], expected: Naive, trees: list[TokenTree], loss: str) -> None:
    share_LE = expected.load_LE.double() / expected.load_LE.sum(-1, keepdim=True)
    assert [values[f"expert_load_max/{layer}"] for layer in range(expected.load_LE.shape[0])] == share_LE.amax(
        -1
    ).tolist()
    max_vio = expected.load_LE.double().amax(-1) / expected.load_LE.double().mean(-1) - 1
    assert [values[f"max_vio/{layer}"] for layer in range(expected.load_LE.shape[0])] == max_vio.tolist()
    assert values["max_vio"] == pytest.approx(max_vio.mean().item(), rel=1e-12)
    assert values["entropy"] == pytest.approx(expected.entropies.mean().item(), rel=1e-9)
    assert values["tokens_computed"] + values["tokens_saved"] == sum(tree.num_input_tokens for tree in trees)
    if loss == "sft":
        assert not any(name.startswith("ratio") for name in values)
        return
    ratios = expected.ratios
    assert values["ratio_mean"] == pytest.approx(ratios.mean().item(), rel=1e-9)
    assert values["ratio_max"] == pytest.approx(ratios.max().item(), rel=1e-9)
    assert values["kl_k1"] == pytest.approx(-ratios.log().mean().item(), rel=1e-9, abs=1e-12)
    assert values["kl_k3"] == pytest.approx((ratios - 1 - ratios.log()).mean().item(), rel=1e-9, abs=1e-12)
    shares = {name: value for name, value in values.items() if name.startswith("ratio_share/")}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert values["ratio_share/0.5-0.8"] == pytest.approx(((ratios >= 0.5) & (ratios < 0.8)).double().mean().item())
    if loss == "cispo":
        assert values["clipped_share"] == pytest.approx((ratios > 2.0).double().mean().item())
