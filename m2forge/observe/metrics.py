"""Metrics of a run by step: `metrics.jsonl` for programs; TensorBoard events, Weights & Biases or MLflow for viewing.

A line of `metrics.jsonl` is one JSON object `{"step": 7, "time_s": 1790000000.0, "loss": 2.5, ...}`, `time_s` in
seconds since the epoch. NaN and the infinities, which JSON lacks, are the strings "NaN", "Infinity" and "-Infinity",
so that `float(value)` reads every value and a diverged run shows where it diverged.

The file is append-only, one write per line, so a killed process leaves at most one incomplete last line; reopening
removes that line. A resumed run repeats the steps after its checkpoint: in `read_metrics` a step that goes back
replaces all later ones, and the lines of one step are merged.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from m2forge.errors import NotFoundError, RecordError
from m2forge.files import open_lines, whole_lines, write_line
from m2forge.observe.config import MetricsConfig
from m2forge.observe.tracker import close_trackers, open_trackers, require_writers

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

FILE_NAME = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
RESERVED = ("step", "time_s")
_FLUSH_S = 10
_TAIL_BYTES = 1 << 18
"""Bytes that `read_last_step` reads from the end of the file; many times the size of one step's metrics."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of one step, as returned by `read_metrics`."""

    step: int
    time_s: float
    values: dict[str, float]


class MetricsWriter:
    """Appends the metrics of a run to its directory. Safe to reopen after any crash."""

    def __init__(self, run_dir: Path, config: MetricsConfig | None = None) -> None:
        """`config`: None writes `metrics.jsonl` and TensorBoard events."""
        config = config or MetricsConfig()
        require_writers(config)
        self._descriptor = open_lines(run_dir / FILE_NAME)
        self._events = _open_events(run_dir / TENSORBOARD_FOLDER) if "tensorboard" in config.writers else None
        self._trackers = open_trackers(run_dir, config)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` under `step`. The line survives a crash of this process once this returns."""
        reserved = [name for name in RESERVED if name in values]
        if reserved:
            raise RecordError(f"metrics of step {step}: {reserved[0]!r} is the writer's own field; rename the metric")
        time_s = time.time()
        numbers = {name: float(value) for name, value in values.items()}
        record = {"step": step, "time_s": time_s} | {name: _to_json(value) for name, value in numbers.items()}
        write_line(self._descriptor, json.dumps(record, allow_nan=False))
        if self._events is not None:
            for name, value in numbers.items():
                self._events.add_scalar(name, value, step, walltime=time_s)
        for tracker in self._trackers:
            tracker.log(step, time_s, numbers)

    def close(self, *, is_failed: bool = False) -> None:
        """`is_failed`: an error ended the run, which trackers show."""
        os.close(self._descriptor)
        if self._events is not None:
            self._events.close()
        close_trackers(self._trackers, is_failed=is_failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(is_failed=kind is not None)


def _open_events(folder: Path) -> "SummaryWriter":
    # tensorboardX takes seconds to import if torch is installed.
    from tensorboardX import SummaryWriter

    return SummaryWriter(logdir=str(folder), flush_secs=_FLUSH_S)


def read_metrics(path: Path) -> list[StepMetrics]:
    """The metrics of a run, by ascending step, from its `metrics.jsonl`. An incomplete last line is skipped."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: no metrics here; give the {FILE_NAME} of a run directory") from error
    steps: list[StepMetrics] = []
    for number, line in enumerate(whole_lines(data), start=1):
        try:
            record = json.loads(line)
            step, time_s = int(record.pop("step")), float(record.pop("time_s"))
            values = {str(name): float(value) for name, value in record.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RecordError(f"{path}, line {number}: not a metrics record ({error}); remove the line") from error
        while steps and steps[-1].step > step:
            steps.pop()
        if steps and steps[-1].step == step:
            values = steps.pop().values | values
        steps.append(StepMetrics(step, time_s, values))
    return steps


def read_last_step(path: Path) -> StepMetrics | None:
    """Read the last step from the end of the metrics file; None if missing or unreadable."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]
    try:
        record = json.loads(lines[-1])
    except (IndexError, ValueError):
        return None
    step, time_s = int(record.pop("step")), float(record.pop("time_s"))
    return StepMetrics(step, time_s, {name: float(value) for name, value in record.items()})


def _to_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
