"""Records when the processes of a run had work for the device: intervals, in a small file per process.

    M2FORGE_BUSY=runs/NAME/busy      the folder; without it nothing is recorded

A line of `busy/NAME-PID.txt` is the start and the end of one interval, in seconds of the machine's monotonic clock,
which all processes share. There is no host sync: an interval is whatever the caller wraps in a `with`, so it ends with
the work only if the caller has read the result by then. Intervals less than `JOIN_S` apart are written as one, and a
long one is written in pieces, so that a killed process loses at most `PIECE_S` of it.
"""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

from m2forge.errors import RecordError
from m2forge.files import append_line, whole_lines

FOLDER_VARIABLE = "M2FORGE_BUSY"
JOIN_S = 0.001
PIECE_S = 1.0

Interval: TypeAlias = tuple[float, float]


class BusyLog:
    """Wrap every piece of work in `with log:`. Not thread-safe."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`path`: None records nothing."""
        self._path, self._clock = path, clock
        self._began_s = 0.0
        self._open: Interval | None = None
        """The interval that is not written yet."""

    def __enter__(self) -> None:
        if self._path is not None:
            self._began_s = self._clock()

    def __exit__(self, *error: object) -> None:
        if self._path is None:
            return
        end_s = self._clock()
        if self._open is not None and self._began_s - self._open[1] > JOIN_S:
            self.flush()
        self._open = (self._began_s if self._open is None else self._open[0], end_s)
        if end_s - self._open[0] >= PIECE_S:
            self.flush()

    def flush(self) -> None:
        """Write the pending interval."""
        if self._open is None or self._path is None:
            return
        append_line(self._path, f"{self._open[0]:.6f} {self._open[1]:.6f}")
        self._open = None


def open_busy_log(name: str) -> BusyLog:
    """The busy log of this process, if the environment enables it. `name`: the role of the process."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return BusyLog(None)
    Path(folder).mkdir(parents=True, exist_ok=True)
    return BusyLog(Path(folder) / f"{name}-{os.getpid()}.txt")


def read_busy(folder: Path, name: str) -> list[Interval]:
    """Disjoint intervals of all processes of that name, in time order. An incomplete last line is skipped."""
    found: list[Interval] = []
    for path in sorted(folder.glob(f"{name}-*.txt")):
        for number, line in enumerate(whole_lines(path.read_bytes()), start=1):
            try:
                start_s, end_s = map(float, line.split())
            except ValueError as error:
                raise RecordError(f"{path}, line {number}: expected two numbers, received {line[:80]!r}") from error
            found.append((start_s, end_s))
    return union(found)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, as sorted disjoint intervals."""
    joined: list[Interval] = []
    for start_s, end_s in sorted(intervals):
        if joined and start_s <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end_s, joined[-1][1]))
        else:
            joined.append((start_s, end_s))
    return joined


def busy_s(intervals: Iterable[Interval], from_s: float, to_s: float) -> float:
    """Seconds between the two times that are covered by the intervals."""
    return sum(max(0.0, min(end_s, to_s) - max(start_s, from_s)) for start_s, end_s in union(intervals))
