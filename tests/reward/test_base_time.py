"""Baseline times: a moving median per task, exact after a resume."""

import json
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import RecordError
from m2forge.reward.config import SpeedConfig
from m2forge.reward.judge import BaseTimes

TIMES_S = st.lists(st.floats(0, 1e6), max_size=20)


def test_the_median_moves_with_the_latest_times() -> None:
    times = BaseTimes(SpeedConfig(window=3))
    times.add("t", [10.0, 2.0, 4.0])
    assert times.base_s("t") == 4.0
    times.add("t", [3.0])
    assert times.base_s("t") == 3.0
    times.add("t", [1.0])
    assert times.base_s("t") == 3.0
    times.add("t", [1.0])
    assert times.base_s("t") == 1.0


def test_tasks_have_times_of_their_own() -> None:
    times = BaseTimes(SpeedConfig())
    times.add("a", [1.0])
    times.add("b", [5.0, 7.0])
    assert (times.base_s("a"), times.base_s("b"), times.base_s("c")) == (1.0, 6.0, None)


def test_an_unknown_task_is_measured_by_its_present_group() -> None:
    times = BaseTimes(SpeedConfig())
    assert times.base_s("t", [2.0, 8.0]) == 5.0
    assert times.base_s("t") is None
    times.add("t", [3.0])
    assert times.base_s("t", [2.0, 8.0]) == 3.0


def test_a_baseline_is_never_shorter_than_the_least() -> None:
    times = BaseTimes(SpeedConfig(min_base_s=0.5))
    times.add("t", [0.0])
    assert times.base_s("t") == 0.5


@given(TIMES_S, TIMES_S, st.integers(1, 5))
def test_a_resumed_one_goes_on_exactly(before: list[float], after: list[float], window: int) -> None:
    config = SpeedConfig(window=window, min_base_s=1e-9)
    times = BaseTimes(config)
    times.add("t", before)
    resumed = BaseTimes(config, json.loads(json.dumps(times.state())))
    for current in (times, resumed):
        current.add("t", after)
    assert times.state() == resumed.state()
    latest = [*before, *after][-window:]
    assert times.base_s("t") == (max(1e-9, statistics.median(latest)) if latest else None)


def test_a_smaller_window_keeps_the_latest_times() -> None:
    resumed = BaseTimes(SpeedConfig(window=2), {"t": [9.0, 1.0, 3.0]})
    assert resumed.state() == {"t": [1.0, 3.0]}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_an_impossible_time_is_refused_and_leaves_nothing_behind(bad: float) -> None:
    times = BaseTimes(SpeedConfig())
    with pytest.raises(RecordError, match=r"task t: .* received"):
        times.add("t", [1.0, bad])
    assert times.state() == {}


def test_the_tasks_whose_times_came_last_are_kept_and_no_others() -> None:
    times = BaseTimes(SpeedConfig(), max_tasks=2)
    times.add("a", [1.0])
    times.add("b", [2.0])
    times.add("a", [3.0])
    times.add("c", [4.0])
    assert times.state() == {"a": [1.0, 3.0], "c": [4.0]}
    assert times.base_s("b") is None
    assert BaseTimes(SpeedConfig(), times.state(), max_tasks=1).state() == {"c": [4.0]}
