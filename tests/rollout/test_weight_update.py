"""Weights that arrive while completions are in flight: every token stays exact, whatever becomes of them."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import CheckpointError
from m2forge.model.checkpoint import load_model, save_model
from m2forge.protocols import Prompt
from m2forge.records import FinishReason, PolicyVersion
from m2forge.rollout.config import OnWeightUpdate, StaleCache
from m2forge.weights.store import WeightStore
from tests.conftest import FEW_CASES
from tests.model.generate import generate
from tests.rollout.draw import (
    GREEDY,
    TINY,
    Completions,
    check_completion,
    check_end,
    collect,
    finish,
    ids_of,
    network,
    serve,
    tiny,
    traffics,
    version,
)


@pytest.mark.parametrize("on_weight_update", ["finish", "continue", "restart"])
@FEW_CASES
@given(data=st.data(), stale_cache=st.sampled_from(("drop", "keep")))
def test_weights_that_arrive_leave_every_token_exact(
    on_weight_update: OnWeightUpdate, stale_cache: StaleCache, data: st.DataObject
) -> None:
    traffic = data.draw(traffics(on_weight_update=on_weight_update, stale_cache=stale_cache, max_loads=2))
    served = serve(traffic)
    for place, arrival in enumerate(traffic.arrivals):
        for sample in range(arrival.prompt.num_samples):
            key = str(place), sample
            completion = served.completions[key]
            check_end(completion, arrival.prompt, arrival.abort_step is not None)
            check_completion(served, key, arrival.prompt)
            assert completion.versions == sorted(completion.versions)
            if on_weight_update != "continue":
                assert len(set(completion.versions)) <= 1
            if on_weight_update == "restart":
                assert completion.num_chunks == 1
            if (on_weight_update, stale_cache) != ("continue", "keep"):
                assert all(len(runs) == 1 for runs in served.computed_by[key])
    assert served.core.version.step == len(traffic.load_steps)


def test_a_completion_keeps_its_cache_across_an_update_if_set() -> None:
    for stale_cache, num_recomputed in (("keep", 0), ("drop", 6)):
        core = tiny(stale_cache=stale_cache)
        core.add("a", Prompt(ids_of(1, 2, 3, 4, 5), 4, GREEDY))
        core.step()
        core.step()
        core.load(network(TINY, 1).state_dict(), version(1))
        completion = finish(core)["a", 0]
        assert completion.versions == [1, 1]  # of the tokens after the load
        assert core.metrics()["total_computed_tokens"] == 5 + 3 + num_recomputed


@pytest.mark.parametrize(("stale_cache", "num_cached"), [("drop", 0), ("keep", 9)])
def test_weights_that_come_back_find_their_cache_if_it_was_kept(stale_cache: StaleCache, num_cached: int) -> None:
    core = tiny(stale_cache=stale_cache)
    for step in (0, 1, 0):
        core.load(network(TINY, step).state_dict(), version(step))
        core.add("a", Prompt(ids_of(*range(10)), 3, GREEDY))
        first = core.step()
        ((_, chunk),) = first
        completions: Completions = {}
        collect(completions, first)
        while not core.is_idle:
            collect(completions, core.step())
        assert completions["a", 0].ids == generate(network(TINY, step), range(10), max_new_tokens=3)
    assert chunk.num_cached == num_cached


def test_a_repeated_step_with_other_weights_reuses_no_lost_cache() -> None:
    core, prompt = tiny(stale_cache="keep"), Prompt(ids_of(*range(10)), 3, GREEDY)
    for seed, branch in ((1, "lost"), (2, "again")):
        core.load(network(TINY, seed).state_dict(), PolicyVersion("run", 5, branch))
        core.add("a", prompt)
        first = core.step()
        ((_, chunk),) = first
        assert chunk.num_cached == 0
        completions: Completions = {}
        collect(completions, first)
        while not core.is_idle:
            collect(completions, core.step())
        assert completions["a", 0].ids == generate(network(TINY, seed), range(10), max_new_tokens=3)


def test_loads_wait_for_requests_in_flight_and_block_later_ones() -> None:
    core = tiny(on_weight_update="finish", max_running=1)
    core.add("a", Prompt(ids_of(1, 2), 3, GREEDY, num_samples=2))
    core.add("b", Prompt(ids_of(3), 2, GREEDY))
    completions: Completions = {}
    collect(completions, core.step())
    state = network(TINY, 1).state_dict()
    core.load(state, version(1))
    for tensor in state.values():
        tensor.zero_()  # the trainer goes on with its tensors
    assert core.version == version(0)
    while not core.is_idle:
        collect(completions, core.step())
    assert completions["a", 0].versions == completions["a", 1].versions == [0, 0, 0]
    assert completions["b", 0].versions == [1, 1]
    assert completions["b", 0].ids == generate(network(TINY, 1), [3], max_new_tokens=2)


def test_an_abort_of_all_in_flight_lets_a_load_happen() -> None:
    core = tiny(on_weight_update="finish")
    core.add("a", Prompt(ids_of(1, 2), 3))
    core.step()
    core.load(network(TINY, 1).state_dict(), version(1))
    core.abort("a")
    assert core.version == version(1)
    assert finish(core)["a", 0].finish_reason is FinishReason.ABORT


def test_weights_come_from_a_folder_too(tmp_path: Path) -> None:
    core, other = tiny(), network(TINY, 1)
    save_model(other, tmp_path / "model")
    core.load(tmp_path / "model", version(5))
    core.add("a", Prompt(ids_of(1, 2), 3, GREEDY))
    completion = finish(core)["a", 0]
    assert completion.ids == generate(other, [1, 2], max_new_tokens=3)
    assert completion.versions == [5, 5, 5]


def test_deltas_are_applied_to_the_weights_they_build_on(tmp_path: Path) -> None:
    core, store, other = tiny(), WeightStore(tmp_path, "run", keep=9, anchor_every=9), network(TINY, 1)
    folders = []
    for step in range(4):
        with torch.no_grad():
            other.norm.weight[:3] += step
        folders.append(store.publish(other, step))
    for step in (1, 2, 0, 3):  # from the anchor, one delta further, back, then over three deltas
        core.load(folders[step], version(step))
        expected = load_model(folders[step]).state_dict()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in core.model.state_dict().items())


def test_weights_of_another_network_are_refused_unchanged(tmp_path: Path) -> None:
    core = tiny()
    save_model(network(TINY.model_copy(update={"norm_eps": 1e-5})), tmp_path / "model")
    with pytest.raises(CheckpointError, match="holds a network of another architecture"):
        core.load(tmp_path / "model", version(1))
    with pytest.raises(CheckpointError, match=r"cannot be read.*name too long"):
        core.load(tmp_path / ("a" * 5000), version(1))
    state = network(TINY).state_dict()
    del state["norm.weight"]
    state["strange"] = torch.zeros(2)
    with pytest.raises(CheckpointError, match=r"2 tensors do not fit.*norm.weight: expected \(16,\), received none"):
        core.load(state, version(1))
    assert core.version == version(0)


@pytest.mark.parametrize("stale_cache", ["drop", "keep"])
def test_broken_weights_end_their_requests_and_no_others(stale_cache: StaleCache) -> None:
    core = tiny(stale_cache=stale_cache, num_blocks=2)  # all of which they spoil
    core.load(
        {name: torch.full_like(tensor, torch.nan) for name, tensor in core.model.state_dict().items()}, version(1)
    )
    core.add("a", Prompt(ids_of(1, 2, 3, 4), 3, num_samples=2))
    assert {completion.finish_reason for completion in finish(core).values()} == {FinishReason.ABORT}
    core.load(network(TINY).state_dict(), version(2))
    core.add("b", Prompt(ids_of(1, 2), 3, GREEDY))
    assert finish(core)["b", 0].ids == generate(network(TINY), [1, 2], max_new_tokens=3)


def test_weights_are_read_while_the_core_steps(tmp_path: Path) -> None:
    """Staging changes nothing; what it read stays, even if the folder does not."""
    core, served = tiny(), network(TINY, 1)
    save_model(served, tmp_path / "next")
    core.add("a", Prompt(ids_of(1, 2, 3), 4, GREEDY))
    completions: Completions = {}
    collect(completions, core.step())
    start = core.stage(tmp_path / "next", version(1))
    for path in (tmp_path / "next").iterdir():
        path.unlink()
    collect(completions, core.step())
    assert core.version == version(0)
    start()
    completion = finish(core)["a", 0]
    assert completions["a", 0].versions == [0, 0]
    assert completion.versions == [1, 1]
    assert core.metrics()["total_loads"] == 1
    assert all(torch.equal(core.model.state_dict()[name], tensor) for name, tensor in served.state_dict().items())
