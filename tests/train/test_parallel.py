"""Two processes and four, each with the whole network or with a slice of it, against one process with all their packs.

In float64 the order of sums is all that may differ, so tensors agree to 1e-12 of their largest element. The optimizer's
first moments are linear in the gradients, so they show an error of a gradient, its scale included.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from m2forge.errors import ConfigError, TrainingError
from m2forge.model.config import LoRAConfig
from m2forge.train.batch import make_batch
from m2forge.train.checkpoint import CheckpointStore, load_start, restore
from m2forge.train.config import CheckpointConfig, MeshConfig, WalkConfig
from m2forge.train.parallel import (
    SINGLE_RANK,
    ProcessRanks,
    Ranks,
    align,
    local,
    process_ranks,
    refuse_difference,
    refuse_drift,
)
from m2forge.train.position import Position
from tests.conftest import LONG
from tests.train.draw import draw_pack, small_model
from tests.train.processes import run_ranks
from tests.train.rank_case import (
    CPU,
    LENGTHS,
    SHARDED,
    Bug,
    Case,
    ContextBug,
    Over,
    RecordingEngine,
    make_engine,
    packs_of,
    run_case,
    train,
)

REPLICATED = MeshConfig(replicate="auto")
MESHES = {"replicated": REPLICATED, "sharded": SHARDED}
SIX = {"num_experts": 6, "aux_loss_weight": 0.1}
BALANCED = {"aux_loss_weight": 0.1}
THREE, NINE, SIX_HEADS = (
    {"num_heads": heads, "num_kv_heads": kv_heads} for heads, kv_heads in ((3, 1), (9, 3), (6, 2))
)
WINDOWED = {**NINE, "window": {"size": 3, "num_sinks": 1, "layers": (1,)}}
LEARNT_BIAS = {"bias_update": "gradient", "aux_loss_weight": 0.1}
ADAPTERS = LoRAConfig(rank=2, targets=("q_proj", "v_proj", r"w[123]"))
NUM_WALKS = 2 if LONG else 1
"""Steps of the longest walks."""
WALK, WALK_ON_HOST = WalkConfig(segment_tokens=6), WalkConfig(segment_tokens=6, stack="host")
DIVIDED = MeshConfig(shard="auto", expert=2)
SHARED, SHARED_DIVIDED = MeshConfig(context=2), MeshConfig(shard=2, context=2, expert=4)
SHARED_AND_SHARDED, SHARED_COPIES = MeshConfig(shard=2, context=2), MeshConfig(replicate="auto", context=2)
SHARED_BY_BOTH = MeshConfig(context=2, expert=2)
DIVIDED_BY_FOUR, DIVIDED_COPIES = MeshConfig(shard=4, expert=4), MeshConfig(replicate=2, shard=2, expert=2)
CASES = {
    "replicated": Case(REPLICATED, moe=BALANCED),
    "sharded": Case(moe=BALANCED),
    "replicated, over trees": Case(REPLICATED, "trees", moe=BALANCED),
    "sharded, over trees": Case(over="trees", moe=BALANCED, replay="recorded"),
    "sharded, uneven and empty slices": Case(
        vocab_size=33, moe={"num_experts": 1, "top_k": 1, "normalize": False}, offload="host"
    ),
    "sharded, muon, recomputed": Case(kind="muon", recompute="block"),
    "sharded, learnt bias, frozen main model": Case(moe=LEARNT_BIAS, frozen=True),
    "replicated, adapters, over trees": Case(REPLICATED, "trees", lora=ADAPTERS),
    "sharded, adapters, recomputed": Case(recompute="block", lora=ADAPTERS, kind="muon"),
    "replicated, walk over trees": Case(REPLICATED, "trees", walk=WALK, num_steps=1),
    "experts divided, replayed, muon, recomputed": Case(
        DIVIDED, "trees", kind="muon", recompute="block", moe=BALANCED, replay="recorded"
    ),
    "experts divided, walk over trees on the host, adapters, offloaded": Case(
        DIVIDED, "trees", walk=WALK_ON_HOST, lora=ADAPTERS, offload="host", num_steps=NUM_WALKS, seed=2
    ),
    "packs shared, walk on the host, recomputed": Case(
        SHARED, walk=WALK_ON_HOST, recompute="block", moe=BALANCED, num_steps=1
    ),
    "packs shared, experts divided, adapters, offloaded": Case(
        MeshConfig(context=2, expert=2), lora=ADAPTERS, offload="host", moe=BALANCED, seed=2
    ),
    "sharded, modules added, muon, learnt bias": Case(added="main", kind="muon", moe=LEARNT_BIAS, num_steps=3),
    "experts divided, modules added to a frozen main model, offloaded": Case(
        DIVIDED, added="mtp1", frozen=True, offload="host"
    ),
    "packs shared, experts divided, M2": Case(SHARED_BY_BOTH, preset="m2-tiny", moe=BALANCED, num_steps=1, seed=1),
    "packs shared by queries": Case(SHARED, attention=THREE, moe=BALANCED),
    "packs shared by queries, windows, walk": Case(SHARED, attention=WINDOWED, walk=WALK, moe=BALANCED, num_steps=1),
    "packs shared by queries, walk over trees, adapters": Case(
        SHARED, "trees", attention=THREE, walk=WALK, lora=ADAPTERS, num_steps=NUM_WALKS, seed=3
    ),
    "packs shared by queries, replayed, recomputed, experts divided": Case(
        SHARED_BY_BOTH, "trees", attention=NINE, recompute="block", moe=BALANCED, replay="recorded", seed=1
    ),
}
EVALUATED = {
    "replicated": (Case(REPLICATED), 11),
    "sharded": (Case(), 11),
    "sharded, walk": (Case(walk=WALK), 6),
    "packs shared": (Case(SHARED), 6),
    "packs shared, walk": (Case(SHARED, walk=WALK_ON_HOST), 3),
}
"""The most tokens that a forward pass of a rank has: of packs of 9, 7 and 11, in steps and in evaluations."""
if LONG:
    EVALUATED["replicated, walk"] = Case(REPLICATED, walk=WALK), 6
BOTH = MeshConfig(replicate=2, shard=2)
CASES_OF_FOUR = {
    "replicated and sharded, muon, adapters, over trees": Case(BOTH, "trees", kind="muon", lora=ADAPTERS),
    "experts divided and sharded, six, muon": Case(DIVIDED, kind="muon", moe=SIX),
    "experts divided and replicated, over trees": Case(DIVIDED_COPIES, "trees", replay="recorded", seed=3),
    "experts divided over all, walk, recomputed": Case(DIVIDED_BY_FOUR, walk=WALK, recompute="block", moe=BALANCED),
    "packs shared by heads and queries, walk over trees": Case(
        MeshConfig(context=4), "trees", attention=SIX_HEADS, walk=WALK, num_steps=1, seed=2
    ),
    "packs shared and sharded": Case(SHARED_AND_SHARDED, moe=BALANCED, seed=4),
    "packs shared and replicated, over trees": Case(SHARED_COPIES, "trees", moe=BALANCED, num_steps=1),
}
if LONG:
    DRAWN: list[tuple[int, Over]] = [(seed, over) for seed in range(4, 9) for over in ("rows", "trees")]
    CASES |= {
        "sharded, walk over trees": Case(over="trees", walk=WALK, num_steps=1),
        "sharded, compiled": Case(moe=BALANCED, is_compiled=True),
        "experts divided, packs shared, compiled": Case(SHARED_BY_BOTH, moe=BALANCED, num_steps=1, is_compiled=True),
        "sharded, muon, adapters, recomputed, compiled": Case(
            kind="muon", recompute="block", lora=ADAPTERS, is_compiled=True
        ),
        "sharded, walk over trees, compiled": Case(over="trees", walk=WALK, num_steps=1, is_compiled=True),
        "experts divided, replayed, compiled": Case(
            DIVIDED, "trees", moe=BALANCED, replay="recorded", is_compiled=True
        ),
        "sharded, walk, recomputed": Case(walk=WALK, recompute="block", moe=BALANCED, num_steps=1),
        "experts divided, M2": Case(DIVIDED, preset="m2-tiny", moe=BALANCED, num_steps=1, seed=1),
        "packs shared, walk over trees, adapters": Case(SHARED, "trees", walk=WALK, lora=ADAPTERS, num_steps=1, seed=3),
        "packs shared, M2": Case(SHARED, preset="m2-tiny", moe=BALANCED, num_steps=1),
        "packs shared, replayed, muon, recomputed": Case(
            SHARED, "trees", kind="muon", recompute="block", moe=BALANCED, replay="recorded", seed=1
        ),
        "packs shared, experts divided, drawn modules added": Case(SHARED_BY_BOTH, added="random", num_steps=3),
        "experts divided, learnt bias, frozen main model": Case(DIVIDED, moe=LEARNT_BIAS, frozen=True),
        "experts divided, M2, walk over trees, muon": Case(DIVIDED, "trees", preset="m2-tiny", walk=WALK, kind="muon"),
        **{f"experts divided, drawn {seed}, {over}": Case(DIVIDED, over, seed=seed) for seed, over in DRAWN},
        **{f"packs shared, drawn {seed}, {over}": Case(SHARED, over, seed=seed) for seed, over in DRAWN},
        **{
            f"packs shared by queries, drawn {seed}, {over}": Case(SHARED, over, attention=WINDOWED, seed=seed)
            for seed, over in DRAWN
        },
        "packs shared by queries, compiled": Case(SHARED, attention=THREE, num_steps=1, is_compiled=True),
        "packs shared by queries, walk over trees, compiled": Case(
            SHARED, "trees", attention=THREE, walk=WALK, num_steps=1, is_compiled=True
        ),
        "packs shared, learnt bias, frozen main model": Case(SHARED, moe=LEARNT_BIAS, frozen=True),
    }
    CASES_OF_FOUR |= {
        "replicated and sharded": Case(BOTH, moe=BALANCED),
        "replicated and sharded, muon, learnt bias": Case(BOTH, kind="muon", moe=LEARNT_BIAS),
        "packs shared by all, M2, over trees": Case(
            MeshConfig(context=4, expert=2), "trees", preset="m2-tiny", num_steps=1
        ),
        "packs shared by heads and queries": Case(MeshConfig(context=4), attention=SIX_HEADS, moe=BALANCED, seed=2),
        "packs shared by four for queries, over trees": Case(
            MeshConfig(context=4), "trees", attention=NINE, moe=BALANCED, num_steps=1
        ),
        "packs shared by queries and sharded": Case(SHARED_AND_SHARDED, attention=THREE, moe=BALANCED, seed=4),
        "experts divided and sharded, six, adapters": Case(DIVIDED, lora=ADAPTERS, moe={"num_experts": 6}),
        "experts divided over all, M2": Case(DIVIDED_BY_FOUR, preset="m2-tiny", moe=BALANCED, offload="host"),
        "experts divided and sharded, M2, over trees": Case(DIVIDED, "trees", preset="m2-tiny"),
        **{
            f"experts divided and {kind}, drawn {seed}, {over}": Case(mesh, over, seed=seed, moe=BALANCED)
            for seed, over in DRAWN
            for kind, mesh in {"sharded": DIVIDED, "replicated": DIVIDED_COPIES, "shared": SHARED_DIVIDED}.items()
        },
    }
PLANTED = {"replicated": Case(REPLICATED, bug="mean"), "sharded": Case(bug="mean")}
EXPERT_BUGS: tuple[Bug, ...] = ("mean of experts", "no gradient of weights", "no gradient of states", "wrong rank")
PLANTED_IN_EXPERTS = Case(DIVIDED, num_steps=1)
CONTEXT_BUGS: tuple[ContextBug, ...] = ("own tokens alone", "own parents alone", "counted twice", "next positions")
PLANTED_IN_CONTEXT = Case(SHARED, num_steps=1)
QUERY_BUGS: tuple[ContextBug, ...] = ("keys as received", "first queries", "no gradient of keys")
if LONG:
    QUERY_BUGS += CONTEXT_BUGS
PLANTED_IN_QUERIES = Case(SHARED, attention=THREE, num_steps=1)
LOW_PRECISION = Case(num_steps=1, moe=LEARNT_BIAS, dtype=torch.bfloat16)


def resume(case: Case, ranks: ProcessRanks, folder: Path, step: int) -> list[str]:
    """Go on with the checkpoint of a step and write the next; returns what differs in a bit when it is read again."""
    engine = load_engine(case, ranks, folder, step)
    train(engine, [step])
    CheckpointStore(folder, CheckpointConfig()).save(engine, Position(step=step + 1))
    assert checkpoint_path(folder, step + 1).is_dir()
    slots = load_engine(case, ranks, folder, step + 1).optimizer.slots
    return [
        name
        for name, slot in engine.optimizer.slots.items()
        if not torch.equal(slot.local, slots[name].local)
        or slot.num_steps != slots[name].num_steps
        or not all(torch.equal(tensor, slots[name].tensors[kind]) for kind, tensor in slot.tensors.items())
    ]


def load_engine(case: Case, ranks: Ranks, folder: Path, step: int) -> RecordingEngine:
    path = checkpoint_path(folder, step)
    engine = make_engine(case, ranks, load_start(path).build(CPU, torch.float64))
    restore(engine, path)
    return engine


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def count_rows(ranks: ProcessRanks) -> dict[str, int]:
    """Rows of hidden states that a forward pass sends, how many tokens have experts on how many ranks, and the number
    of their experts."""
    model = make_engine(Case(DIVIDED), ranks).model
    batch = make_batch(draw_pack(ranks.rank, [9, 7]), CPU)
    send, shapes = dist.all_to_all_single, []

    def record(received: Tensor, sent: Tensor, to: Any = None, of: Any = None, *, group: dist.ProcessGroup) -> None:
        shapes.append(tuple(sent.shape))
        send(received, sent, to, of, group=group)

    with patch.object(dist, "all_to_all_single", record), torch.no_grad():
        chosen_NLK = model(batch.tokens_N, batch.plan, with_mtp=False, returns_experts=True).experts_NLK
    rank_NLK = chosen_NLK // 2
    rows = [shape[0] for shape in shapes if shape[1:] == (model.config.hidden_size,)]
    return {
        "sent": sum(rows[::2]),
        "sent back": sum(rows[1::2]),
        "ranks": sum(int((rank_NLK == rank).any(-1).sum()) for rank in range(2)),
        "experts": chosen_NLK.numel(),
    }


def skip(ranks: ProcessRanks) -> tuple[float, bool]:
    """(norm of a gradient that is not finite, whether the step left all as it was), with the cause on rank 1 alone."""
    engine = make_engine(Case(), ranks)
    if ranks.rank:
        engine.optimizer.slots["norm.weight"].local[0] = math.inf
    before = {name: slot.local.clone() for name, slot in engine.optimizer.slots.items()}
    biases = {name: bias.clone() for name, bias in engine.model.named_buffers()}
    assert biases
    norm = engine.step_rows(packs_of(0, ranks), lr=1e-2).read()["grad_norm"]
    is_same = all(torch.equal(slot.local, before[name]) for name, slot in engine.optimizer.slots.items())
    return norm, is_same and all(torch.equal(bias, biases[name]) for name, bias in engine.model.named_buffers())


def evaluate(mesh: MeshConfig, ranks: Ranks) -> dict[str, float]:
    """Three packs, so that the second of two ranks runs a blank one in the second round."""
    engine = make_engine(Case(mesh, dtype=torch.float32), ranks)
    packs = [draw_pack(index, lengths, num_tags=2) for index, lengths in enumerate(LENGTHS)]
    return engine.eval_rows(packs, tag_names=("a", "b"))


def train_and_evaluate(case: Case, ranks: Ranks) -> tuple[list[dict[str, float]], int]:
    """Metrics of two steps and of the evaluation after each; the second step freezes the main model, as a phase may.
    Also the most tokens that a forward pass had."""
    engine = make_engine(case, ranks)
    packs = [draw_pack(index, lengths) for index, lengths in enumerate(LENGTHS)]
    found, sizes = list[dict[str, float]](), [0]
    engine.model.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[0]))
    for step, is_frozen in enumerate((False, True)):
        engine.model.freeze_main(is_frozen)
        mine = packs_of(step, ranks, sharing=case.mesh.context if isinstance(ranks, ProcessRanks) else 1)
        found.append(engine.step_rows(mine, lr=1e-2, mtp_weight=0.3).read())
        found.append(engine.eval_rows(packs))
    return found, max(sizes)


def compare_compiled(ranks: ProcessRanks) -> tuple[float, int]:
    """(the largest difference that compiled blocks make to a weight's first moment, number of graphs), of one block and
    one length."""
    moments = []
    for is_compiled in (False, True):
        case = Case(SHARED_BY_BOTH, is_compiled=is_compiled)
        engine = make_engine(case, ranks, small_model(num_layers=1, num_mtp=0))
        engine.step_rows([draw_pack(0, [5, 4])], lr=1e-2)
        slots = engine.optimizer.slots
        moments.append({name: slot.tensors["mean"] for name, slot in slots.items() if slot.local.numel()})
    return distance(moments[1], moments[0]), int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def drift(ranks: ProcessRanks) -> str:
    model = small_model()
    align(model, ranks)
    if ranks.rank:
        model.norm.weight.data[3] += 1e-15
    with pytest.raises(TrainingError) as caught:
        refuse_drift(model, ranks)
    return str(caught.value)


def drift_of_shard(ranks: ProcessRanks) -> str:
    """One element of the second replica differs."""
    model = make_engine(Case(BOTH), ranks).model
    refuse_drift(model, ranks)
    if ranks.rank == 3:
        local(model.norm.weight.data)[0] += 1e-15
    with pytest.raises(TrainingError) as caught:
        refuse_drift(model, ranks)
    return str(caught.value)


def interrupt(ranks: ProcessRanks) -> str:
    """What the step after an interrupted one says, which would train the gradients of both."""
    engine = make_engine(Case(BOTH), ranks)
    with patch.object(engine, "_update", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        engine.step_rows(packs_of(0, ranks), lr=1e-2)
    with pytest.raises(TrainingError) as caught:
        engine.step_rows(packs_of(0, ranks), lr=1e-2)
    return str(caught.value)


def misfit(ranks: ProcessRanks) -> str:
    with pytest.raises(ConfigError) as caught:
        align(small_model(num_mtp=ranks.rank), ranks)
    return str(caught.value)


def scenario(ranks: ProcessRanks, folder: Path) -> dict[str, Any]:
    cases = CASES | {f"planted in {name}": case for name, case in PLANTED.items()} | {"bfloat16": LOW_PRECISION}
    cases |= {bug: replace(PLANTED_IN_EXPERTS, bug=bug) for bug in EXPERT_BUGS}
    cases |= {bug: replace(PLANTED_IN_CONTEXT, context_bug=bug) for bug in CONTEXT_BUGS}
    cases |= {f"queries, {bug}": replace(PLANTED_IN_QUERIES, context_bug=bug) for bug in QUERY_BUGS}
    outcomes: dict[str, Any] = {name: run_case(case, ranks) for name, case in cases.items()}
    outcomes |= {"drift": drift(ranks), "misfit": misfit(ranks), "skip": skip(ranks), "rows": count_rows(ranks)}
    outcomes["compiled"] = compare_compiled(ranks)
    for name, mesh in MESHES.items():
        outcomes[f"evaluation, {name}"] = evaluate(mesh, ranks)
    for name, (case, _) in EVALUATED.items():
        outcomes[f"evaluation between steps, {name}"] = train_and_evaluate(case, ranks)
    return outcomes | {
        "resumed": resume(Case(), ranks, folder / "checkpoints", 1),
        "resumed, experts divided": resume(Case(DIVIDED), ranks, folder / "checkpoints", 2),
        "resumed, packs shared": resume(Case(SHARED), ranks, folder / "checkpoints", 3),
    }


def scenario_of_four(ranks: ProcessRanks, folder: Path) -> dict[str, Any]:
    outcomes: dict[str, Any] = {name: run_case(case, ranks) for name, case in CASES_OF_FOUR.items()}
    return outcomes | {
        "drift of a shard": drift_of_shard(ranks),
        "interrupted": interrupt(ranks),
        "resumed": resume(Case(DIVIDED, moe=SIX, kind="muon"), ranks, folder / "checkpoints of six", 1),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Any:
    """What each rank made of everything above, by rank: all in one go, because processes start slowly."""
    save_first_step(Case(), folder / "checkpoints")
    return run_ranks(partial(scenario, folder=folder), folder / "processes")


def save_first_step(case: Case, folder: Path) -> None:
    engine = make_engine(case, SINGLE_RANK)
    train(engine, [0])
    CheckpointStore(folder, CheckpointConfig()).save(engine, Position(step=1))


def distance(ours: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest difference, relative to the largest element of the tensor it is in."""
    assert ours.keys() == expected.keys()
    scales = {name: tensor.abs().max().clamp(min=1e-30) for name, tensor in expected.items()}
    # Not Python's max, which overlooks a NaN.
    return float(torch.stack([(ours[name] - expected[name]).abs().max() / scales[name] for name in expected]).max())


def compare(case: Case, outcomes: Sequence[Any]) -> None:
    """What the ranks made of a case, with what one process makes of it."""
    expected = run_case(case, SINGLE_RANK)
    for ours in outcomes:
        assert distance(ours["metrics"], expected["metrics"]) <= 1e-12
        assert torch.equal(ours["loads"], expected["loads"])
        assert ours["num_steps"] == expected["num_steps"]
        assert ours["sharded"] == (list(expected["num_steps"]) if case.mesh.is_sharded else [])
    weights = outcomes[0]["weights"]
    # AdamW divides a gradient by its size, so an element's error is relative to its own gradient, not to the largest of
    # its tensor; those of M2 span many orders of magnitude.
    assert distance(weights, expected["weights"]) <= (1e-12 if case.preset is None else 1e-9)
    if case.moe.get("bias_update") != "gradient":
        biases = [name for name in weights if name.endswith("router.bias")]
        assert all(torch.equal(weights[name], expected["weights"][name]) for name in biases)
    assert distance(outcomes[0]["state"], expected["state"]) <= 1e-12
    if case.mesh.context == len(outcomes):
        for ours, theirs in zip(outcomes[0]["logprobs"], expected["logprobs"], strict=True):
            # In float32.
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process_does(outcomes: Any, name: str) -> None:
    compare(CASES[name], [outcome[name] for outcome in outcomes])


def test_compiled_blocks_of_two_ranks_give_the_same_gradients(outcomes: Any) -> None:
    for outcome in outcomes:
        difference, num_graphs = outcome["compiled"]
        assert difference < 1e-12
        assert num_graphs


def test_four_ranks_train_as_one_process_does(folder: Path) -> None:
    save_first_step(Case(moe=SIX, kind="muon"), folder / "checkpoints of six")
    outcomes: Any = run_ranks(partial(scenario_of_four, folder=folder), folder / "four", num_ranks=4)
    for name, case in CASES_OF_FOUR.items():
        compare(case, [outcome[name] for outcome in outcomes])
    assert all("no longer hold the same weights" in outcome["drift of a shard"] for outcome in outcomes)
    assert all("a step was interrupted" in outcome["interrupted"] for outcome in outcomes)
    assert [outcome["resumed"] for outcome in outcomes] == [[]] * 4


@pytest.mark.parametrize("name", EVALUATED)
def test_ranks_evaluate_between_steps_as_one_process_does(outcomes: Any, name: str) -> None:
    case, most_tokens = EVALUATED[name]
    expected, _ = train_and_evaluate(case, SINGLE_RANK)
    for outcome in outcomes:
        found, num_tokens = outcome[f"evaluation between steps, {name}"]
        assert num_tokens <= most_tokens
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", MESHES)
def test_the_held_out_loss_has_the_same_bits_on_two_ranks(outcomes: Any, name: str) -> None:
    expected = evaluate(MESHES[name], SINGLE_RANK)
    assert {"loss", "loss/a", "loss/b", "mtp_loss/2"} <= expected.keys()
    assert [outcome[f"evaluation, {name}"] for outcome in outcomes] == [expected, expected]


@pytest.mark.parametrize("name", PLANTED)
def test_an_average_over_the_ranks_would_be_noticed(outcomes: Any, name: str) -> None:
    case = PLANTED[name]
    expected, wrong = run_case(case, SINGLE_RANK), outcomes[0][f"planted in {name}"]
    # AdamW does not care for the scale of all gradients: weights tell only where some steps are clipped, not all.
    is_clipped = expected["metrics"]["grad_norm"] > case.optimizer.max_norm
    assert is_clipped.any()
    assert not is_clipped.all()
    assert distance(wrong["metrics"], expected["metrics"]) > 0.1
    assert distance(wrong["weights"], expected["weights"]) > 1e-6


@pytest.mark.parametrize("bug", EXPERT_BUGS)
def test_a_mistake_of_divided_experts_would_be_noticed(outcomes: Any, bug: Bug) -> None:
    expected, wrong = run_case(PLANTED_IN_EXPERTS, SINGLE_RANK), outcomes[0][bug]
    # Moments, not norms of gradients: experts are a small part of the norms.
    assert distance(wrong["state"], expected["state"]) > 0.1


@pytest.mark.parametrize("bug", CONTEXT_BUGS)
def test_a_mistake_with_shared_packs_would_be_noticed(outcomes: Any, bug: ContextBug) -> None:
    expected, wrong = run_case(PLANTED_IN_CONTEXT, SINGLE_RANK), outcomes[0][bug]
    assert distance(wrong["state"], expected["state"]) > 0.1


@pytest.mark.parametrize("bug", QUERY_BUGS)
def test_a_mistake_with_divided_queries_would_be_noticed(outcomes: Any, bug: ContextBug) -> None:
    expected, wrong = run_case(PLANTED_IN_QUERIES, SINGLE_RANK), outcomes[0][f"queries, {bug}"]
    assert distance(wrong["state"], expected["state"]) > 0.1


def test_a_token_travels_once_to_each_rank(outcomes: Any) -> None:
    rows = [outcome["rows"] for outcome in outcomes]
    for found in rows:
        assert found["sent"] == found["ranks"] < found["experts"]
    assert sum(found["sent back"] for found in rows) == sum(found["sent"] for found in rows)


def test_a_run_goes_on_with_another_mesh(outcomes: Any, folder: Path) -> None:
    names = ("resumed", "resumed, experts divided", "resumed, packs shared")
    assert [outcome[name] for outcome in outcomes for name in names] == [[]] * 6
    expected = make_engine(Case(), SINGLE_RANK)
    train(expected, [0, 1, 2, 3])
    engine = load_engine(Case(), SINGLE_RANK, folder / "checkpoints", 4)
    ours, theirs = train(engine, [4]), train(expected, [4])
    for key in ("metrics", "weights", "state"):
        assert distance(ours[key], theirs[key]) <= 1e-12
    assert ours["num_steps"] == theirs["num_steps"]


def test_a_bias_of_higher_precision_is_not_split(outcomes: Any) -> None:
    ours, expected = outcomes[0]["bfloat16"], run_case(LOW_PRECISION, SINGLE_RANK)
    whole = expected["num_steps"].keys() - set(ours["sharded"])
    assert whole == {name for name in expected["num_steps"] if name.endswith("router.bias")}
    # bfloat16 has two to three digits, and a pack's gradient is rounded to it before or behind the sum over ranks.
    torch.testing.assert_close(
        ours["metrics"]["grad_norm"], expected["metrics"]["grad_norm"], rtol=2e-2, atol=0, check_dtype=False
    )
    for name in whole:
        torch.testing.assert_close(ours["weights"][name], expected["weights"][name], rtol=0, atol=1e-3)


def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(outcomes: Any) -> None:
    for outcome in outcomes:
        norm, is_same = outcome["skip"]
        assert not math.isfinite(norm)
        assert is_same


def test_ranks_that_differ_are_told(outcomes: Any) -> None:
    for outcome in outcomes:
        assert "no longer hold the same weights" in outcome["drift"]
        assert "built different networks" in outcome["misfit"]


def test_alone_nothing_is_sent() -> None:
    x = torch.ones(2)
    assert (SINGLE_RANK.rank, SINGLE_RANK.num_ranks, SINGLE_RANK.max_int(3)) == (0, 1, 3)
    assert SINGLE_RANK.sum(x) is x


def test_a_launcher_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match=r"needs \['WORLD_SIZE'\] in the environment; start it by torchrun"):
        process_ranks(CPU, SHARDED).__enter__()
    for name, value in {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with process_ranks(CPU, SHARDED, timeout_s=60) as ranks:
        assert (ranks.rank, ranks.num_ranks, ranks.max_int(5)) == (0, 1, 5)
        assert ranks.sum(torch.tensor([1, 2])).tolist() == [1, 2]


class Rehearsed:
    """Two ranks in one process: answers a question as if the other rank had asked with `theirs`."""

    rank, num_ranks = 0, 2

    def __init__(self, theirs: int | None = None) -> None:
        self.theirs, self.asked = theirs, 0

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def max_int(self, value: int) -> int:
        self.asked = max(self.asked, value)
        return value if self.theirs is None else max(value, self.theirs if value > 0 else -self.theirs)


def test_experts_in_another_order_are_drift() -> None:
    model, other = small_model(), small_model()
    ours = Rehearsed()
    refuse_drift(model, ours)
    refuse_drift(other, Rehearsed(ours.asked))
    ffn = other.blocks[0].get_submodule("ffn")
    w13, w2 = ffn.get_parameter("w13"), ffn.get_parameter("w2")
    for weight in (w13, w2):
        weight.data = weight.data.flip(0)
    with pytest.raises(TrainingError, match="no longer hold the same weights"):
        refuse_drift(other, Rehearsed(ours.asked))


def test_ranks_that_see_different_checkpoints_are_refused() -> None:
    ours = Rehearsed()
    refuse_difference("checkpoints", "step 4", ours)
    refuse_difference("checkpoints", "step 4", Rehearsed(ours.asked))
    with pytest.raises(ConfigError, match="different checkpoints"):
        refuse_difference("checkpoints", "step 8", Rehearsed(ours.asked))
