"""How far a run is: the position in its newest checkpoint, read without torch.

A folder `step-*` without its position file is not a checkpoint.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m2forge.errors import CheckpointError
from m2forge.records import JsonValue

CHECKPOINT_FOLDER, MODEL_FOLDER = "checkpoints", "model"
"""Folders of a run: its checkpoints, and the finished model; a checkpoint has a model folder too."""
POSITION_FILE = "position.json"
PREFIX = "step-"


@dataclass(frozen=True)
class Best:
    """The evaluation with the lowest held-out loss in the current phase."""

    step: int
    loss: float


@dataclass(frozen=True)
class Position:
    """The progress of a run between two steps."""

    phase: int = 0
    """Index of the current phase."""
    step_in_phase: int = 0
    """Steps completed in this phase."""
    step: int = 0
    """Steps completed in total."""
    num_tokens: int = 0
    """Tokens trained on in total."""
    source: Mapping[str, JsonValue] | None = None
    """State of the data reader after the last step, from which the next phase starts; None before the first step."""
    best: Best | None = None
    """None: nothing was evaluated in this phase. Its checkpoint is retained until the next best one is complete."""

    @property
    def last_begun(self) -> int | None:
        """Index of the last phase that has completed a step; None before the first step."""
        if not self.step:
            return None
        return self.phase if self.step_in_phase else self.phase - 1


def find_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if (path / POSITION_FILE).is_file())


def newest_checkpoint(folder: Path) -> Path | None:
    found = find_checkpoints(folder)
    return found[-1] if found else None


def begun_phase(folder: Path) -> int | None:
    """Index of the last phase begun by the run whose checkpoints are in `folder`; None before its first."""
    newest = newest_checkpoint(folder)
    return None if newest is None else read_position(newest).last_begun


def read_position(folder: Path) -> Position:
    content = read_content(folder)["position"]
    best = content.pop("best", None)
    return Position(**content, best=None if best is None else Best(**best))


def read_content(folder: Path) -> dict[str, Any]:
    """The position file of a checkpoint."""
    path = folder / POSITION_FILE
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); remove {folder.name} to go back one") from error
    return content
