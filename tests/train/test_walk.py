"""A walk over segments equals the step over whole packs, in float64, with the memory of one segment."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from m2forge.errors import ConfigError
from m2forge.model.config import LoRAConfig
from m2forge.model.lora import attach
from m2forge.model.path import Chain, PathPlan, PathStack, PathTensor
from m2forge.model.preset import preset
from m2forge.model.transformer import Transformer
from m2forge.train.config import MachineConfig, OptimizerConfig, PolicyConfig, WalkConfig
from m2forge.train.engine import PendingMetrics, StepReport, TrainEngine
from m2forge.train.walk import Walk
from m2forge.tree.token_tree import TokenTree
from tests.conftest import LONG
from tests.model.draw_tree import drawn_network
from tests.train.draw import draw_pack, small_model
from tests.train.naive import forests, make_tree
from tests.train.walk_step import Step, assert_walk_equals, run
from tests.tree.draw import make_call

MOE = {"num_experts": 4, "top_k": 2, "intermediate_size": 8}
POLICY = PolicyConfig(mtp_weight=0.4, mtp_gradient="all", mtp_top_k=5, max_ratio=2.0)


def over_trees(trees: list[TokenTree]) -> Step:
    def step(engine: TrainEngine) -> PendingMetrics:
        return engine.step(trees, lr=1e-2)

    return step


def over_rows(*lengths: list[int], mtp_weight: float = 0.3, seed: int = 0) -> Step:
    packs = [draw_pack(seed + index, list(pack)) for index, pack in enumerate(lengths)]

    def step(engine: TrainEngine) -> PendingMetrics:
        return engine.step_rows(packs, lr=1e-2, mtp_weight=mtp_weight, measure_agreement=True)

    return step


def wide_tree(num_leaves: int, num_prompt: int = 12) -> TokenTree:
    """A prompt, and leaves of six tokens that have no other token in common."""
    prompt = [index % 5 for index in range(num_prompt)]
    return make_tree(
        [make_call(prompt, [1, leaf % 5, leaf // 5 % 5, leaf // 25, 3, 2], leaf) for leaf in range(num_leaves)]
    )


# -- the same step -----------------------------------------------------------------------------------------------------


@settings(max_examples=1000 if LONG else 6)
@given(
    trees=forests(),
    segment_tokens=st.integers(1, 14),
    aux_loss_weight=st.sampled_from((0.0, 0.5)),
    recompute=st.sampled_from(("none", "block")),
    stack=st.sampled_from(("device", "host")),
    mtp_gradient=st.sampled_from(("all", "modules")),
    slack=st.integers(0, 20),
)
def test_a_walk_over_trees_is_the_step_over_whole_packs(
    trees: list[TokenTree],
    segment_tokens: int,
    aux_loss_weight: float,
    recompute: str,
    stack: str,
    mtp_gradient: str,
    slack: int,
) -> None:
    longest = max(sample.num_tokens for tree in trees for sample in tree.samples)
    policy = POLICY.model_copy(update={"pack_tokens": longest + slack, "mtp_gradient": mtp_gradient})
    walk = WalkConfig.model_validate({"segment_tokens": segment_tokens, "recompute": recompute, "stack": stack})
    model, step = small_model(moe=MOE | {"aux_loss_weight": aux_loss_weight}), over_trees(trees)
    assert_walk_equals(model, step, walk, policy)


@settings(max_examples=1000 if LONG else 6)
@given(
    lengths=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=3), min_size=1, max_size=2),
    segment_tokens=st.integers(1, 14),
    aux_loss_weight=st.sampled_from((0.0, 0.5)),
    seed=st.integers(0, 2**16),
)
def test_a_walk_over_rows_is_the_step_over_whole_packs(
    lengths: list[list[int]], segment_tokens: int, aux_loss_weight: float, seed: int
) -> None:
    model, step = small_model(moe=MOE | {"aux_loss_weight": aux_loss_weight}), over_rows(*lengths, seed=seed)
    assert_walk_equals(model, step, WalkConfig(segment_tokens=segment_tokens))


@settings(max_examples=200 if LONG else 2)
@given(
    trees=forests(ids=(3, 701, 88, 1023, 412)),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    segment_tokens=st.integers(1, 14) if LONG else st.integers(6, 9),
    seed=st.integers(0, 2**16),
)
def test_a_walk_of_m2_tiny_is_the_step_over_whole_packs(
    trees: list[TokenTree], lengths: list[int], segment_tokens: int, seed: int
) -> None:
    tiny = preset("m2-tiny")
    assert tiny.moe is not None
    moe = tiny.moe.model_copy(update={"aux_loss_weight": 0.5})
    model = drawn_network(tiny.model_copy(update={"num_mtp": 2, "moe": moe}), seed)
    for step in (over_trees(trees), over_rows(lengths, seed=seed)):
        assert_walk_equals(model, step, WalkConfig(segment_tokens=segment_tokens), POLICY)


def planted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], None]]:
    def patch(part: type, name: str, function: Callable[..., object]) -> Callable[[], None]:
        return lambda: monkeypatch.setattr(part, name, function)

    above, add = PathPlan.to_parent, PathTensor.add_grad

    def without_above(plan: PathPlan, x_ND: Tensor) -> Tensor:
        plan.states_above = ()
        return above(plan, x_ND)

    def add_the_last_too_few(tensor: PathTensor, grad_PGK: Tensor) -> None:
        add(tensor, grad_PGK[:-1])

    def keep(tensor: PathTensor, depth: int, end: int) -> Tensor | None:
        return None if tensor.grad_PGK is None else tensor.grad_PGK[depth:end].clone()

    return {
        "no gradient of keys and values": patch(PathTensor, "take_grad", lambda *_: None),
        "gradients that are taken twice": patch(PathTensor, "take_grad", keep),
        "one token of the path left out": patch(PathTensor, "add_grad", add_the_last_too_few),
        "no gradient of boundary states": patch(PathPlan, "roots", lambda _: ([], [])),
        "no boundary states": patch(PathPlan, "to_parent", without_above),
        "keys of another branch": patch(PathStack, "restore", lambda *_: None),
        "only the loads of one segment": patch(Walk, "loads", lambda walk: iter([next(LOADS(walk))])),
    }


LOADS = Walk.loads


@pytest.mark.parametrize("mistake", planted(pytest.MonkeyPatch()))
def test_a_planted_mistake_fails(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, step = small_model(moe=MOE | {"aux_loss_weight": 0.5}), over_trees([wide_tree(3), wide_tree(2, 16)])
    walk = WalkConfig(segment_tokens=5)
    if mistake == "no boundary states":
        assert_walk_equals(model, step, walk, POLICY)
    planted(monkeypatch)[mistake]()
    with pytest.raises(AssertionError):
        assert_walk_equals(model, step, walk, POLICY)


@pytest.mark.parametrize("over", ["trees", "rows"])
def test_a_window_reaches_across_segments(over: str) -> None:
    attention = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "rotary_dim": 4}
    model = small_model(attention=attention | {"window": {"size": 6, "layers": (1,), "num_sinks": 2}})
    step = over_trees([wide_tree(4, 20)]) if over == "trees" else over_rows([23, 3], [9])
    assert_walk_equals(model, step, WalkConfig(segment_tokens=4), POLICY)


def test_recorded_routing_is_replayed_by_segment() -> None:
    tree = wide_tree(3)
    rng = np.random.default_rng(0)
    for index in range(3):
        experts = rng.permuted(np.tile(np.arange(4), (16, 2, 1)), axis=-1)[..., :2]
        tree.add(make_call([4] * 12, [index, 1, 2, 3, 4]), f"routed{index}", advantage=1.0, experts=experts)
    policy = POLICY.model_copy(update={"replay": "recorded"})
    assert_walk_equals(small_model(), over_trees([tree]), WalkConfig(segment_tokens=5), policy)


@pytest.mark.parametrize("part", ["adapters", "modules", "muon", "gradient biases"])
def test_a_walk_trains_whatever_is_trainable(part: str, tmp_path: Path) -> None:
    moe = MOE | ({"aux_loss_weight": 0.3, "bias_update": "gradient"} if part == "gradient biases" else {})
    model = small_model(moe=moe)
    if part == "adapters":
        attach(model, LoRAConfig(rank=2, targets=("q_proj", "v_proj", r"w[123]")), tmp_path)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1)
    if part == "modules":
        model.freeze_main()
    optimizer = OptimizerConfig(kind="muon" if part == "muon" else "adamw", eps=1e-2)
    for step in (over_rows([17, 3]), over_trees([wide_tree(4)])):
        done = [run(model, step, walk, POLICY, optimizer) for walk in (None, WalkConfig(segment_tokens=5))]
        ours, theirs = (found.engine.model.state_dict() for found in reversed(done))
        for name, weight in theirs.items():
            torch.testing.assert_close(ours[name], weight, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("stack", ["device", "host"])
def test_a_walk_in_bfloat16_is_near_the_step_at_once(stack: str) -> None:
    walk = WalkConfig.model_validate({"segment_tokens": 5, "stack": stack})
    # One expert: rounding cannot choose another.
    model = small_model(torch.bfloat16, moe={"num_experts": 1, "top_k": 1, "intermediate_size": 8})
    at_once, walked = (run(model, over_trees([wide_tree(5)]), by, POLICY).gradients for by in (None, walk))
    for name, expected in at_once.items():
        # Rounding to 8 bits, of other sums.
        error = (walked[name].float() - expected.float()).abs().max().item()
        # A router of one expert has no gradient but rounding.
        assert error <= 0.05 * max(expected.abs().max().item(), 1e-4), name


def test_a_module_gets_a_gradient_where_its_state_does() -> None:
    """So that a rank that walks and one with a blank batch reduce gradients in the same order."""
    above_1D, state_ND = torch.ones(1, 4, requires_grad=True), torch.ones(3, 4)
    for trains in (False, True):
        chain = Chain(2, 3, torch.device("cpu"))
        plan = PathPlan(PathStack(5), chain, depth=2, num_tokens=3, is_leaf=True, states_above=[above_1D])
        assert plan.to_parent(state_ND.clone().requires_grad_(trains)).requires_grad is trains


def test_logprobs_come_back_in_the_order_of_the_samples() -> None:
    found = []
    for walk in (None, WalkConfig(segment_tokens=4)):
        report = TrainEngine(small_model(), OptimizerConfig(), walk=walk).step([wide_tree(6), wide_tree(2)], lr=0.0)
        assert isinstance(report, StepReport)
        found.append(report.logprobs())
    for (one, expected), (other, logp) in zip(*found, strict=True):
        assert one.name == other.name
        np.testing.assert_allclose(logp, expected, rtol=1e-6)


def test_agreement_is_measured_by_a_walk_too() -> None:
    done = run(small_model(), over_rows([30, 4]), WalkConfig(segment_tokens=8))
    assert all(0.0 <= done.values[f"draft_agreement/{depth}"] <= 1.0 for depth in (1, 2))


# -- memory and work ---------------------------------------------------------------------------------------------------


@contextmanager
def watched_work(model: Transformer) -> Iterator[dict[str, int]]:
    """Tokens that the network computes, and the most bytes that autograd holds for a backward pass, weights aside."""
    work = {"tokens": 0, "bytes": 0, "most_bytes": 0}
    weights = {parameter.data_ptr() for parameter in model.parameters()}

    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            self.num_bytes = 0 if tensor.data_ptr() in weights else tensor.numel() * tensor.element_size()
            work["bytes"] += self.num_bytes
            work["most_bytes"] = max(work["most_bytes"], work["bytes"])

        def __del__(self) -> None:
            work["bytes"] -= self.num_bytes

    def count(_: object, inputs: tuple[Tensor, ...]) -> None:
        work["tokens"] += inputs[0].numel()

    handle = model.register_forward_pre_hook(count)
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        yield work
    handle.remove()


def work_of(trees: list[TokenTree], walk: WalkConfig | None, aux_loss_weight: float) -> dict[str, int]:
    model = small_model(moe=MOE | {"aux_loss_weight": aux_loss_weight})
    engine = TrainEngine(model, OptimizerConfig(), policy=POLICY, walk=walk)
    with watched_work(model) as work:
        engine.step(trees, lr=0.0)
    return work


def test_activations_do_not_grow_with_leaves_or_length() -> None:
    walk = WalkConfig(segment_tokens=12)
    few, many, longer = (
        work_of([wide_tree(*shape)], walk, 0.0)["most_bytes"] for shape in ((10, 48), (50, 48), (10, 120))
    )
    # Other leaves fill segments differently.
    assert many <= 1.01 * few
    # Only what attention saves for its keys grows with the path: the stack's own memory, and here the mask.
    assert longer <= 1.7 * few
    at_once = work_of([wide_tree(50, 48)], None, 0.0)["most_bytes"]
    assert at_once > 6 * many


@pytest.mark.parametrize("num_leaves", [1, 25])
def test_no_token_is_computed_more_than_twice(num_leaves: int) -> None:
    trees = [wide_tree(num_leaves, 30)]
    walk = WalkConfig(segment_tokens=10)
    num_tokens = trees[0].num_tokens
    # The balance loss needs all loads first; without it, leaves run on the way back only.
    assert work_of(trees, walk, 0.5)["tokens"] == 2 * num_tokens
    assert num_tokens + 30 <= work_of(trees, walk, 0.0)["tokens"] <= 2 * num_tokens


# -- configuration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({"recompute": "block", "walk": {}}, 'set recompute = "walk" or leave [walk] out'),
        ({"recompute": "walk", "walk": {"segment_tokens": 0}}, "greater than 0"),
    ],
)
def test_a_walk_that_cannot_be_is_refused(machine: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=message.replace("[", r"\[")):
        MachineConfig.model_validate(machine)
