"""Writes tensors as safetensors: one file, or shards of bounded size and an index.

Shapes and dtypes are known beforehand, so the shards are planned first, and each tensor has its place in its file
before it is read. Several threads write to several files, because one file takes one write at a time: a GPU's tensors
are copied to host memory while those before them are written. Host memory holds a bounded part of all.
"""

import contextlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

import torch
from torch import Tensor

from m2forge.files import write_atomic
from m2forge.model.config_file import INDEX_FILE, WEIGHTS_FILE
from m2forge.model.manifest import DTYPES, NUM_THREADS
from m2forge.model.tensor_source import TensorHeader

MOST_BYTES_IN_FLIGHT = 1 << 29
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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
    files = plan_files(headers, max_shard_bytes)
    num_files = len(list(write_files(folder, files, headers, read)))
    num_bytes = sum(_num_bytes(header) for header in headers.values())
    if num_files > 1:
        write_index(folder, files, num_bytes)
    return Written(len(headers), num_bytes, num_files)


def write_index(folder: Path, files: Mapping[str, Iterable[str]], num_bytes: int) -> None:
    """Write which file holds which tensors."""
    weight_map = {name: file_name for file_name, names in files.items() for name in names}
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    write_atomic(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")


def write_files(
    folder: Path,
    files: Mapping[str, list[str]],
    headers: Mapping[str, TensorHeader],
    read: Callable[[str, torch.dtype], Tensor],
) -> Iterator[Path]:
    """Write the tensors of each file; yields the files in order, some at a time, once they are complete."""
    names = list(files)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for first in range(0, len(names), NUM_THREADS):
            together = names[first : first + NUM_THREADS]
            write_together(folder, {name: files[name] for name in together}, headers, read, pool)
            yield from (folder / name for name in together)


def write_together(
    folder: Path,
    files: Mapping[str, list[str]],
    headers: Mapping[str, TensorHeader],
    read: Callable[[str, torch.dtype], Tensor],
    pool: ThreadPoolExecutor,
) -> None:
    in_flight, num_bytes = deque[tuple[Future[None], int]](), 0
    with contextlib.ExitStack() as stack:
        places: list[list[tuple[str, int, int]]] = []
        for file_name, names in files.items():
            file = stack.enter_context((folder / file_name).open("wb"))
            (folder / file_name).chmod(folder.stat().st_mode & 0o666)
            starts = _begin(file.fileno(), {name: headers[name] for name in names})
            places.append([(name, file.fileno(), start) for name, start in starts.items()])
        for name, descriptor, start in filter(None, chain.from_iterable(zip_longest(*places))):
            host, is_ready = _to_host(read(name, headers[name].dtype), headers[name].dtype)
            in_flight.append((pool.submit(_put, descriptor, host, is_ready, start), host.nbytes))
            num_bytes += host.nbytes
            while num_bytes > MOST_BYTES_IN_FLIGHT:
                written, size = in_flight.popleft()
                written.result()
                num_bytes -= size
        for written, _ in in_flight:
            written.result()


def _begin(descriptor: int, headers: Mapping[str, TensorHeader]) -> dict[str, int]:
    """Write the header, and give the file its size; returns where the bytes of each tensor begin."""
    # As other writers of the format order them, which keeps every tensor aligned.
    names = sorted(headers, key=lambda name: (-headers[name].dtype.itemsize, name))
    slices: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = dict[str, int](), 0
    for name in names:
        header, starts[name] = headers[name], end
        end += _num_bytes(header)
        offsets = [starts[name], end]
        slices[name] = {"dtype": _NAMES[header.dtype], "shape": list(header.shape), "data_offsets": offsets}
    head = json.dumps(slices, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    head = len(head).to_bytes(8, "little") + head
    os.pwrite(descriptor, head, 0)
    os.truncate(descriptor, len(head) + end)
    return {name: len(head) + start for name, start in starts.items()}


def _to_host(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, torch.cuda.Event | None]:
    """The tensor in host memory once the event has happened."""
    tensor = tensor.detach().to(dtype).contiguous()
    if not tensor.is_cuda:
        return tensor.cpu(), None
    host = torch.empty(tensor.shape, dtype=dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event


def _put(descriptor: int, host: Tensor, is_ready: torch.cuda.Event | None, start: int) -> None:
    if is_ready is not None:
        is_ready.synchronize()
    content = host.reshape(-1).view(torch.uint8).numpy().data
    while len(content):
        num_written = os.pwrite(descriptor, content, start)
        content, start = content[num_written:], start + num_written


def plan_files(
    headers: Mapping[str, TensorHeader], max_shard_bytes: int, rank: int | None = None
) -> dict[str, list[str]]:
    """The tensor names of each file, by the file's name. `rank`: of the process, if several write one model."""
    shards = _plan_shards(headers, max_shard_bytes)
    numbers = range(1, len(shards) + 1)
    if rank is not None:
        names = [f"model-rank{rank:05d}-{number:05d}.safetensors" for number in numbers]
    elif len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in numbers]
    else:
        names = [WEIGHTS_FILE]
    return dict(zip(names, shards, strict=True))


def _plan_shards(headers: Mapping[str, TensorHeader], max_shard_bytes: int) -> list[list[str]]:
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


def _num_bytes(header: TensorHeader) -> int:
    return torch.Size(header.shape).numel() * header.dtype.itemsize
