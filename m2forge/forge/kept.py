"""Stores each evaluation's attempts at a few held-out tasks, always the same, so that policies can be compared.

runs/NAME/kept/step-00000015.json       attempts of the policy at step 15

Each record is a task, its result, and its calls as the pool stores them (`pool/delta.py`).
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from m2forge.errors import RecordError
from m2forge.files import write_atomic
from m2forge.pool.delta import CallWriter, read_tree
from m2forge.pool.stored import read_task
from m2forge.records import Task
from m2forge.tree.token_tree import TokenTree


@dataclass(frozen=True, slots=True)
class Kept:
    step: int
    """Step of the policy when the evaluation began."""
    task: Task
    perf: float
    answer: str
    failure: str | None
    calls: tuple[bytes, ...]
    vocab_size: int

    def tree(self) -> TokenTree:
        return read_tree(self.calls, self.vocab_size, f"{self.task.id} at step {self.step}")


def make_kept(step: int, task: Task, perf: float, answer: str, failure: str | None, tree: TokenTree) -> Kept:
    writer = CallWriter(tree.vocab_size)
    calls = tuple(writer.write(call).data for call in tree.calls())
    return Kept(step, task, perf, answer, failure, calls, tree.vocab_size)


def write_kept(folder: Path, step: int, attempts: Sequence[Kept]) -> None:
    """Write the file of a step, replacing that of an earlier evaluation of the same step."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [asdict(kept) | {"calls": [base64.b64encode(call).decode() for call in kept.calls]} for kept in attempts]
    write_atomic(folder / f"step-{step:08d}.json", json.dumps(records))


def read_kept(folder: Path) -> list[Kept]:
    """All stored attempts, by ascending step."""
    found: list[Kept] = []
    for path in sorted(folder.glob("step-*.json")):
        try:
            found += [_read(record) for record in json.loads(path.read_text(encoding="utf-8"))]
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{path}: no attempts of a check ({error}); remove the file") from error
    return found


def _read(record: dict[str, Any]) -> Kept:
    told = {name: record[name] for name in ("step", "perf", "answer", "failure", "vocab_size")}
    calls = tuple(base64.b64decode(call, validate=True) for call in record["calls"])
    return Kept(task=read_task(json.dumps(record["task"])), calls=calls, **told)
