"""Numbers of a run, step by step: `metrics.jsonl` to compute with and TensorBoard events to look at.

A line of `metrics.jsonl` is one JSON object `{"step": 7, "time_s": 1790000000.0, "loss": 2.5, ...}`, `time_s` in
seconds since the epoch. NaN and the infinities, which JSON lacks, are the strings "NaN", "Infinity" and "-Infinity",
so that `float(value)` reads every value and a diverged run shows where it diverged.

The file is only ever appended to, one write per line, so a killed process leaves at most one torn last line; opening
it again cuts that line off. A resumed run repeats the steps after its checkpoint: `read_metrics` lets a step that goes
back replace all that came after it, and merges the lines of one step.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from m2forge.errors import NotFoundError, RecordError

FILE_NAME = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
RESERVED = ("step", "time_s")
_FLUSH_S = 10
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of one step, as `read_metrics` gives them."""

    step: int
    time_s: float
    values: dict[str, float]


class MetricsWriter:
    """Appends the metrics of a run to its directory. Safe to open again after any kind of death."""

    def __init__(self, run_dir: Path) -> None:
        # tensorboardX takes seconds to import where torch is installed.
        from tensorboardX import SummaryWriter

        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / FILE_NAME
        _cut_torn_line(path)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._events = SummaryWriter(logdir=str(run_dir / TENSORBOARD_FOLDER), flush_secs=_FLUSH_S)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` under `step`. The line survives the death of this process as soon as this returns."""
        reserved = [name for name in RESERVED if name in values]
        if reserved:
            raise RecordError(f"metrics of step {step}: {reserved[0]!r} is the writer's own field; rename the metric")
        time_s = time.time()
        numbers = {name: float(value) for name, value in values.items()}
        record = {"step": step, "time_s": time_s} | {name: _to_json(value) for name, value in numbers.items()}
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        if os.write(self._descriptor, line) != len(line):
            raise OSError(f"metrics of step {step}: the disk took only part of the line; is it full?")
        for name, value in numbers.items():
            self._events.add_scalar(name, value, step, walltime=time_s)

    def close(self) -> None:
        self._events.close()
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[StepMetrics]:
    """The metrics of a run, by rising step, from its `metrics.jsonl`. A torn last line is left out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: no metrics here; give the {FILE_NAME} of a run directory") from error
    steps: list[StepMetrics] = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
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


def _to_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _cut_torn_line(path: Path) -> None:
    """Cut the file after its last newline."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _BLOCK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
            end = start
        file.truncate(0)
