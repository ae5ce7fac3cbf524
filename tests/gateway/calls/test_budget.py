"""What an episode may spend: calls, tokens and seconds, those in flight counted."""

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest

from m2forge.gateway.config import Budget
from m2forge.gateway.episodes.episode import BudgetError, ReservedError, Sampled
from m2forge.gateway.episodes.registry import Episodes
from m2forge.records import Call, FinishReason
from m2forge.text.message import Message
from m2forge.text.parser import Completion
from tests.gateway.dialogue import USER, minimax, sample
from tests.gateway.episodes.test_episode import sampled
from tests.text.draw import TOOLS


def test_calls_over_the_budget_are_refused_with_those_in_flight() -> None:
    episode, _ = Episodes(minimax(), budget=Budget(max_calls=3)).create()
    first, _ = episode.admit("a", num_samples=2)
    with pytest.raises(BudgetError, match=r"2 of 3 calls are spent, 2 were requested"):
        episode.admit("b", num_samples=2)
    episode.admit("b")
    with pytest.raises(BudgetError):
        episode.admit("c")
    assert episode.admit("a", attempt=1) == (first, True)
    episode.abandon(first)
    episode.admit("c", num_samples=2)


def test_tokens_are_promised_once() -> None:
    format = minimax()
    episode, _ = Episodes(format).create(budget=Budget(max_tokens=100))
    first, _ = episode.admit("a")
    second, _ = episode.admit("b", num_samples=3)
    assert episode.reserve(first, 70) == 70
    assert episode.reserve(second, 70) == 10
    third = None
    with pytest.raises(ReservedError, match="100 are reserved by calls in flight"):
        third = episode.admit("c")
    assert third is None
    opening = episode.open([USER], TOOLS)
    ids = sample(format, Message("assistant", "Short"), random.Random(0))[:20]
    episode.commit(first, opening, [sampled(format, opening.ids, ids)], id="x")
    assert episode.tokens_left == 100 - ids.size - 30
    episode.abandon(second)
    assert episode.tokens_left == 100 - ids.size
    left = episode.tokens_left
    assert left is not None
    other, _ = episode.admit("e")
    last, _ = episode.admit("d", num_samples=left)
    assert episode.reserve(other, 1) == 1
    with pytest.raises(BudgetError, match=f"too few for {left} samples"):
        episode.reserve(last, 1)
    with pytest.raises(BudgetError, match=f"at least {left + 1} were requested") as spent:
        episode.admit("f", num_samples=left + 1)
    assert not isinstance(spent.value, ReservedError), "to wait for others would not help"


def test_a_call_waits_for_budget_promised_to_other_calls() -> None:
    episode, _ = Episodes(minimax()).create(budget=Budget(max_tokens=100))
    first, _ = episode.admit("a", max_tokens=70)
    assert episode.reserve(first, 70) == 70
    with pytest.raises(ReservedError):
        episode.admit("b", max_tokens=40)
    with pytest.raises(ReservedError):
        episode.admit("b", max_tokens=1000)
    second, _ = episode.admit("b", max_tokens=30)
    assert episode.reserve(second, 30) == 30

    async def wait() -> bool:
        waiting = asyncio.ensure_future(episode.wait_for_end())
        await asyncio.sleep(0)
        was_done = waiting.done()
        episode.abandon(first)
        await asyncio.wait_for(waiting, 60)
        return was_done

    assert not asyncio.run(wait())
    third, _ = episode.admit("c", max_tokens=70)
    assert episode.reserve(third, 1000) == 70


def test_time_runs_out() -> None:
    now = [100.0]
    episode, _ = Episodes(minimax(), monotonic=lambda: now[0]).create(budget=Budget(max_s=5))
    episode.admit("a")
    now[0] = 104.0
    assert episode.seconds_left == 1
    now[0] = 105.0
    with pytest.raises(BudgetError, match=r"its time budget of .* s is exhausted"):
        episode.admit("b")


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_set_by_an_hour_changes_no_time_budget(tmp_path: Path, jump_s: float) -> None:
    wall, steady = [1e9], [50.0]

    def restart() -> Episodes:
        return Episodes(minimax(), folder=tmp_path, clock=lambda: wall[0], monotonic=lambda: steady[0])

    def pass_time(seconds: float) -> None:
        wall[0] += seconds
        steady[0] += seconds

    first, key = restart().create(budget=Budget(max_s=100))
    pass_time(30)
    wall[0] += jump_s
    assert first.seconds_left == 70
    request, _ = first.admit("a")
    first.commit(request, np.arange(3, dtype=np.int32), [raw_sample(wall[0])], id="a")
    # Another process, whose monotonic clock began elsewhere, an hour later: nothing ran meanwhile.
    wall[0] += 3600 - jump_s
    steady[0] = 7.0
    again = restart().find(key)
    assert again is not None
    assert again.seconds_left == 70
    pass_time(69)
    again.admit("b")
    pass_time(2)
    with pytest.raises(BudgetError, match=r"its time budget of .* s is exhausted"):
        again.admit("c")


def raw_sample(at_s: float) -> Sampled:
    ids, logprobs = np.arange(2, dtype=np.int32), np.full(2, -1.0, np.float32)
    call = Call(np.arange(3, dtype=np.int32), ids, logprobs, ids, FinishReason.STOP, at_s - 1, at_s)
    return Sampled(call, Completion("", "x", (), (), closed=True))
