"""Branches of a run's weights: which published versions the current weights descend from.

    runs/NAME/lineage.jsonl     {"branch": "9f86d081884c7d65", "step": 8}, a line for each trainer process

Each trainer process publishes under its own branch (`weights/store.py`) and resumes from the step of a checkpoint.
Later steps that earlier branches had published are lost. So the newest common ancestor of a version (step, branch) and
the current weights is at

    shared_step = min(step, steps at which later branches began)

and the version itself is an ancestor exactly if that is its own step. A branch that has no line, as in a run that began
before this file was written, counts as earlier than all that have one.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from m2forge.errors import RecordError
from m2forge.files import append_line, sync_path, whole_lines


@dataclass(frozen=True, slots=True)
class Branch:
    id: str
    step: int
    """Step of the checkpoint that the branch resumed from."""


@dataclass(frozen=True, slots=True)
class Lineage:
    branches: tuple[Branch, ...] = ()
    """Branches in the order in which they began."""

    def shared_step(self, step: int, branch: str) -> int:
        """Step of the newest version that both this version and the current weights descend from."""
        places = [place for place, known in enumerate(self.branches) if known.id == branch]
        later = self.branches[places[-1] + 1 :] if places else self.branches
        return min([step, *(other.step for other in later)])

    def holds(self, step: int, branch: str) -> bool:
        """Whether the current weights are this version or descend from it."""
        return self.shared_step(step, branch) == step


def begin_branch(path: Path, branch: str, step: int) -> None:
    """Record that a trainer resumes from `step`; call it before the trainer publishes anything."""
    append_line(path, json.dumps({"branch": branch, "step": step}))
    sync_path(path)


def read_lineage(path: Path) -> Lineage:
    """Skips a partial last line, left by a trainer that died while writing."""
    if not path.exists():
        return Lineage()
    found = []
    for number, line in enumerate(whole_lines(path.read_bytes()), start=1):
        try:
            record = json.loads(line)
            found.append(Branch(str(record["branch"]), int(record["step"])))
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{path}, line {number}: not a branch ({error}); remove the line") from error
    return Lineage(tuple(found))
