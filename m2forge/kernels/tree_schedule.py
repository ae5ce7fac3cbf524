"""Which tiles of queries meet which tiles of keys, when tokens of trees attend to their ancestors.

Tokens lie depth-first, so key m is seen by the queries m … exit[m]−1 and by no others. For a tile of 64 keys the
queries that see any of it are therefore one run of tiles, and so are those that see all of it: a few integers per tile
say everything, and only the tiles at the ends of a run need the token test. Documents are trees of one node each.

The lists of the forward pass name every pair of tiles: 196,608 tokens in one document make 4.7 million of them.

The keys of a long shared prompt are seen by the whole tree, and one program for all of that would outlast the rest: the
backward pass gets runs cut into chunks. Lists begin with what takes longest.

Shapes: N tokens, T tiles, I items.
"""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from m2forge.kernels.tree_attention import TreeLayout

TILE = 64
CHUNK = 128
"""Tiles of queries that one item takes, at most."""
PADDING = 128
"""Lists are as long as a multiple of this, so that no length means something special to the compiler."""

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Schedule:
    """Tiles of queries and the tiles of keys they see; int32."""

    exit_N: Tensor
    order_T: Tensor
    """Tiles of queries, those with most to do first."""
    full_start: Tensor
    """Where the list of each tile of queries starts in `full_tile`, and behind the last one."""
    full_tile: Tensor
    """Tiles of keys of which every query sees every key."""
    part_start: Tensor
    part_tile: Tensor
    """Tiles of keys that need the token test."""
    item_I5: Tensor
    """Backward: a tile of keys, and the tiles of queries [begin, full_begin, full_end, end) of one program."""


def make_schedule(layout: TreeLayout, device: torch.device) -> Schedule:
    num_tokens = int(layout.end_V[-1])
    exit_N = np.repeat(layout.exit_V.numpy(), (layout.end_V - layout.start_V).numpy())
    runs = _runs(exit_N)
    begin, full_begin, full_end, end = runs
    num_tiles = -(-num_tokens // TILE)
    full_start, full_tile = _by_query(*_pairs(full_begin, full_end), num_tiles)
    (front_query, front_key), (back_query, back_key) = _pairs(begin, full_begin), _pairs(full_end, end)
    part_query, part_key = np.concatenate((front_query, back_query)), np.concatenate((front_key, back_key))
    part_start, part_tile = _by_query(part_query, part_key, num_tiles)
    order_T = np.argsort(-(np.diff(full_start) + np.diff(part_start)), kind="stable")
    item_I5 = _items(*runs)
    columns = (exit_N, order_T, full_start, _padded(full_tile), part_start, _padded(part_tile), item_I5.ravel())
    parts = dict(zip((field.name for field in fields(Schedule)), _to_device(columns, device), strict=True))
    parts["item_I5"] = parts["item_I5"].view(-1, 5)
    for part in parts.values():
        torch._dynamo.maybe_mark_dynamic(part, 0)
    return Schedule(**parts)


def _runs(exit_N: Indices) -> tuple[Indices, Indices, Indices, Indices]:
    """For each tile of keys the tiles of queries that see any of it, and within them those that see all of it."""
    num_tiles = -(-exit_N.size // TILE)
    exit_TK = np.zeros((num_tiles, TILE), np.int64)
    exit_TK.ravel()[: exit_N.size] = exit_N
    begin = np.arange(num_tiles)
    end = -(-exit_TK.max(1) // TILE)
    # The tile itself lies on the diagonal. A last tile that is not full counts as exit 0, so it is seen in part.
    full_end = np.clip(exit_TK.min(1) // TILE, begin + 1, end)
    return begin, begin + 1, full_end, end


def _pairs(begin: Indices, end: Indices) -> tuple[Indices, Indices]:
    """(tile of queries, tile of keys) for each tile of queries in the run of each tile of keys."""
    size = end - begin
    before = size.cumsum() - size
    return np.arange(size.sum()) + np.repeat(begin - before, size), np.repeat(np.arange(size.size), size)


def _by_query(query: Indices, key: Indices, num_tiles: int) -> tuple[Indices, Indices]:
    # Sixteen-bit keys are sorted by radix.
    order = np.argsort(query.astype(np.uint16) if num_tiles < 1 << 16 else query, kind="stable")
    return np.concatenate(([0], np.bincount(query, minlength=num_tiles).cumsum())), key[order]


def _items(begin: Indices, full_begin: Indices, full_end: Indices, end: Indices) -> Indices:
    """Runs cut into chunks, the longest chunks first."""
    num_chunks = -(-(end - begin) // CHUNK)
    tile = np.repeat(np.arange(begin.size), num_chunks)
    index = np.arange(tile.size) - np.repeat(num_chunks.cumsum() - num_chunks, num_chunks)
    first = begin[tile] + index * CHUNK
    last = np.minimum(first + CHUNK, end[tile])
    columns = (tile, first, np.clip(full_begin[tile], first, last), np.clip(full_end[tile], first, last), last)
    items = np.stack(columns, 1)[np.argsort(first - last, kind="stable")]
    return np.concatenate((items, np.zeros((-items.shape[0] % PADDING, 5), np.int64)))


def _padded(array: Indices) -> Indices:
    return np.concatenate((array, np.zeros(-array.size % PADDING or PADDING, np.int64)))


def _to_device(columns: tuple[Indices, ...], device: torch.device) -> tuple[Tensor, ...]:
    """One copy for all of them."""
    joined = torch.from_numpy(np.concatenate(columns).astype(np.int32))
    if device.type == "cuda":
        joined = joined.pin_memory().to(device, non_blocking=True)
    parts: tuple[Tensor, ...] = joined.split([column.size for column in columns])
    return parts
