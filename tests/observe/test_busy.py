"""Intervals of work: what is noted is what was done, however it is cut into pieces."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import RecordError
from m2forge.observe.busy import (
    FOLDER_VARIABLE,
    JOIN_S,
    PIECE_S,
    BusyLog,
    Interval,
    busy_s,
    open_busy_log,
    read_busy,
    union,
)

INTERVALS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (float(pair[0]), float(sum(pair)))), max_size=12
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def work(log: BusyLog, clock: Clock, pauses: list[float], work_s: float) -> None:
    for pause_s in pauses:
        clock.now_s += pause_s
        with log:
            clock.now_s += work_s
    log.flush()


def test_neighbours_are_one_interval_and_pauses_are_kept(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "engine-1.txt"
    log = BusyLog(path, clock)
    work(log, clock, [0.0, JOIN_S / 2, 0.5, JOIN_S / 2], work_s=0.01)
    assert len(path.read_text().splitlines()) == 2
    first, second = read_busy(tmp_path, "engine")
    assert first == pytest.approx((100.0, 100.0205), abs=1e-6)
    assert second == pytest.approx((100.5205, 100.541), abs=1e-6)


def test_work_without_a_pause_is_written_before_it_ends(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "engine-1.txt"
    log = BusyLog(path, clock)
    for _ in range(5):
        with log:
            clock.now_s += PIECE_S / 2
    assert len(path.read_text().splitlines()) == 2, "a process that is killed now has lost half a second"
    log.flush()
    assert read_busy(tmp_path, "engine") == [(100.0, 102.5)]


def test_work_that_raises_was_work(tmp_path: Path) -> None:
    clock = Clock()
    log = BusyLog(tmp_path / "engine-1.txt", clock)
    with pytest.raises(ZeroDivisionError), log:
        clock.now_s += 0.25
        raise ZeroDivisionError
    log.flush()
    assert read_busy(tmp_path, "engine") == [(100.0, 100.25)]


def test_nothing_is_noted_unless_the_environment_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    with open_busy_log("engine") as nothing:
        assert nothing is None
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "busy"))
    assert not (tmp_path / "busy").exists()
    log = open_busy_log("engine")
    with log:
        pass
    log.flush()
    assert len(read_busy(tmp_path / "busy", "engine")) == 1
    assert read_busy(tmp_path / "busy", "trainer") == []


def test_processes_of_a_name_are_read_without_a_torn_line(tmp_path: Path) -> None:
    (tmp_path / "engine-1.txt").write_text("1.0 2.0\n5.0 6.0\n7.0 9")
    (tmp_path / "engine-2.txt").write_text("1.5 3.0\n")
    (tmp_path / "trainer-3.txt").write_text("0.0 9.0\n")
    assert read_busy(tmp_path, "engine") == [(1.0, 3.0), (5.0, 6.0)]
    (tmp_path / "engine-2.txt").write_text("1.5\n")
    with pytest.raises(RecordError, match=r"engine-2\.txt, line 1: expected two numbers"):
        read_busy(tmp_path, "engine")


def test_a_torn_line_is_cut_before_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "engine-1.txt"
    path.write_text("1.0 2.0\n7.0 9")
    moments = iter((10.0, 11.0))
    log = BusyLog(path, lambda: next(moments))
    with log:
        pass
    log.flush()
    assert read_busy(tmp_path, "engine") == [(1.0, 2.0), (10.0, 11.0)]


@given(INTERVALS, st.integers(0, 80), st.integers(0, 80))
def test_seconds_are_counted_once_and_within_bounds(intervals: list[Interval], first: int, second: int) -> None:
    from_s, to_s = sorted((first, second))
    moments = [from_s + half + 0.5 for half in range(to_s - from_s)]
    expected = sum(any(start_s < moment < end_s for start_s, end_s in intervals) for moment in moments)
    assert busy_s(intervals, from_s, to_s) == expected
    joined = union(intervals)
    assert all(one[1] < other[0] for one, other in pairwise(joined))
