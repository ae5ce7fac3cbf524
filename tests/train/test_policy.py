"""Steps over trees equal a plain loop over independent rows, in float64."""

import copy
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2forge.model.preset import preset
from m2forge.records import Call, Sampling
from m2forge.train.batch import make_tree_batch
from m2forge.train.checkpoint import CheckpointStore, load_start, restore
from m2forge.train.config import CheckpointConfig, OptimizerConfig, PolicyConfig, RouterBias
from m2forge.train.engine import TrainEngine
from m2forge.train.loss.policy import policy_loss
from m2forge.train.position import Position
from m2forge.tree.flat import flatten
from m2forge.tree.pack import pack_trees
from m2forge.tree.token_tree import TokenTree
from tests.conftest import FEW_CASES, LONG
from tests.model.draw_tree import drawn_network
from tests.train.draw import VOCAB, small_model
from tests.train.naive import forests, make_tree, watch_gradients
from tests.train.tree_step import CONFIG, assert_same_step
from tests.tree.draw import make_call

MOE = {"num_experts": 4, "top_k": 2, "intermediate_size": 8}


def some_forest(weight: float = 1.0) -> list[TokenTree]:
    calls = [([1, 2], [3, 4, 0]), ([1, 2, 3, 4, 0, 2], [1, 1]), ([1, 2], [3, 1]), ([4], [2, 2, 2]), ([1, 2], [3, 4, 0])]
    return [
        make_tree([make_call(prompt, response, seed) for seed, (prompt, response) in enumerate(calls)], weight=weight)
    ]


@FEW_CASES
@given(
    trees=forests(),
    loss=st.sampled_from(("cispo", "ppo_clip", "sft")),
    mtp_loss=st.sampled_from(("ce", "topk_kl", "topk_acceptance")),
    aux_loss_weight=st.sampled_from((0.0, 0.5)),
    router_bias=st.sampled_from(("frozen", "balanced")),
    slack=st.integers(0, 6),
)
def test_a_step_over_trees_is_a_step_over_independent_rows(
    trees: list[TokenTree], loss: str, mtp_loss: str, aux_loss_weight: float, router_bias: RouterBias, slack: int
) -> None:
    longest = max(sample.num_tokens for tree in trees for sample in tree.samples)
    config = PolicyConfig.model_validate(
        {"loss": loss, "mtp_loss": mtp_loss, "mtp_weight": 0.4, "mtp_gradient": "all", "mtp_top_k": 5, "max_ratio": 2.0}
        | {"pack_tokens": longest + slack}
    )
    model = small_model(moe=MOE | {"aux_loss_weight": aux_loss_weight})
    assert_same_step(model, trees, config, router_bias)


@settings(max_examples=200 if LONG else 4)
@given(
    trees=forests(ids=(3, 701, 88, 1023, 412)),
    loss=st.sampled_from(("cispo", "ppo_clip")),
    mtp_loss=st.sampled_from(("ce", "topk_kl", "topk_acceptance")),
    slack=st.integers(0, 6),
    seed=st.integers(0, 2**16),
)
def test_a_tree_step_of_m2_tiny_equals_independent_rows(
    trees: list[TokenTree], loss: str, mtp_loss: str, slack: int, seed: int
) -> None:
    longest = max(sample.num_tokens for tree in trees for sample in tree.samples)
    config = PolicyConfig.model_validate(
        {"loss": loss, "mtp_loss": mtp_loss, "mtp_weight": 0.4, "mtp_gradient": "all", "max_ratio": 2.0}
        | {"pack_tokens": longest + slack}
    )
    tiny = preset("m2-tiny")
    assert tiny.moe is not None
    moe = tiny.moe.model_copy(update={"aux_loss_weight": 0.5})
    model = drawn_network(tiny.model_copy(update={"num_mtp": 2, "moe": moe}), seed)
    assert_same_step(model, trees, config, "balanced")


def test_drafts_trained_alone_leave_the_policy_unchanged() -> None:
    def gradients(**changes: float | str) -> dict[str, torch.Tensor]:
        engine = TrainEngine(small_model(), CONFIG, policy=PolicyConfig.model_validate(changes))
        found = watch_gradients(engine)
        engine.step(some_forest(), lr=1e-2)
        return found

    without, alone = gradients(mtp_weight=0.0), gradients(mtp_weight=0.4)
    together = gradients(mtp_weight=0.4, mtp_gradient="all")
    modules = {name for name in together if name.startswith("mtp.")}
    assert modules
    assert not modules & without.keys()
    for name, expected in together.items():
        torch.testing.assert_close(alone[name], expected if name in modules else without[name], rtol=0, atol=0)
    assert not torch.equal(alone["head.weight"], together["head.weight"])


@pytest.mark.parametrize("mtp_loss", ["ce", "topk_kl"])
def test_padding_changes_nothing(mtp_loss: str) -> None:
    config = PolicyConfig.model_validate({"mtp_loss": mtp_loss, "replay": "recorded"})
    model = small_model()
    tree = some_forest()[0]
    tree.add(make_call([1, 3], [2]), "routed", advantage=1.0, experts=np.tile(np.array([0, 3]), (2, 2, 1)))
    flat = flatten(tree)
    found = []
    for length in (None, flat.num_tokens + 7):
        batch = make_tree_batch(flat, torch.device("cpu"), config, total_weight=3.0, dtype=torch.float64, length=length)
        output = model(batch.tokens_N, batch.plan, experts_NLK=batch.experts_NLK)
        loss = policy_loss(model, output, batch, config)
        found.append((loss.total.detach(), output.load_LE, *torch.autograd.grad(loss.total, list(model.parameters()))))
    for alone, padded in zip(*found, strict=True):
        torch.testing.assert_close(alone, padded, rtol=1e-10, atol=1e-13)


def test_the_ratio_of_weights_matters_not_their_size() -> None:
    engines = [TrainEngine(small_model(), CONFIG) for _ in range(2)]
    gradients = [watch_gradients(engine) for engine in engines]
    for engine, weight in zip(engines, (1.0, 1 / 300), strict=True):
        engine.step(some_forest(weight), lr=0.0)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-9, atol=1e-14)


def test_recorded_routing_is_repeated_and_can_be_ignored() -> None:
    model = small_model()
    tree = TokenTree(VOCAB)
    # Experts that the router would not choose for every token.
    experts = np.tile(np.array([0, 3]), (4, 2, 1))
    tree.add(make_call([1, 2], [3, 4, 5]), "a", advantage=1.0, experts=experts)
    loads = {}
    for replay in ("none", "recorded"):
        policy = PolicyConfig.model_validate({"replay": replay})
        values = TrainEngine(copy.deepcopy(model), CONFIG, policy=policy).step([tree], lr=0.0).read()
        loads[replay] = [values[f"expert_load_max/{layer}"] for layer in range(2)]
    # Four of five tokens have both their choices recorded; the last one chooses for itself.
    assert all(share >= 0.4 for share in loads["recorded"])
    assert loads["recorded"] != loads["none"]


# -- what is refused --------------------------------------------------------------------------------------------------


REFUSED = {
    "truncated": r"sampling: expected none cut off, received Sampling\(temperature=1\.0, top_p=0\.9",
    "greedy": "temperature: expected a number above 0, received 0",
    "foreign": "expected ids below the network's vocabulary of 32, received 40",
    "long": "expected at most pack_tokens, 20 tokens, received 23",
    "weightless": "weight: expected 1e-12 to 1e.12, received 0.0",
    "enormous": "advantage: expected at most 1e.06 either way, received 1e.39",
    "overweight": "weight: expected 1e-12 to 1e.12, received 1e.308",
    "frozen": "temperature: expected 0.01 to 100, received 1e-40",
    "impossible": "logprobs: expected -10000 or more, received -1e.38",
}


def mixed_tree() -> TokenTree:
    tree = TokenTree(64)
    routed = np.tile(np.array([1, 2]), (3, 2, 1))
    tree.add(make_call([1, 2], [3, 4, 5], 0), "good", advantage=1.0, experts=routed)
    tree.add(sampled(make_call([1, 2], [3, 4, 6], 1), Sampling(top_p=0.9)), "truncated", advantage=1.0)
    tree.add(sampled(make_call([1, 2], [3, 7], 1), Sampling(0.0)), "greedy", advantage=1.0)
    tree.add(make_call([1, 2, 40], [3], 0), "foreign", advantage=1.0)
    tree.add(make_call([1, 2, 3], [3] * 20, 0), "long", advantage=1.0)
    tree.add(make_call([1, 2, 3], [9], 0), "weightless", advantage=1.0, weight=0.0)
    tree.add(make_call([1, 2, 3, 4], [8, 9], 0), "also good", advantage=-2.0, weight=2.0)
    tree.add(make_call([1, 2, 3], [11, 12], 0), "enormous", advantage=1e39)
    tree.add(make_call([1, 2, 3], [11, 12], 0), "overweight", advantage=1.0, weight=1e308)
    tree.add(sampled(make_call([1, 2, 3], [11, 12], 0), Sampling(1e-40)), "frozen", advantage=1.0)
    impossible = replace(make_call([1, 2, 3], [11], 0), logprobs=np.array([-1e38], np.float32))
    tree.add(impossible, "impossible", advantage=1.0)
    return tree


def sampled(call: Call, sampling: Sampling) -> Call:
    return replace(call, sampling=sampling)


def test_untrainable_samples_are_refused_and_the_rest_trains() -> None:
    policy = PolicyConfig(pack_tokens=20, replay="recorded")
    engine, alone = (TrainEngine(small_model(), CONFIG, policy=policy) for _ in range(2))
    empty, mixed = TokenTree(VOCAB), mixed_tree()
    report = engine.step([empty, mixed], lr=1e-2)
    assert {problem.name for problem in report.problems} == set(REFUSED)
    for problem in report.problems:
        assert problem.group == "1"
        assert re.search(REFUSED[problem.name], problem.reason), problem
        assert problem.name in problem.reason
    good = TokenTree(VOCAB)
    for index in (0, 6):
        sample = mixed.samples[index]
        experts = np.tile(np.array([1, 2]), (3, 2, 1))
        good.add(mixed.call(index), sample.name, advantage=sample.advantage, weight=sample.weight, experts=experts)
    alone.step([good], lr=1e-2)
    assert_same_weights(engine, alone)
    assert mixed == mixed_tree()


def test_truncated_sampling_may_be_allowed_and_sft_takes_all() -> None:
    tree = TokenTree(VOCAB)
    tree.add(sampled(make_call([1], [2, 3]), Sampling(top_k=4)), "truncated")
    tree.add(sampled(make_call([1], [2, 4]), Sampling(0.0)), "greedy")
    allow = PolicyConfig(truncated_sampling="allow")
    report = TrainEngine(small_model(), CONFIG, policy=allow).step([tree], lr=0.0)
    assert [problem.name for problem in report.problems] == ["greedy"]
    assert TrainEngine(small_model(), CONFIG, policy=PolicyConfig(loss="sft")).step([tree], lr=0.0).problems == ()


def test_routing_recorded_of_another_network_is_refused() -> None:
    tree = TokenTree(VOCAB)
    tree.add(make_call([1], [2, 3]), "a", experts=np.zeros((2, 3, 2), np.int64))
    (problem,) = TrainEngine(small_model(), CONFIG, policy=PolicyConfig(replay="recorded")).step([tree], lr=0).problems
    assert "experts: expected (2, 2) (layers, chosen) per token, received (3, 2)" in problem.reason
    # Nobody reads it without replay.
    assert TrainEngine(small_model(), CONFIG).step([tree], lr=0.0).problems == ()


@pytest.mark.parametrize("bad", [[0, 4], [1, 1]])
def test_impossible_routing_is_unknown_and_hurts_no_neighbour(bad: list[int]) -> None:
    right, wrong = (np.tile(np.array(row), (4, 2, 1)) for row in ([0, 3], bad))
    prefix = np.tile(np.array([0, 3]), (2, 2, 1))
    policy = PolicyConfig(replay="recorded")
    trees = []
    for experts in (np.concatenate((prefix, wrong[2:])), prefix):
        tree = TokenTree(VOCAB)
        tree.add(make_call([1, 2], [3, 4, 5]), "a", advantage=1.0, experts=experts)
        tree.add(make_call([1, 2], [6, 7, 5]), "b", advantage=-1.0, experts=right)
        trees.append(tree)
    engines = [TrainEngine(small_model(), CONFIG, policy=policy) for _ in trees]
    reports = [engine.step([tree], lr=1e-2) for engine, tree in zip(engines, trees, strict=True)]
    assert all(report.problems == () for report in reports)
    # Of eight tokens two are shared and two more are b's.
    assert [report.read()["replayed_share"] for report in reports] == [0.5, 0.5]
    assert_same_weights(*engines)


def test_an_empty_step_changes_nothing_and_says_so() -> None:
    engine = TrainEngine(small_model(), CONFIG)
    before = copy.deepcopy(engine.model.state_dict())
    actionless, refused = TokenTree(VOCAB), TokenTree(VOCAB)
    actionless.add(make_call([1, 2], []), "a")
    refused.add(make_call([1, 2], [3]), "b", weight=0.0)
    report = engine.step([actionless, refused], lr=1e-2)
    assert report.is_empty
    assert [problem.name for problem in report.problems] == ["b"]
    assert report.read()["num_edges"] == 0
    assert all(torch.equal(weight, before[name]) for name, weight in engine.model.state_dict().items())
    assert all(slot.num_steps == 0 for slot in engine.optimizer.slots.values())


def test_a_step_that_was_broken_off_leaves_no_gradient_behind() -> None:
    policy = PolicyConfig(pack_tokens=8)
    engine, other = (TrainEngine(small_model(), CONFIG, policy=policy) for _ in range(2))
    packs = iter((False, True))

    def fail_in_the_second_pack(*_: object) -> None:
        if next(packs):
            raise MemoryError("full")

    handle = engine.model.register_forward_pre_hook(fail_in_the_second_pack)
    with pytest.raises(MemoryError):
        engine.step(some_forest(), lr=1e-2)
    handle.remove()
    engine.step(some_forest(), lr=1e-2)
    other.step(some_forest(), lr=1e-2)
    assert_same_weights(engine, other)


@pytest.mark.parametrize("lr", [math.nan, math.inf, -1.0])
def test_an_invalid_learning_rate_is_refused(lr: float) -> None:
    with pytest.raises(ValueError, match="rate"):
        TrainEngine(small_model(), CONFIG).step(some_forest(), lr=lr)


# -- the run around it ------------------------------------------------------------------------------------------------


def assert_same_weights(engine: TrainEngine, other: TrainEngine) -> None:
    theirs = other.model.state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in engine.model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_on_trees_goes_on_with_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    policy = PolicyConfig(pack_tokens=12)
    engine = TrainEngine(small_model(dtype), OptimizerConfig(), policy=policy)
    trees = some_forest()
    assert len(pack_trees(trees, policy.pack_tokens)) > 1
    for _ in range(2):
        engine.step(trees, lr=1e-2)
    store = CheckpointStore(tmp_path, CheckpointConfig())
    store.save(engine, Position(step=2))
    folder = store.newest()
    assert folder is not None
    again = TrainEngine(load_start(folder).build(torch.device("cpu"), dtype), OptimizerConfig(), policy=policy)
    restore(again, folder)
    for _ in range(2):
        values = [each.step(trees, lr=1e-2).read() for each in (engine, again)]
        assert values[0] == values[1]
    assert_same_weights(engine, again)


@pytest.mark.parametrize("loss", ["cispo", "ppo_clip", "sft"])
def test_training_raises_what_did_well(loss: str) -> None:
    good, bad = make_call([1, 2], [3, 4]), make_call([1, 2], [5, 6])
    tree = TokenTree(VOCAB)
    tree.add(good, "good", advantage=1.0)
    if loss != "sft":
        tree.add(bad, "bad", advantage=-1.0)
    engine = TrainEngine(small_model(), OptimizerConfig(), policy=PolicyConfig.model_validate({"loss": loss}))
    path = torch.tensor([[1, 2, 3, 4]])

    def chance() -> float:
        with torch.no_grad():
            logp = engine.model.logits(engine.model(path).hidden_ND).log_softmax(-1)
        return (logp[1, 3] + logp[2, 4]).item()

    before = chance()
    for _ in range(20):
        values = engine.step([tree], lr=3e-3, version=3).read()
    assert chance() > before + 1
    assert values["version_lag"] == pytest.approx(
        float((3 - np.concatenate([s.versions for s in tree.samples])).mean())
    )


def test_drafts_come_nearer_to_the_policy() -> None:
    tree = TokenTree(VOCAB)
    tree.add(make_call([1, 2], [3, 4, 7, 8]), "a", advantage=0.0)
    engine = TrainEngine(small_model(), OptimizerConfig(), policy=PolicyConfig(mtp_weight=1.0))
    losses = [engine.step([tree], lr=1e-2).read() for _ in range(20)]
    assert losses[-1]["mtp_loss/1"] < losses[0]["mtp_loss/1"] / 3
    assert losses[-1]["mtp_loss/2"] < losses[0]["mtp_loss/2"] / 3
