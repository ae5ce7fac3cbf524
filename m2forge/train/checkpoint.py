"""Checkpoints of a run: network, optimizer and position, whole or not there, the newest few kept.

    checkpoints/step-00001200/
        model/                  a model folder like any other, tokenizer included
        optimizer.safetensors   moments and masters by weight name
        position.json           where the run stood: phase, steps, the reader's state

A checkpoint is built aside and renamed, so the newest one that exists is complete. Loading it and going on gives the
bits that a run without the interruption would have. It holds whole tensors, however many ranks had parts of them, so
that a run may go on with another number of ranks: rank 0 writes, every rank loads.
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
from m2forge.train.parallel import refuse_drift
from m2forge.train.shard import whole_model

MODEL_FOLDER, OPTIMIZER_FILE, POSITION_FILE = "model", "optimizer.safetensors", "position.json"
PREFIX = "step-"


@dataclass(frozen=True)
class Position:
    """Where a run stands, between two steps."""

    phase: int = 0
    """Index of the phase under way."""
    step_in_phase: int = 0
    """Steps done in it."""
    step: int = 0
    """Steps done in all."""
    num_tokens: int = 0
    """Tokens seen in all."""
    source: Mapping[str, JsonValue] | None = None
    """The state of the reader after the last step, which the next phase begins with; None before the first step."""

    @property
    def last_begun(self) -> int | None:
        """Index of the last phase of which a step is done; None before the first step."""
        if not self.step:
            return None
        return self.phase if self.step_in_phase else self.phase - 1


class CheckpointStore:
    def __init__(self, folder: Path, config: CheckpointConfig, companions: tuple[Path, ...] = ()) -> None:
        """`companions`: files to lie beside the weights, such as the tokenizer's."""
        self.folder, self.config, self.companions = folder, config, companions

    def save(self, engine: TrainEngine, position: Position) -> None:
        """Asked by all ranks at once; when it returns, on any rank, the checkpoint is there."""
        ranks = engine.optimizer.ranks
        dest = self.folder / f"{PREFIX}{position.step:08d}"
        is_there = ranks.rank == 0 and dest in self._found()
        if not self.config.keep or ranks.max_int(is_there):
            return
        refuse_drift(engine.model, ranks)
        model, (tensors, num_steps) = whole_model(engine.model, ranks), engine.optimizer.state()
        if ranks.rank == 0 and model is not None:
            content = {"position": asdict(position), "num_steps": num_steps}
            self._write(dest, model, tensors, content)
        ranks.max_int(0)

    def _write(
        self, dest: Path, model: Transformer, tensors: Mapping[str, Tensor], content: Mapping[str, object]
    ) -> None:
        # What a removal that was cut short left of a checkpoint of this step.
        shutil.rmtree(dest, ignore_errors=True)
        with staged_folder(dest) as partial:
            save_model(model, partial / MODEL_FOLDER, companions=self.companions)
            save_file({name: x.contiguous() for name, x in tensors.items()}, partial / OPTIMIZER_FILE)
            (partial / POSITION_FILE).write_text(json.dumps(content), encoding="utf-8")
        self._remove_old()

    def newest(self) -> Path | None:
        found = self._found()
        return found[-1] if found else None

    def _found(self) -> list[Path]:
        return sorted(path for path in self.folder.glob(f"{PREFIX}*") if (path / POSITION_FILE).is_file())

    def _remove_old(self) -> None:
        for path in self._found()[: -self.config.keep]:
            # Without its position a folder is no checkpoint, so a removal that is cut short leaves none that is torn.
            (path / POSITION_FILE).unlink()
            shutil.rmtree(path)
        for left in (*self.folder.glob(f".{PREFIX}*.partial"), *self._without_position()):
            shutil.rmtree(left, ignore_errors=True)

    def _without_position(self) -> list[Path]:
        return [path for path in self.folder.glob(f"{PREFIX}*") if not (path / POSITION_FILE).is_file()]


def begun_phase(folder: Path) -> int | None:
    """Index of the last phase begun by the run whose checkpoints lie in `folder`; None before its first."""
    newest = CheckpointStore(folder, CheckpointConfig()).newest()
    return None if newest is None else read_position(newest).last_begun


def load_checkpoint_model(folder: Path, device: torch.device, dtype: torch.dtype) -> Transformer:
    return load_model(folder / MODEL_FOLDER, device=device, dtype=dtype)


def read_position(folder: Path) -> Position:
    return Position(**_content(folder)["position"])


def restore(engine: TrainEngine, folder: Path) -> None:
    """Fill the optimizer of an engine whose network was loaded from the same checkpoint, on every rank."""
    try:
        tensors = load_file(folder / OPTIMIZER_FILE)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / OPTIMIZER_FILE}: cannot be read ({error}); remove {folder.name}") from error
    engine.optimizer.load_state(tensors, _content(folder)["num_steps"])


def _content(folder: Path) -> dict[str, Any]:
    path = folder / POSITION_FILE
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); remove {folder.name} to go back one") from error
    return content
