"""The engine is exact under any schedule, loses nothing, and answers nothing twice."""

import numpy as np
import pytest
import torch
from hypothesis import given

from m2forge.errors import RequestError
from m2forge.model.plan import Documents
from m2forge.protocols import Prompt
from m2forge.records import FinishReason
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.core import Core
from m2forge.rollout.speculation.adaptive_depth import FixedDepth
from tests.conftest import FEW_CASES
from tests.model.draw import SMALL
from tests.model.generate import generate
from tests.rollout.draw import (
    GREEDY,
    Completion,
    Completions,
    Traffic,
    check_served,
    collect,
    finish,
    ids_of,
    network,
    serve,
    tiny,
    traffics,
    version,
)
from tests.rollout.plain import all_logits


@FEW_CASES
@given(traffics())
def test_every_token_is_what_the_plain_computation_draws(traffic: Traffic) -> None:
    check_served(traffic)


@given(traffics(samplings=(GREEDY,)))
def test_greedy_completions_equal_the_plain_loop(traffic: Traffic) -> None:
    served = serve(traffic)
    for place, arrival in enumerate(traffic.arrivals):
        prompt = arrival.prompt
        new = generate(
            served.weights[0], prompt.ids.tolist(), max_new_tokens=prompt.max_tokens, stop_ids=prompt.stop_ids
        )
        for sample in range(prompt.num_samples):
            completion = served.completions[str(place), sample]
            aborted = completion.finish_reason is FinishReason.ABORT
            assert completion.ids == (new[: len(completion.ids)] if aborted else new)


def test_samples_of_a_prompt_read_it_once() -> None:
    core = tiny(num_blocks=32, step_tokens=64)
    core.add("a", Prompt(ids_of(*range(13)), 3, seed=3, num_samples=6))
    completions = finish(core)
    assert len({tuple(completion.ids) for completion in completions.values()}) > 1
    # The prompt once, its last token, which fills no block, by each sample; and two tokens of each completion.
    assert core.metrics()["total_computed_tokens"] == 13 + 5 + 6 * 2


def test_a_conversation_is_read_on_from_where_it_ended() -> None:
    core, ids = tiny(step_tokens=64), [1, 2, 3]
    for turn in range(4):
        core.add(str(turn), Prompt(np.array(ids, np.int32), 3, GREEDY))
        ids += [*finish(core)[str(turn), 0].ids, turn]
    # The last token of all is never computed.
    assert core.metrics()["total_computed_tokens"] == len(ids) - 2


def test_who_asks_learns_what_was_cached() -> None:
    core = tiny()
    seen = []
    for id in "ab":
        core.add(id, Prompt(ids_of(*range(10)), 1))
        ((_, chunk),) = core.step()
        seen.append(chunk.num_cached)
    assert seen == [0, 9]


def test_deadlines_end_what_runs_and_what_waits() -> None:
    clock = [100.0]
    core = tiny(clock, max_running=1)
    core.add("runs", Prompt(ids_of(1), 10, GREEDY, timeout_s=5.0))
    core.add("waits", Prompt(ids_of(1), 10, GREEDY, timeout_s=2.0))
    core.add("stays", Prompt(ids_of(1), 10, GREEDY))
    completions: Completions = {}
    for seconds in (0.0, 1.9, 2.0, 4.9, 5.0):
        clock[0] = 100.0 + seconds
        collect(completions, core.step())
        core.audit()
    assert completions["waits", 0] == Completion(num_chunks=1, finish_reason=FinishReason.ABORT)
    assert completions["runs", 0].finish_reason is FinishReason.ABORT
    assert len(completions["runs", 0].ids) == 4
    while not core.is_idle:
        collect(completions, core.step())
    assert completions["stays", 0].finish_reason is FinishReason.LENGTH


def test_higher_priorities_run_first_and_preempt_lower_ones() -> None:
    core = tiny(max_running=1)
    for id, priority in (("low", 0), ("middle", 1), ("high", 2)):
        core.add(id, Prompt(ids_of(1, 2), 3, GREEDY, priority=priority))
        core.step()
    ends = []
    while not core.is_idle:
        ends += [id for id, chunk in core.step() if chunk.finish_reason]
    assert ends == ["high", "middle", "low"]
    assert core.metrics()["total_preemptions"] == 2


@pytest.mark.parametrize("speculation", [0, 3])
def test_stop_texts_end_a_completion_at_the_completing_token(speculation: int) -> None:
    plain = generate(tiny(speculation=speculation).model, [1, 2], max_new_tokens=8)
    text = "".join(f"<{token}>" for token in plain)

    def decode(ids: object) -> bytes:
        return "".join(f"<{token}>" for token in ids).encode()  # type: ignore[attr-defined]

    for stop, num_tokens in ((text[1:5], 2), (f"{plain[3]}><{plain[4]}", 5), ("none", 8)):
        core = tiny(decode=decode, speculation=speculation)
        core.add("a", Prompt(ids_of(1, 2), 8, GREEDY, stop_texts=("never", stop)))
        completion = finish(core)["a", 0]
        first = next((n for n in range(1, 9) if stop.encode() in decode(plain[:n])), 8)
        assert completion.ids == plain[:first]
        assert first <= num_tokens
        assert completion.finish_reason is (FinishReason.LENGTH if stop == "none" else FinishReason.STOP)


def test_experts_equal_a_fresh_forward_or_minus_1_where_cached() -> None:
    model = network(SMALL)
    config = RolloutConfig(block_tokens=4, num_blocks=6, max_running=4, step_tokens=5)
    core = Core(network(SMALL), config, version(0))
    prompt = Prompt(ids_of(*range(10)), 5, seed=1, num_samples=3, returns_experts=True)
    core.add("a", prompt)
    completions = finish(core)
    assert core.metrics()["total_preemptions"] > 0
    for completion in completions.values():
        ids = [*range(10), *completion.ids[:-1]]
        output = model(torch.tensor(ids), Documents([len(ids)]), with_mtp=False, returns_experts=True)
        assert output.experts_NLK is not None
        handed_out = np.concatenate(completion.experts)
        assert handed_out.shape == output.experts_NLK.shape
        unknown = handed_out.reshape(len(ids), -1).max(1) < 0
        assert np.array_equal(np.sort(handed_out)[~unknown], output.experts_NLK.sort(-1).values.numpy()[~unknown])
        assert not unknown[10:].any()
    assert any((np.concatenate(completion.experts) >= 0).all() for completion in completions.values())


def test_what_can_never_be_served_is_refused_at_once() -> None:
    core = tiny(num_blocks=10)
    core.add("known", Prompt(ids_of(1), 1))
    for id, prompt, message in (
        ("known", Prompt(ids_of(1), 1), "a prompt with this id is in flight"),
        ("a", Prompt(ids_of(1, 20, -1), 1), r"ids outside 0\.\.19: \[20, -1\]"),
        ("a", Prompt(ids_of(1)[None], 1), r"expected a 1-D array of integers, received \(1, 1\) of int32"),
        ("a", Prompt(ids_of(1, 2), 63), "2 tokens and 63 to sample exceed the context length of 64"),
        ("a", Prompt(ids_of(1, 2), 40), "exceed the KV cache of 40"),
        ("a", Prompt(ids_of(1), 1, stop_texts=("x",)), "no tokenizer"),
        ("a", Prompt(ids_of(1), 1, stop_texts=("",)), "expected text, received ''"),
    ):
        with pytest.raises(RequestError, match=message):
            core.add(id, prompt)
    core.add("fits", Prompt(ids_of(1, 2), 39))
    assert {id for id, _ in finish(core)} == {"known", "fits"}


def test_prompts_without_a_seed_differ() -> None:
    core = tiny(seed=7)
    for id in "abcd":
        core.add(id, Prompt(ids_of(1, 2), 8))
    assert len({tuple(completion.ids) for completion in finish(core).values()}) == 4


def test_an_unknown_id_is_not_aborted() -> None:
    core = tiny()
    core.abort("nobody")
    assert core.is_idle
    assert core.step() == []


def crowd(num_prompts: int, speculation: int) -> None:
    """Prompts of all kinds, aborts and deadlines at random; every sample ends once and nothing stays behind."""
    random, clock = np.random.default_rng(5), [0.0]
    core = tiny(clock, num_blocks=5, max_running=8, step_tokens=40, speculation=speculation)
    expected: set[tuple[str, int]] = set()
    completions: Completions = {}
    for number in range(num_prompts):
        id, size = str(number), int(random.integers(1, 16))
        prompt = Prompt(
            random.integers(0, 3, size).astype(np.int32),
            max_tokens=int(random.integers(1, 9)),
            num_samples=int(random.integers(1, 4)),
            priority=int(random.integers(0, 3)),
            timeout_s=float(random.integers(1, 20)) if random.random() < 0.3 else None,
        )
        if size + prompt.max_tokens - 1 > 20:
            with pytest.raises(RequestError):
                core.add(id, prompt)
        else:
            core.add(id, prompt)
            expected |= {(id, sample) for sample in range(prompt.num_samples)}
        while core.num_waiting > 20:
            collect(completions, core.step())
            clock[0] += 1.0
        if random.random() < 0.3:
            core.abort(str(random.integers(0, number + 1)))
        if number % 50 == 0:
            core.audit()
    while not core.is_idle:
        collect(completions, core.step())
    core.audit()
    assert completions.keys() == expected
    assert all(completion.finish_reason for completion in completions.values())
    assert {completion.finish_reason for completion in completions.values()} == {
        FinishReason.LENGTH,
        FinishReason.ABORT,
    }
    assert not core._requests
    assert not core._scheduler._started
    assert core.metrics()["num_held_blocks"] == 0
    core._scheduler.pool.clear()
    core._scheduler.pool.audit([])


@pytest.mark.parametrize("speculation", [0, 2])
def test_a_crowd_is_served_and_nothing_stays_behind(speculation: int) -> None:
    crowd(80, speculation)


@pytest.mark.long
@pytest.mark.parametrize("speculation", [0, 2])
def test_ten_thousand_prompts_leave_nothing_behind(speculation: int) -> None:
    crowd(10_000, speculation)


@pytest.mark.parametrize("speculation", [0, 1, 3])
@pytest.mark.parametrize(("dtype", "slack"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_lower_precision_takes_a_token_as_good_as_the_argmax(
    dtype: torch.dtype, slack: float, speculation: int
) -> None:
    """Products of another batch size round otherwise, so a token may differ where two are equally likely; bfloat16 has
    8 bits for logits of up to 8."""
    core = tiny(num_blocks=24, max_running=6, step_tokens=11, speculation=speculation)
    model = core.model.to(dtype)
    core = Core(model, core.config, version(0), depth=FixedDepth(speculation))
    for number in range(6):
        core.add(str(number), Prompt(ids_of(*range(number, 12)), 12, GREEDY))
    for (id, _), completion in finish(core).items():
        ids = [*range(int(id), 12), *completion.ids]
        logits = all_logits(model, ids)[11 - int(id) : -1].float()
        chosen = logits.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        assert float((logits.amax(-1) - chosen).max()) <= slack
        raw = logits.log_softmax(-1).gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        assert float((raw - torch.tensor(completion.raw_logprobs)).abs().max()) <= slack
