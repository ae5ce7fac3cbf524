"""Writes tensors as safetensors: one file, or shards of bounded size and an index.

Shapes and dtypes are known beforehand, so the shards are planned first and written one after another: memory holds at
most one shard.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from m2forge.files import write_atomic
from m2forge.model.config_file import INDEX_FILE, WEIGHTS_FILE
from m2forge.model.tensor_source import TensorHeader


@dataclass(frozen=True)
class Written:
    """Summary of a write."""

    num_tensors: int
    num_bytes: int
    num_files: int


def write_shards(
    folder: Path, headers: Mapping[str, TensorHeader], read: Callable[[str, torch.dtype], Tensor], max_shard_bytes: int
) -> Written:
    """Write the tensors of `headers` into `folder` in order, each cast to its dtype. A tensor larger than
    `max_shard_bytes` gets its own file."""
    shards = plan_shards(headers, max_shard_bytes)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    files = dict(zip(names if len(shards) > 1 else [WEIGHTS_FILE], shards, strict=True))
    _write_files(folder, files, headers, read)
    num_bytes = sum(_num_bytes(header) for header in headers.values())
    if len(shards) > 1:
        write_index(folder, files, num_bytes)
    return Written(len(headers), num_bytes, len(shards))


def write_rank_shards(
    folder: Path,
    headers: Mapping[str, TensorHeader],
    read: Callable[[str, torch.dtype], Tensor],
    max_shard_bytes: int,
    rank: int,
) -> list[Path]:
    """Like `write_shards`, of one rank among several, and without the index, which all files together have."""
    shards = plan_shards(headers, max_shard_bytes)
    files = {f"model-rank{rank:05d}-{number:05d}.safetensors": shard for number, shard in enumerate(shards, 1)}
    _write_files(folder, files, headers, read)
    return [folder / name for name in files]


def write_index(folder: Path, files: Mapping[str, Iterable[str]], num_bytes: int) -> None:
    """Write which file holds which tensors."""
    weight_map = {name: file_name for file_name, names in files.items() for name in names}
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    write_atomic(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")


def _write_files(
    folder: Path,
    files: Mapping[str, list[str]],
    headers: Mapping[str, TensorHeader],
    read: Callable[[str, torch.dtype], Tensor],
) -> None:
    for file_name, names in files.items():
        tensors = {name: _taken(read, name, headers[name].dtype) for name in names}
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        # safetensors creates files readable only by their owner; give them the folder's permissions.
        (folder / file_name).chmod(folder.stat().st_mode & 0o666)
        del tensors


def plan_shards(headers: Mapping[str, TensorHeader], max_shard_bytes: int) -> list[list[str]]:
    """The tensor names of each file."""
    shards: list[list[str]] = []
    room = 0
    for name, header in headers.items():
        size = _num_bytes(header)
        if not shards or size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _taken(read: Callable[[str, torch.dtype], Tensor], name: str, dtype: torch.dtype) -> Tensor:
    return read(name, dtype).to("cpu", dtype).contiguous()


def _num_bytes(header: TensorHeader) -> int:
    return torch.Size(header.shape).numel() * header.dtype.itemsize
