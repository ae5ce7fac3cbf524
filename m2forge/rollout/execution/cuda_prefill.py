"""Steps that prefill prompts, on CUDA, as CUDA graphs: such a step is hundreds of kernel launches, for which a small
network's GPU waits.

A graph holds the network's forward pass over a fixed number of rows: one for each sequence that runs one token, and
tiles of `TILE_TOKENS` rows, in which the spans of the other sequences lie, each beginning at a tile of its own. Every
tile is a sequence for the attention, with the block table of its span. Rows without a token are padding. All that a
step changes is one buffer of integers.

A step with more rows than `most_rows` runs without a graph: its kernels take longer than their launches, and padding
would cost more than it saves. So does a step whose shape is rare, because a capture takes as long as several steps.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from m2forge.model.config import ModelConfig
from m2forge.model.count import count
from m2forge.rollout.execution.decode import Network
from m2forge.rollout.kv.paged_plan import Bundle, PagedCache, PagedPlan, Span

TILE_TOKENS = 32
MOST_ROWS = 16384
LAYER_LAUNCH_S, FLOPS = 1e-3, 4e14
"""About what the launches of a layer take, and the rate of matrix products on a large GPU."""
MOST_PADDING, MOST_PADDED_PART = 2, 8
"""A captured graph serves a shape if it has at most so many times its rows, or this part of `most_rows`."""
PATIENCE, PATIENCE_WITH_LARGER = 1, 24
"""Steps of a shape before it gets its own graph: which run without one, or in a larger one."""
LEAST_BLOCKS = 32
Integers = npt.NDArray[np.int64]


class Shape(NamedTuple):
    num_single: int
    """Rows of sequences that run one token."""
    num_tiles: int
    num_blocks: int
    """Width of the block tables."""

    @property
    def num_rows(self) -> int:
        return self.num_single + self.num_tiles * TILE_TOKENS

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the parts of the integers: token, position and slot of every row, and both block tables."""
        tables = (self.num_single * self.num_blocks, self.num_tiles * self.num_blocks)
        return self.num_rows, self.num_rows, self.num_rows, *tables

    def holds(self, other: "Shape") -> bool:
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))


def most_rows(config: ModelConfig) -> int:
    """Rows whose products take as long as the launches of their kernels."""
    flops = 2 * count(config).active_in_layers
    return min(MOST_ROWS, int(config.num_layers * LAYER_LAUNCH_S * FLOPS / flops))


def shape_of(spans: Sequence[Span]) -> Shape:
    """The shape of a graph for these spans: few different ones, so that few are captured."""
    num_single = sum(span.num_tokens == 1 for span in spans)
    num_tiles = sum(-(-span.num_tokens // TILE_TOKENS) for span in spans if span.num_tokens > 1)
    num_blocks = max(len(span.blocks) for span in spans)
    power = _power_of_two(num_tiles, 4)
    is_less = power > 4 and num_tiles <= 3 * power // 4
    return Shape(
        _power_of_two(num_single, 16),
        3 * power // 4 if is_less else power,
        _power_of_two(num_blocks, LEAST_BLOCKS),
    )


def _power_of_two(number: int, least: int) -> int:
    """0, or the next power of two from `least`."""
    return max(least, 1 << (number - 1).bit_length()) if number else 0


def lay_out(tokens: Sequence[int], spans: Sequence[Span], shape: Shape, cache: PagedCache) -> tuple[Integers, Integers]:
    """The integers of a step, and the row of each token. `spans`: in the order of `arranged`, so that those of one
    token come first; `tokens`: of all spans, in their order."""
    size, counts = cache.block_tokens, np.array([span.num_tokens for span in spans], np.int64)
    num_single = int((counts == 1).sum())
    tables = np.zeros((len(spans), shape.num_blocks), np.int64)
    for table, span in zip(tables, spans, strict=True):
        table[: len(span.blocks)] = span.blocks
    num_tiles = -(-counts[num_single:] // TILE_TOKENS)
    first_tiles = shape.num_single + TILE_TOKENS * (num_tiles.cumsum() - num_tiles)
    first_rows = np.concatenate((np.arange(num_single), first_tiles))
    span_N = np.repeat(np.arange(len(spans)), counts)
    index_N = np.arange(len(tokens)) - np.repeat(counts.cumsum() - counts, counts)
    position_N, row_N = (
        np.array([span.start for span in spans], np.int64)[span_N] + index_N,
        first_rows[span_N] + index_N,
    )
    integers = np.zeros(sum(shape.sizes), np.int64)
    token_R, position_R, slot_R, single_tables, tile_tables = _parts(integers, shape)
    position_R[:], slot_R[:] = -1, cache.scratch_slot
    token_R[row_N], position_R[row_N] = tokens, position_N
    slot_R[row_N] = tables[span_N, position_N // size] * size + position_N % size
    single_tables.reshape(-1, shape.num_blocks)[:num_single] = tables[:num_single]
    tile_tables.reshape(-1, shape.num_blocks)[: num_tiles.sum()] = tables[num_single:].repeat(num_tiles, 0)
    return integers, row_N


def _parts(integers: Integers, shape: Shape) -> list[Integers]:
    """Views of the parts."""
    return np.split(integers, np.cumsum(shape.sizes)[:-1])


def run_laid_out(network: Network, integers: Tensor, shape: Shape, cache: PagedCache) -> tuple[Tensor, Tensor | None]:
    """The LM head's input and the experts of every row."""
    token_R, position_R, slot_R, single_tables, tile_tables = integers.split(shape.sizes)
    bundles = [
        Bundle(0, single_tables.view(-1, shape.num_blocks), position_R[: shape.num_single].view(-1, 1)),
        Bundle(
            shape.num_single,
            tile_tables.view(-1, shape.num_blocks),
            position_R[shape.num_single :].view(-1, TILE_TOKENS),
        ),
    ]
    plan = PagedPlan(cache, [each for each in bundles if each.position_BQ.numel()], 0, position_R, slot_R)
    _, hidden_RD, experts_RLK = network.main(token_R, plan)
    return hidden_RD, experts_RLK


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    integers: Tensor
    hidden_RD: Tensor
    experts_RLK: Tensor | None


class PrefillGraphs:
    def __init__(self, network: Network, cache: PagedCache, config: ModelConfig) -> None:
        self._network, self._cache, self._most_rows = network, cache, most_rows(config)
        self._captured: dict[Shape, _Captured] = {}
        self._num_missed = Counter[Shape]()
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    def run(self, tokens: Sequence[int], spans: Sequence[Span]) -> tuple[Tensor, Tensor | None] | None:
        """The LM head's input and the experts of every token; None if the step is better run without a graph."""
        shape = self._serving(shape_of(spans))
        if shape is None:
            return None
        if shape not in self._captured:
            self._captured[shape] = self._capture(shape)
        captured = self._captured[shape]
        integers, row_N = lay_out(tokens, spans, shape, self._cache)
        captured.integers.copy_(torch.from_numpy(integers))
        captured.graph.replay()
        row = torch.from_numpy(row_N).to(self._cache.device)
        experts_RLK = captured.experts_RLK
        return captured.hidden_RD[row], None if experts_RLK is None else experts_RLK[row]

    def _serving(self, wanted: Shape) -> Shape | None:
        """The smallest captured shape that holds it, or the shape itself, or None."""
        if wanted.num_rows > self._most_rows:
            return None
        if wanted in self._captured:
            return wanted
        most = max(MOST_PADDING * wanted.num_rows, self._most_rows // MOST_PADDED_PART)
        larger = [shape for shape in self._captured if shape.holds(wanted) and shape.num_rows <= most]
        self._num_missed[wanted] += 1
        if self._num_missed[wanted] > (PATIENCE_WITH_LARGER if larger else PATIENCE):
            return wanted
        return min(larger, key=lambda shape: shape.num_rows, default=None)

    def _capture(self, shape: Shape) -> _Captured:
        device = self._cache.device
        blank, _ = lay_out([], [], shape, self._cache)
        integers = torch.from_numpy(blank).to(device)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            # Compiles kernels, and allocates buffers that outlive a step.
            run_laid_out(self._network, integers, shape, self._cache)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Device calls of other threads must not invalidate the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden_RD, experts_RLK = run_laid_out(self._network, integers, shape, self._cache)
        return _Captured(graph, integers, hidden_RD, experts_RLK)
