"""Checkpoints of a run: model, optimizer state and position, written atomically. The store keeps the newest few and the
one with the lowest held-out loss.

    checkpoints/step-00001200/
        model/                  a model folder, tokenizer included
        optimizer.safetensors   moments and float32 master weights by weight name
        position.json           phase, step counts, the data reader's state and the best evaluation so far

One process writes an ordinary model folder. Several write what each holds, in the format of
torch.distributed.checkpoint: `model` has the weights in it (model/sharded_folder.py), and a folder `optimizer` takes
the file's place. Either is loaded by any mesh, each rank reading what it will hold.

A checkpoint is written to a temporary folder and renamed, so the newest one that exists is complete. Resuming from it
gives bit-identical results to a run without the interruption.

A thread writes it while training continues. Ranks first copy what lies in GPU memory to host memory. Everything
else is written from where it lies, and the next update waits for the end: until then nothing changes it. An error of
the thread is raised by the next save, update or `wait`.
"""

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from m2forge.errors import CheckpointError
from m2forge.files import commit_folder, staged_folder
from m2forge.model.checkpoint import save_model, write_identity
from m2forge.model.lora import is_adapter
from m2forge.model.rows import Rows
from m2forge.model.start import Start, resume_from
from m2forge.model.tensor_source import TensorHeader
from m2forge.model.transformer import Transformer
from m2forge.train.config import CheckpointConfig
from m2forge.train.engine import TrainEngine
from m2forge.train.optimizer import StoredState
from m2forge.train.parallel import held_weights, refuse_drift
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

if TYPE_CHECKING:
    import torch.distributed as dist

OPTIMIZER_FILE, OPTIMIZER_FOLDER = "optimizer.safetensors", "optimizer"


class Writing(threading.Thread):
    """A write in the background."""

    def __init__(self, write: Callable[[], object]) -> None:
        super().__init__(name="writing", daemon=True)
        self._write = write
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # noqa: BLE001, raised again by `end`
            self._error = error

    def end(self) -> None:
        """Wait until it is written; raise the error that prevented it."""
        self.join()
        if self._error is not None:
            raise self._error


class CheckpointStore:
    def __init__(self, folder: Path, config: CheckpointConfig, companions: tuple[Path, ...] = ()) -> None:
        """`companions`: files to copy beside the weights, such as the tokenizer's."""
        self.folder, self.config, self.companions = folder, config, companions
        self._writing: Writing | None = None
        self._group: dist.ProcessGroup | None = None

    def save(self, engine: TrainEngine, position: Position) -> None:
        """Write a checkpoint. All ranks call this together; on return, on any rank, the checkpoint exists."""
        self.begin(engine, position)
        self.wait()

    def begin(self, engine: TrainEngine, position: Position) -> None:
        """Begin to write a checkpoint, after the one before is complete. All ranks call this together. Until `wait`
        returns, the model gains no modules."""
        self.wait()
        ranks, dest = engine.ranks, self.path(position.step)
        is_there = ranks.rank == 0 and dest in self._found()
        if ranks.rank == 0 and self.config.keep and not is_there:
            # Remains of a checkpoint of this step whose writing or removal was interrupted.
            for left in (dest, _partial(dest)):
                shutil.rmtree(left, ignore_errors=True)
        if not self.config.keep or ranks.max_int(is_there):
            return
        refuse_drift(engine.model, ranks)
        content = {"position": _to_json(position), "num_steps": engine.optimizer.num_steps}
        if ranks.num_ranks == 1:
            held = engine.optimizer.held()
            engine.before_update.add(self.wait)
            self._writing = Writing(lambda: self._write(dest, engine.model, held, content))
        else:
            self._writing = Writing(self._parts_writer(dest, engine, content))

    def wait(self) -> None:
        """Wait until the checkpoint that was begun is complete; raise the error that prevented it."""
        if self._writing is not None:
            self._writing.join()
            writing, self._writing = self._writing, None
            writing.end()

    def leave(self) -> None:
        """After an error: wait until the checkpoint that one process has begun is complete, or has failed. Of several
        ranks another may have ended, which they would wait for."""
        if self._writing is not None and self._group is None:
            self._writing.join()

    @property
    def is_writing(self) -> bool:
        return self._writing is not None and self._writing.is_alive()

    def _write(self, dest: Path, model: Transformer, held: Mapping[str, Rows], content: Mapping[str, object]) -> None:
        """What one process writes."""
        with staged_folder(dest) as partial:
            save_model(model, partial / MODEL_FOLDER, companions=self.companions)
            save_file({name: rows.tensor.contiguous() for name, rows in held.items()}, partial / OPTIMIZER_FILE)
            (partial / POSITION_FILE).write_text(json.dumps(content), encoding="utf-8")
        self._remove_old()

    def _parts_writer(self, dest: Path, engine: TrainEngine, content: Mapping[str, object]) -> Callable[[], None]:
        """What one of several ranks does in its thread. The threads have their own process group: the ranks' next step
        communicates at the same time."""
        import torch.distributed as dist

        from m2forge.model.sharded_folder import write_rows

        engine.optimizer.reshard()
        model, partial = engine.model, _partial(dest)
        weights = {n: rows for n, rows in held_weights(model).items() if model.lora is None or is_adapter(n)}
        parts = {MODEL_FOLDER: weights, OPTIMIZER_FOLDER: engine.optimizer.held()}
        parts = {folder: {name: _on_host(rows) for name, rows in held.items()} for folder, held in parts.items()}
        if engine.device.type == "cpu" or engine.optimizer.offload != "none":
            engine.before_update.add(self.wait)
        group = self._group = self._group or dist.new_group(backend="gloo")

        def commit() -> None:
            write_identity(model, partial / MODEL_FOLDER, self.companions)
            (partial / POSITION_FILE).write_text(json.dumps(content), encoding="utf-8")
            commit_folder(partial, dest)
            self._remove_old()

        def write() -> None:
            for folder, held in parts.items():
                write_rows(partial / folder, held, group)
            outcome: list[str | None] = [None]
            if engine.ranks.rank == 0:
                try:
                    commit()
                except (CheckpointError, OSError) as error:
                    outcome = [str(error)]
            dist.broadcast_object_list(outcome, 0, group)
            if outcome[0] is not None:
                raise CheckpointError(f"{dest}: rank 0 cannot complete it: {outcome[0]}")

        return write

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


def _partial(dest: Path) -> Path:
    """Where several ranks write a checkpoint before it is complete."""
    return dest.with_name(f".{dest.name}.partial")


def _on_host(rows: Rows) -> Rows:
    return rows._replace(tensor=rows.tensor.cpu())


def load_start(folder: Path) -> Start:
    """The model state from which a run resumes."""
    return resume_from(folder / MODEL_FOLDER)


def restore(engine: TrainEngine, folder: Path) -> None:
    """Load the optimizer state of an engine whose model was loaded from the same checkpoint, on every rank."""
    engine.optimizer.load(_open_state(folder), read_content(folder)["num_steps"])


def _open_state(folder: Path) -> StoredState:
    if not (folder / OPTIMIZER_FOLDER).is_dir():
        return OptimizerFile(folder / OPTIMIZER_FILE)
    from m2forge.model.sharded_folder import ShardedFolder

    return ShardedFolder(folder / OPTIMIZER_FOLDER)


class OptimizerFile:
    """The state that one process wrote."""

    def __init__(self, path: Path) -> None:
        try:
            file: Any = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); remove {path.parent.name}") from error
        self._file, names = file, file.keys()
        self.headers = {name: TensorHeader(tuple(file.get_slice(name).get_shape()), torch.float32) for name in names}

    @torch.no_grad()
    def read(self, held: Mapping[str, Rows]) -> None:
        for name, rows in held.items():
            rows.tensor.copy_(self._file.get_slice(name)[rows.start : rows.stop])


def _to_json(position: Position) -> dict[str, object]:
    """Without `best` in a run that evaluates nothing."""
    return {name: value for name, value in asdict(position).items() if name != "best" or value is not None}
