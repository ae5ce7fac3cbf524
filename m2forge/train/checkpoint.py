"""Checkpoints of a run: model, optimizer state and position, written atomically. The store keeps the newest few and the
one with the lowest held-out loss.

    checkpoints/step-00001200/
        model/                  an ordinary model folder, tokenizer included
        optimizer.safetensors   moments and float32 master weights by weight name
        position.json           phase, step counts, the data reader's state and the best evaluation so far

A checkpoint is written to a temporary folder and renamed, so the newest one that exists is complete. Resuming from it
gives bit-identical results to a run without the interruption. It holds unsharded tensors whatever the number of ranks,
so a run may resume on a different number of ranks: rank 0 writes, every rank loads.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from m2forge.errors import CheckpointError
from m2forge.files import staged_folder
from m2forge.model.checkpoint import load_model, save_model
from m2forge.model.transformer import Transformer
from m2forge.records import JsonValue
from m2forge.train.config import CheckpointConfig
from m2forge.train.engine import TrainEngine
from m2forge.train.parallel import refuse_drift, whole_model

MODEL_FOLDER, OPTIMIZER_FILE, POSITION_FILE = "model", "optimizer.safetensors", "position.json"
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
    """None: nothing was evaluated in this phase. Its checkpoint is kept until the next best one is complete."""

    @property
    def last_begun(self) -> int | None:
        """Index of the last phase that has completed a step; None before the first step."""
        if not self.step:
            return None
        return self.phase if self.step_in_phase else self.phase - 1


class CheckpointStore:
    def __init__(self, folder: Path, config: CheckpointConfig, companions: tuple[Path, ...] = ()) -> None:
        """`companions`: files to copy beside the weights, such as the tokenizer's."""
        self.folder, self.config, self.companions = folder, config, companions

    def save(self, engine: TrainEngine, position: Position) -> None:
        """Write a checkpoint. All ranks call this together; on return, on any rank, the checkpoint exists."""
        ranks = engine.optimizer.ranks
        dest = self.path(position.step)
        is_there = ranks.rank == 0 and dest in self._found()
        if not self.config.keep or ranks.max_int(is_there):
            return
        refuse_drift(engine.model, ranks)
        model, (tensors, num_steps) = whole_model(engine.model, ranks), engine.optimizer.state()
        if ranks.rank == 0 and model is not None:
            content = {"position": _to_json(position), "num_steps": num_steps}
            self._write(dest, model, tensors, content)
        ranks.max_int(0)

    def _write(
        self, dest: Path, model: Transformer, tensors: Mapping[str, Tensor], content: Mapping[str, object]
    ) -> None:
        # Remains of a checkpoint of this step whose removal was interrupted.
        shutil.rmtree(dest, ignore_errors=True)
        with staged_folder(dest) as partial:
            save_model(model, partial / MODEL_FOLDER, companions=self.companions)
            save_file({name: x.contiguous() for name, x in tensors.items()}, partial / OPTIMIZER_FILE)
            (partial / POSITION_FILE).write_text(json.dumps(content), encoding="utf-8")
        self._remove_old()

    def path(self, step: int) -> Path:
        return self.folder / f"{PREFIX}{step:08d}"

    def newest(self) -> Path | None:
        found = self._found()
        return found[-1] if found else None

    def _found(self) -> list[Path]:
        return sorted(path for path in self.folder.glob(f"{PREFIX}*") if (path / POSITION_FILE).is_file())

    def _remove_old(self) -> None:
        found = self._found()
        best = read_position(found[-1]).best
        old = [path for path in found[: -self.config.keep] if best is None or path != self.path(best.step)]
        for path in old:
            # A folder without its position file is not a checkpoint, so an interrupted removal leaves no partial one.
            (path / POSITION_FILE).unlink()
            shutil.rmtree(path)
        for left in (*self.folder.glob(f".{PREFIX}*.partial"), *self._without_position()):
            shutil.rmtree(left, ignore_errors=True)

    def _without_position(self) -> list[Path]:
        return [path for path in self.folder.glob(f"{PREFIX}*") if not (path / POSITION_FILE).is_file()]


def begun_phase(folder: Path) -> int | None:
    """Index of the last phase begun by the run whose checkpoints are in `folder`; None before its first."""
    newest = CheckpointStore(folder, CheckpointConfig()).newest()
    return None if newest is None else read_position(newest).last_begun


def load_checkpoint_model(folder: Path, device: torch.device, dtype: torch.dtype) -> Transformer:
    return load_model(folder / MODEL_FOLDER, device=device, dtype=dtype)


def read_position(folder: Path) -> Position:
    content = _content(folder)["position"]
    best = content.pop("best", None)
    return Position(**content, best=None if best is None else Best(**best))


def restore(engine: TrainEngine, folder: Path) -> None:
    """Load the optimizer state of an engine whose model was loaded from the same checkpoint, on every rank."""
    try:
        tensors = load_file(folder / OPTIMIZER_FILE)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / OPTIMIZER_FILE}: cannot be read ({error}); remove {folder.name}") from error
    engine.optimizer.load_state(tensors, _content(folder)["num_steps"])


def _to_json(position: Position) -> dict[str, object]:
    """Without `best` in a run that evaluates nothing."""
    return {name: value for name, value in asdict(position).items() if name != "best" or value is not None}


def _content(folder: Path) -> dict[str, Any]:
    path = folder / POSITION_FILE
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); remove {folder.name} to go back one") from error
    return content
