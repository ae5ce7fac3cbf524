"""`metrics.jsonl` in, columns of numbers out, incrementally.

Each call reads only what was appended since the last, and only complete lines, so the file may be read while it is
being written. A step that goes back, as after a resume, replaces all later ones; then the revision changes, and a
client with columns of an older revision starts over. Lines that are not metrics are counted and skipped.
"""

import json
import math
import threading
from dataclasses import dataclass
from pathlib import Path

from m2forge.files import whole_lines
from m2forge.records import JsonValue

MAX_POINTS = 1500
"""More steps than this are downsampled evenly; the first and the last stay."""


@dataclass(slots=True)
class _Row:
    step: int
    time_s: float
    values: dict[str, float]


class Curves:
    """Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._forget()
        self.revision = 0

    def _forget(self) -> None:
        self._rows: list[_Row] = []
        self._end = 0
        self._num_unread = 0

    def release(self) -> None:
        """Free the rows; the next call reads the file from its start, under another revision."""
        with self._lock:
            self._forget()
            self.revision += 1

    def last_step(self) -> int:
        with self._lock:
            self._read()
            return self._rows[-1].step if self._rows else 0

    def since(self, revision: int, step: int) -> dict[str, JsonValue]:
        """Columns from `step` on, inclusive, since its line may have grown; all columns if the revision differs."""
        with self._lock:
            self._read()
            is_whole = revision != self.revision
            rows = self._rows if is_whole else [row for row in self._rows if row.step >= step]
            num_all = len(rows)
            rows = _thin(rows)
            names = sorted({name for row in rows for name in row.values})
            tokens = self._num_tokens()
            return {
                "revision": self.revision,
                "is_whole": is_whole,
                "num_steps": num_all,
                "num_unread": self._num_unread,
                "steps": [row.step for row in rows],
                "times_s": [round(row.time_s, 3) for row in rows],
                "tokens": None if tokens is None else [_number(tokens[row.step]) for row in rows],
                "series": {name: [_number(row.values.get(name)) for row in rows] for name in names},
            }

    def _num_tokens(self) -> dict[int, float] | None:
        """Tokens trained up to each step: the recorded total, or the sum over all steps so far, since a client that
        receives every tenth step cannot add them up. None if the run records neither."""
        total, totals, is_known = 0.0, {}, False
        for row in self._rows:
            if math.isfinite(given := row.values.get("num_tokens", math.nan)):
                total, is_known = given, True
            elif math.isfinite(added := row.values.get("tokens_computed", math.nan)):
                total, is_known = total + added, True
            totals[row.step] = total
        return totals if is_known else None

    def _read(self) -> None:
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._end:
                    self._forget()
                    self.revision += 1
                file.seek(self._end)
                data = file.read(size - self._end)
        except OSError:
            return
        for line in whole_lines(data):
            self._end += len(line) + 1
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            step, time_s = int(record.pop("step")), float(record.pop("time_s"))
            values = {str(name): float(value) for name, value in record.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self._num_unread += 1
            return
        rows = self._rows
        if rows and rows[-1].step > step:
            self.revision += 1
            while rows and rows[-1].step > step:
                rows.pop()
        if rows and rows[-1].step == step:
            rows[-1].values |= values
        else:
            rows.append(_Row(step, time_s, values))


def _thin(rows: list[_Row]) -> list[_Row]:
    if len(rows) <= MAX_POINTS:
        return rows
    share = (len(rows) - 1) / (MAX_POINTS - 1)
    return [rows[round(index * share)] for index in range(MAX_POINTS)]


def _number(value: float | None) -> float | None:
    """Seven digits are more than a curve shows. JSON has no NaN or infinity; they become gaps."""
    return float(f"{value:.7g}") if value is not None and math.isfinite(value) else None
