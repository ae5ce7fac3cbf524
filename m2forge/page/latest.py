"""`metrics.jsonl` in, the newest values of a few metrics out, in memory that does not grow with the run.

`Curves` stores every row for the charts; a list of runs needs only the last step. Each call reads what was appended
since the last, and only complete lines. Of a line before the last, only step and time are read, which the writer puts
first; a line with the held-out loss, which most steps lack, is parsed whole. A step that goes back, as after a resume,
drops the values of later steps.
"""

import json
import math
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from m2forge.observe.metrics import RESERVED

HELD_OUT_LOSS = "eval/loss"
"""Only some steps record it: its newest value may be far above the last line."""
BLOCK_BYTES = 1 << 23
_HELD_OUT_KEY = f'"{HELD_OUT_LOSS}"'.encode()
_HEAD = re.compile(rb'\{"step": (\d{1,15}), "time_s": (\d{1,15}(?:\.\d{1,20})?)[,}]')


@dataclass(frozen=True, slots=True)
class Latest:
    step: int = 0
    started_s: float | None = None
    """Time of the first line, in seconds since the epoch."""
    written_s: float | None = None
    """Time of the last line."""
    step_s: float | None = None
    """Seconds between the last two steps; None unless they are consecutive."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Finite values of the last step, and the newest held-out loss."""


class LatestMetrics:
    """Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._end = 0
        self._first_s: float | None = None
        self._before: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None
        self._last_lines: list[bytes] = []
        self._held_out: list[tuple[int, float]] = []
        self._latest = Latest()

    def read(self) -> Latest:
        with self._lock:
            if self._read_appended():
                self._latest = self._summarise()
            return self._latest

    def _read_appended(self) -> bool:
        start = self._end
        try:
            size = self._path.stat().st_size
            if size == self._end:
                return False
            with self._path.open("rb") as file:
                if size < self._end:
                    self._forget()
                file.seek(self._end)
                rest = b""
                while block := file.read(BLOCK_BYTES):
                    *lines, rest = (rest + block).split(b"\n")
                    for line in lines:
                        self._end += len(line) + 1
                        self._take(line)
        except OSError:
            return False
        return self._end != start

    def _take(self, line: bytes) -> None:
        head = _HEAD.match(line)
        if head is not None and line.endswith(b"}"):
            step, time_s = int(head[1]), float(head[2])
        else:
            record = _parse(line)
            if record is None:
                return
            step, time_s = int(record["step"]), record["time_s"]
        if self._first_s is None:
            self._first_s = time_s
        last = self._last
        if last is None or step != last[0]:
            # After a resume, the step before this one is not the line before this one.
            self._before = last if last is not None and last[0] < step else None
            self._last, self._last_lines = (step, time_s), []
        while self._held_out and self._held_out[-1][0] > step:
            self._held_out.pop()
        self._last_lines.append(line)
        if _HELD_OUT_KEY in line and math.isfinite(loss := (_parse(line) or {}).get(HELD_OUT_LOSS, math.nan)):
            self._held_out.append((step, loss))

    def _summarise(self) -> Latest:
        merged: dict[str, float] = {}
        for line in self._last_lines:
            merged |= _parse(line) or {}
        values = {HELD_OUT_LOSS: self._held_out[-1][1]} if self._held_out else {}
        values |= {name: value for name, value in merged.items() if math.isfinite(value) and name not in RESERVED}
        if self._last is None:
            return Latest()
        step, time_s = self._last
        before = self._before
        step_s = time_s - before[1] if before is not None and before[0] == step - 1 else None
        return Latest(step, self._first_s, time_s, step_s, values)


def _parse(line: bytes) -> dict[str, float] | None:
    """The numbers of a line; None if it is no record of metrics."""
    try:
        record = {str(name): float(value) for name, value in json.loads(line).items()}
        int(record["step"]), record["time_s"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None
    return record
