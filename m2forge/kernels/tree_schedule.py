"""Tile schedule of tree attention: which query tiles attend to which key tiles.

Tokens are in depth-first order, so exactly the queries m … exit[m]−1 see key m. For a tile of 64 keys the query tiles
that see any of it are therefore contiguous, and so are those that see all of it: a few integers per tile describe both
runs, and only the tiles at the ends of a run need the per-token mask. Documents are trees of one node each.

The forward lists hold every pair of tiles: 196,608 tokens in one document make 4.7 million pairs.

The whole tree attends to the keys of a long shared prompt, and a single program for them would outlast the rest: the
backward pass splits runs into chunks. Lists begin with the longest work.

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
"""Largest number of query tiles of one item."""
PADDING = 128
"""Lists are padded to a multiple of this, so that Triton does not specialise kernels on their length."""

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Schedule:
    """Query tiles and the key tiles they see; int32."""

    exit_N: Tensor
    order_T: Tensor
    """Query tiles, those with the most work first."""
    full_start: Tensor
    """Start of each query tile's list in `full_tile`, and the end of the last."""
    full_tile: Tensor
    """Key tiles in which every query of the tile sees every key."""
    part_start: Tensor
    part_tile: Tensor
    """Key tiles that need the per-token mask."""
    item_I5: Tensor
    """Backward: a key tile, and the query tiles [begin, full_begin, full_end, end) of one program."""


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
    """For each key tile, the query tiles that see any of it, and within them those that see all of it."""
    num_tiles = -(-exit_N.size // TILE)
    exit_TK = np.zeros((num_tiles, TILE), np.int64)
    exit_TK.ravel()[: exit_N.size] = exit_N
    begin = np.arange(num_tiles)
    end = -(-exit_TK.max(1) // TILE)
    # The tile itself is on the diagonal. In a partial last tile missing tokens have exit 0, so it counts as partly
    # seen.
    full_end = np.clip(exit_TK.min(1) // TILE, begin + 1, end)
    return begin, begin + 1, full_end, end


def _pairs(begin: Indices, end: Indices) -> tuple[Indices, Indices]:
    """(query tile, key tile) for each query tile in the run of each key tile."""
    size = end - begin
    before = size.cumsum() - size
    return np.arange(size.sum()) + np.repeat(begin - before, size), np.repeat(np.arange(size.size), size)


def _by_query(query: Indices, key: Indices, num_tiles: int) -> tuple[Indices, Indices]:
    # NumPy sorts 16-bit keys by radix.
    order = np.argsort(query.astype(np.uint16) if num_tiles < 1 << 16 else query, kind="stable")
    return np.concatenate(([0], np.bincount(query, minlength=num_tiles).cumsum())), key[order]


def _items(begin: Indices, full_begin: Indices, full_end: Indices, end: Indices) -> Indices:
    """Runs split into chunks, the longest first."""
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
    """Moves all arrays in one copy."""
    joined = torch.from_numpy(np.concatenate(columns).astype(np.int32))
    if device.type == "cuda":
        joined = joined.pin_memory().to(device, non_blocking=True)
    parts: tuple[Tensor, ...] = joined.split([column.size for column in columns])
    return parts
