"""Tensors that several ranks hold together, in a folder of torch.distributed.checkpoint (DCP).

    rank r: Rows by name ── write ──▶ __r_0.distcp, and from rank 0 .metadata ── read ──▶ any other rows of these names

Each row is written once, however many ranks hold it, in chunks of bounded size: a reader of any rows holds no more than
one chunk besides them. The chunks are written by `torch.save`, so that DCP's own tools read the folder too.

The folder of a network under training holds the weights under our names, stacked experts in one tensor, beside the
config.json of its family; `ShardedSource` reads it as a model folder.

Importing this loads DCP, which takes a second.
"""

import os
import pickle
import queue
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from m2forge.errors import CheckpointError
from m2forge.model.architecture import public_parts
from m2forge.model.config_file import METADATA_FILE
from m2forge.model.folder import read_identity
from m2forge.model.rows import Rows, rows_per_chunk
from m2forge.model.tensor_source import TensorHeader


def write_rows(folder: Path, held: Mapping[str, Rows], group: dist.ProcessGroup) -> None:
    """Write what the ranks of `group` hold. All of them call this together, with the same names; on return the folder
    is complete, and synced to disk."""
    try:
        save({}, storage_writer=_Writer(folder, overwrite=False), planner=_SavePlanner(held), process_group=group)
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointError(f"{folder}: rank {rank} cannot write its part: {cause}") from error


class _SavePlanner(DefaultSavePlanner):
    """DCP's own planner knows tensors and DTensors alone, and writes what a rank holds of a tensor in one piece."""

    def __init__(self, held: Mapping[str, Rows]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shapes = {name: torch.Size(rows.shape) for name, rows in held.items()}
        self._pieces = {(name, first): piece for name, rows in held.items() for first, piece in rows.chunks()}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([self._item(name, first) for name, first in self._pieces])
        return self.plan

    def _item(self, name: str, first: int) -> WriteItem:
        piece = self._pieces[name, first]
        chunk = ChunkStorageMetadata(_offsets(first, piece.dim()), piece.size())
        data: Any = TensorWriteData(chunk, TensorProperties(piece.dtype), self._shapes[name])
        return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._pieces[index.fqn, index.offset[0]]


class _Writer(FileSystemWriter):
    """DCP's own writer keeps a copy of the last chunk of each tensor until the file is complete, which may be all that
    the rank holds a second time; this one keeps none."""

    def _write_data(self, planner: Any, file_queue: "queue.Queue[Any]") -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        while not file_queue.empty():
            path, key, items = file_queue.get()
            with Path(path).open("wb") as file:
                for item in items:
                    start = file.tell()
                    # A copy, because torch.save writes all of the memory that a tensor is a view of.
                    torch.save(planner.resolve_data(item).detach().to("cpu", copy=True), file)
                    size = file.tell() - start
                    results.append(WriteResult(item.index, size, _StorageInfo(key, start, size)))
                file.flush()
                os.fsync(file.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


class ShardedFolder:
    """Reads any rows of the tensors in a folder, without the other ranks."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._reader = FileSystemReader(folder)
        try:
            self._metadata = self._reader.read_metadata()
        except (OSError, EOFError, ValueError, AttributeError, ImportError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{folder / METADATA_FILE}: cannot be read ({error})") from error
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self.headers = {
            name: TensorHeader(tuple(found.size), found.properties.dtype)
            for name, found in self._metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }

    @torch.no_grad()
    def read(self, held: Mapping[str, Rows]) -> None:
        """Fill the rows of `held`, whose names and shapes must be among those of the folder."""
        items = []
        for name, rows in held.items():
            chunk = ChunkStorageMetadata(_offsets(rows.start, len(rows.shape)), rows.tensor.size())
            stored: Any = self._metadata.state_dict_metadata[name]
            found = create_read_items_for_chunk_list(name, stored, [chunk])
            if sum(item.lengths.numel() for item in found) != rows.tensor.numel():
                raise CheckpointError(f"{self.path}: rows {rows.start} to {rows.stop} of {name} are not all there")
            items += found
        try:
            self._reader.read_data(LoadPlan(items), _LoadPlanner(held))
        except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error})") from error

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        shape, dtype = self.headers[name]
        tensor = torch.empty(stop - start, *shape[1:], dtype=dtype)
        self.read({name: Rows(tensor, start, shape)})
        return tensor


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, held: Mapping[str, Rows]) -> None:
        super().__init__()
        self._held = held

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._held[index.fqn].tensor


def _offsets(first: int, num_dims: int) -> torch.Size:
    return torch.Size([first] + [0] * (num_dims - 1))


class ShardedSource:
    """See `Source`: the weights of a network under training, by their public names."""

    problems: tuple[str, ...] = ()

    def __init__(self, folder: Path) -> None:
        self.origin = str(folder)
        self.config, self.token_ids = read_identity(folder)
        self._stored = ShardedFolder(folder)
        stored = self._stored.headers
        self._parts = {name: part for name, part in public_parts(self.config) if part.name in stored}
        empty = {name: torch.empty(shape, device="meta") for name, (shape, _) in stored.items()}
        self.headers = {
            name: TensorHeader(tuple(part.of(empty[part.name]).shape), stored[part.name].dtype)
            for name, part in self._parts.items()
        }
        # The tensors of an expert and of its neighbours lie in the same chunks.
        self._neighbours = lru_cache(maxsize=2)(self._read_neighbours)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        part = self._parts[name]
        shape, _ = self._stored.headers[part.name]
        if part.expert is None:
            return self._stored.rows(part.name, part.start, shape[0] if part.stop is None else part.stop)
        first = part.expert - part.expert % rows_per_chunk(*self._stored.headers[part.name])
        return self._neighbours(part.name, first)[part.expert - first][part.start : part.stop]

    def _read_neighbours(self, name: str, first: int) -> Tensor:
        shape, dtype = self._stored.headers[name]
        return self._stored.rows(name, first, min(shape[0], first + rows_per_chunk(shape, dtype)))
