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
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from m2forge.errors import CheckpointError
from m2forge.files import staged_folder
from m2forge.model.checkpoint import load_trained, save_model
from m2forge.model.transformer import Transformer
from m2forge.train.config import CheckpointConfig
from m2forge.train.engine import TrainEngine
from m2forge.train.parallel import refuse_drift, unsharded_model
from m2forge.train.position import (
    MODEL_FOLDER,
    POSITION_FILE,
    PREFIX,
    Position,
    find_checkpoints,
    newest_checkpoint,
    read_content,
    read_position,
)

OPTIMIZER_FILE = "optimizer.safetensors"


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
        model, (tensors, num_steps) = unsharded_model(engine.model, ranks), engine.optimizer.state()
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
        return newest_checkpoint(self.folder)

    def _found(self) -> list[Path]:
        return find_checkpoints(self.folder)

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


def load_checkpoint_model(folder: Path, device: torch.device, dtype: torch.dtype) -> Transformer:
    return load_trained(folder / MODEL_FOLDER, device=device, dtype=dtype)


def restore(engine: TrainEngine, folder: Path) -> None:
    """Load the optimizer state of an engine whose model was loaded from the same checkpoint, on every rank."""
    try:
        tensors = load_file(folder / OPTIMIZER_FILE)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / OPTIMIZER_FILE}: cannot be read ({error}); remove {folder.name}") from error
    engine.optimizer.load_state(tensors, read_content(folder)["num_steps"])


def _to_json(position: Position) -> dict[str, object]:
    """Without `best` in a run that evaluates nothing."""
    return {name: value for name, value in asdict(position).items() if name != "best" or value is not None}
