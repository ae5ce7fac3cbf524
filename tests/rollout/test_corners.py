"""Corners of the engine: precisions, blocks that change hands, priorities."""

import itertools

import pytest
import torch

from m2forge.observe import log
from m2forge.protocols import Prompt
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.core import Core
from m2forge.rollout.speculation.adaptive_depth import FixedDepth, Moment
from tests.rollout.draw import GREEDY, TINY, finish, ids_of, network, version
from tests.rollout.speculation.test_verify import make_sure


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampling_with_drafts_runs_as_one_in_every_precision(dtype: torch.dtype) -> None:
    config = RolloutConfig(block_tokens=4, num_blocks=64, max_running=4, step_tokens=64, speculation=1)
    model = network(TINY.model_copy(update={"num_mtp": 1})).to(dtype)
    core = Core(model, config, version(0), depth=FixedDepth(1), multi_step=True)
    core.add("a", Prompt(ids_of(1, 2, 3), 10))
    assert len(finish(core)["a", 0].ids) == 10


def test_modules_do_not_claim_prefill_of_another_requests_block() -> None:
    wide = TINY.model_copy(update={"num_mtp": 3, "max_context": 512})
    model, depth = network(wide), FixedDepth(0)
    make_sure(model)
    config = RolloutConfig(num_blocks=256, max_running=4, step_tokens=64, speculation=3)
    core = Core(model, config, version(0), depth=depth, multi_step=True)
    prompt = Prompt(ids_of(*[token % 20 for token in range(16)]), 200, GREEDY)
    core.add("a", prompt)
    finish(core)  # no module has run
    depth.depth = 3
    core.add("b", prompt)
    while not core.is_idle:
        core.step()
        for request in core._scheduler.running:
            for module, num in enumerate(request.num_mtp_computed):
                k_PTGK = core._runner.cache.k_YPTGK[wide.num_layers + module]
                for place in range(num):
                    assert k_PTGK[request.blocks[place // 16].index, place % 16].any(), (module, place, num)


def test_no_request_is_preempted_for_one_that_cannot_run() -> None:
    core = Core(network(TINY), RolloutConfig(block_tokens=4, num_blocks=10, max_running=8, step_tokens=64), version(0))
    shared = [token % 5 for token in range(12)]
    core.add("warm", Prompt(ids_of(*shared), 2, GREEDY))
    finish(core)
    core.add("equal", Prompt(ids_of(*[6 + token % 7 for token in range(16)]), 20, GREEDY, priority=1))
    core.step()
    core.step()
    core.add("low", Prompt(ids_of(15, 15, 15, 15, 15), 20, GREEDY))
    core.step()
    core.add("high", Prompt(ids_of(*shared, *[19] * 12), 1, GREEDY, priority=1))
    core.step()
    assert core.metrics()["total_preemptions"] == 0 or "high" not in {request.id for request in core._scheduler.waiting}


def test_a_high_priority_does_not_wait_until_a_low_one_is_read() -> None:
    model = network(TINY.model_copy(update={"max_context": 2048}))
    core = Core(model, RolloutConfig(block_tokens=4, num_blocks=1024, max_running=16, step_tokens=16), version(0))
    core.add("low", Prompt(ids_of(*[token % 7 for token in range(1600)]), 1, GREEDY))
    core.step()
    core.add("high", Prompt(ids_of(1), 1, GREEDY, priority=9))
    ended = [id for _ in range(10) for id, chunk in core.step() if chunk.finish_reason]
    assert "high" in ended


@pytest.mark.parametrize("multi_step", [True, False])
def test_a_step_with_module_prefill_is_told_apart_where_it_costs(multi_step: bool) -> None:
    """What a chooser hears: catching up costs nothing in a step that reads, and of the others the one after steps
    without drafts is not like them. Where every step is run in parts, it never does."""
    moments, caught_up = list[Moment](), list[int]()

    class Watched(FixedDepth):
        def choose(self, moment: Moment) -> int:
            moments.append(moment)
            return (2, 2, 0, 0, 2, 2)[len(moments) - 1]

        def note_mtp_prefill_step(self, num_sequences: int, duration_s: float) -> None:
            caught_up.append(len(moments))

    model = network(TINY.model_copy(update={"num_mtp": 2}))
    config = RolloutConfig(num_blocks=64, max_running=4, step_tokens=64, speculation=2, steps_per_sync=1)
    core = Core(model, config, version(0), depth=Watched(2), multi_step=multi_step)
    core.add("a", Prompt(ids_of(1, 2, 3), 40, GREEDY))
    for _ in range(6):
        core.step()
    assert [moment.is_separate_step for moment in moments] == [False] + 5 * [multi_step]
    # Nothing was computed before the first step; two tokens came without drafts, after the last that modules had seen.
    mtp_lag = [moment.mtp_lag for moment in moments]
    assert mtp_lag[:3] == [[0, 0]] * 3
    assert mtp_lag[3:5] == [[1, 1], [2, 2]]
    assert mtp_lag[5] == [0, 0]
    num_sampled = [40 - moment.num_remaining for moment in moments]
    assert num_sampled[0] == 0
    assert all(less < more for less, more in itertools.pairwise(num_sampled))
    assert caught_up == ([5] if multi_step else [])


def test_the_depth_chooser_gets_the_batch_size_during_prefill() -> None:
    """Two prompts are read in a step; of five in all four have seats."""
    heard: list[tuple[int, int]] = []

    class Watched(FixedDepth):
        def choose(self, moment: Moment) -> int:
            heard.append((moment.num_sequences, moment.num_after_prefill))
            return 0

    config = RolloutConfig(num_blocks=64, max_running=4, step_tokens=16)
    core = Core(network(TINY), config, version(0), depth=Watched(0))
    for number, name in enumerate("abcde"):
        core.add(name, Prompt(ids_of(*([number] * 8)), 40, GREEDY))
    for _ in range(4):
        core.step()
    assert heard == [(2, 4), (4, 4), (4, 4), (4, 0)]


def test_a_chooser_hears_what_was_read_for_each_request() -> None:
    """All that was computed was read, or was there to draw the next token: after cached prefixes and preemption too."""
    ended: list[tuple[int, int]] = []

    class Watched(FixedDepth):
        def note_end(self, num_prefilled: int, num_sampled: int) -> None:
            ended.append((num_prefilled, num_sampled))

    config = RolloutConfig(block_tokens=4, num_blocks=16, max_running=4, step_tokens=8)
    core = Core(network(TINY), config, version(0), depth=Watched(0))
    core.add("alone", Prompt(ids_of(1, 2, 3, 4, 5, 6), 9, GREEDY))
    finish(core)
    assert ended == [(5, 9)]
    core.add("again", Prompt(ids_of(1, 2, 3, 4, 5, 6), 9, GREEDY))
    finish(core)
    assert ended[1] == (0, 9)
    for number, name in enumerate("abcde"):
        core.add(name, Prompt(ids_of(*([number] * 12)), 20, GREEDY, num_samples=2))
    finish(core)
    assert len(ended) == 12
    metrics = core.metrics()
    assert metrics["total_preemptions"] > 0
    assert sum(map(sum, ended)) == metrics["total_computed_tokens"]


@pytest.mark.parametrize("multi_step", [True, False])
def test_the_depth_chooser_gets_prefilled_not_drafted_tokens(multi_step: bool) -> None:
    """Three prompts are read in two steps. Steps that decode are no reading, and where nothing is drafted nobody knows
    what the time went by with: of a long prompt only the last part is told."""
    heard: list[tuple[int, int, int, float]] = []

    class Watched(FixedDepth):
        def note_mtp_prefill(self, depth: int, num_sequences: int, num_tokens: int, duration_s: float) -> None:
            heard.append((depth, num_sequences, num_tokens, duration_s))

    model = network(TINY.model_copy(update={"num_mtp": 2, "max_context": 1600}))
    config = RolloutConfig(num_blocks=256, max_running=4, step_tokens=256, speculation=2)
    clock = itertools.count()
    core = Core(model, config, version(0), clock=lambda: float(next(clock)), depth=Watched(2), multi_step=multi_step)
    for number, name in enumerate("abc"):
        core.add(name, Prompt(ids_of(*([number] * 100)), 40, GREEDY))
    finish(core)
    assert heard[0] == (2, 3, 256, 1.0)
    assert len(heard) == 2
    core.add("long", Prompt(ids_of(*([4] * 1000)), 9, GREEDY))
    finish(core)
    assert [num_tokens for _, _, num_tokens, _ in heard[2:]] == [1000 - 3 * 256]


def test_what_modules_run_to_catch_up_is_no_reading() -> None:
    """It is cheaper by the token: a chooser that took it for reading would think that prompts cost less."""
    heard, caught_up = list[int](), list[int]()

    class Watched(FixedDepth):
        def choose(self, moment: Moment) -> int:
            return 2 * (moment.num_remaining < 38)

        def note_mtp_prefill(self, depth: int, num_sequences: int, num_tokens: int, duration_s: float) -> None:
            heard.append(num_tokens)

        def note_mtp_prefill_step(self, num_sequences: int, duration_s: float) -> None:
            caught_up.append(num_sequences)

    model = network(TINY.model_copy(update={"num_mtp": 2, "max_context": 256}))
    config = RolloutConfig(num_blocks=64, max_running=4, step_tokens=256, speculation=2, steps_per_sync=1)
    core = Core(model, config, version(0), depth=Watched(2), multi_step=True)
    core.add("a", Prompt(ids_of(*([1] * 100)), 40, GREEDY))
    finish(core)
    assert caught_up == [1]
    assert heard == []


@pytest.mark.parametrize("prefill", ["mixed", "separate"])
def test_completions_decode_several_tokens_beside_a_prompt(prefill: str) -> None:
    settings = {"num_blocks": 64, "max_running": 4, "step_tokens": 8, "steps_per_sync": 4, "prefill": prefill}
    model = network(TINY.model_copy(update={"max_context": 256}))
    core = Core(model, RolloutConfig.model_validate(settings), version(0), multi_step=True)
    core.add("first", Prompt(ids_of(1, 2, 3), 60, GREEDY))
    core.step()
    core.add("second", Prompt(ids_of(*([1] * 40)), 2, GREEDY))
    for _ in range(3):  # of 6 in which the second prompt is read
        (chunk,) = (chunk for id, chunk in core.step() if id == "first")
        assert len(chunk.ids) == (4 if prefill == "separate" else 1)
        core.audit()
    completions = finish(core)
    assert [len(completions[id, 0].ids) for id in ("first", "second")] == [60 - 1 - 3 * len(chunk.ids), 2]


def test_separate_prefill_without_effect_is_named(caplog: pytest.LogCaptureFixture) -> None:
    log.warn_once.cache_clear()
    Core(network(TINY), RolloutConfig(prefill="separate"), version(0))
    assert "no effect here" in caplog.text


def test_separate_prefill_does_not_combine_with_speculation() -> None:
    with pytest.raises(ValueError, match="does not combine with speculation"):
        RolloutConfig(prefill="separate", speculation=1)
