"""The network over the paged cache on CUDA, in ten to thirteen kernel launches a layer.

Computes the same as `Transformer.forward` and `Transformer.run_module`, which are its references. It fuses each
residual sum with the norm after it, the QK norms and rotary embeddings with the cache writes, and everything after the
router's product into one kernel. It never syncs with the host, and grids depend on shapes alone, so a CUDA graph can
hold it: `PrefillGraphs` those of steps with prompts, `DecodeGraphs` (cuda_decode.py) whole decode steps.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from m2forge.kernels.expert import FEW_PAIRS, expert_ffn_unsorted
from m2forge.kernels.linear import linear, linear_float32
from m2forge.kernels.residual import Ending, Pairs
from m2forge.kernels.slow_path import expert_kernel_problem, paged_kernel_problem
from m2forge.model.config import ModelConfig
from m2forge.model.count import count
from m2forge.model.rotary import Rotation, frequencies, rotation
from m2forge.model.transformer import (
    Attention,
    Block,
    DenseFFN,
    MixtureFFN,
    MTPModule,
    RMSNorm,
    Transformer,
)
from m2forge.rollout.execution.decode import Network
from m2forge.rollout.kv.paged_plan import Bundle, PagedCache, PagedPlan, Span

Delta = Tensor | Pairs
"""A residual that is not yet added to the state."""


def serves(cache: PagedCache) -> bool:
    if cache.device.type != "cuda":
        return False
    from m2forge.kernels.paged_attention_triton import serves as serves_cache

    return serves_cache(cache.k_YPTGK[0])


def is_capturable(model: Transformer) -> bool:
    """Whether the experts' kernels never sync with the host, which a CUDA graph cannot hold."""
    from m2forge.kernels.expert_triton import serves as serves_experts

    mixtures = [part for part in model.modules() if isinstance(part, MixtureFFN)]
    is_narrow = model.embedding.weight.dtype == torch.bfloat16
    return all(
        is_narrow or serves_experts(part.w13.new_empty(1, part.w13.shape[2]), part.w13, part.w2) for part in mixtures
    )


def slow_reason(config: ModelConfig, device: str, dtype: torch.dtype, block_tokens: int) -> str | None:
    """Why an engine decodes slowly on this device, and what to do; None where nothing is known to be slow."""
    if device == "cpu":
        is_slow = dtype == torch.float16
        return "no CPU kernel takes float16, which decodes slowly; use bfloat16 or float32" if is_slow else None
    problem = paged_kernel_problem(dtype, config.attention.head_dim, block_tokens)
    if problem is not None:
        return f"decoding runs without CUDA graphs and fused kernels, which is slow: {problem}"
    if config.moe is not None:
        problem = expert_kernel_problem(dtype, config.hidden_size, config.moe.intermediate_size)
    return None if problem is None else f"decoding runs without CUDA graphs, which is slow: {problem}"


class FusedNetwork:
    def __init__(self, model: Transformer, cache: PagedCache) -> None:
        self._model, self._cache = model, cache
        self.frequency_R = frequencies(model.config.attention, cache.device)
        self.rotary_factor = model.config.attention.rotary_factor

    def main(self, token_N: Tensor, plan: PagedPlan) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns hidden states, the LM head's input, and the chosen experts (N, layers, K), if there are any."""
        norm, x_ND = self._model.norm, self._model.embedding(token_N)
        rotary = rotation(plan.position_N, self.frequency_R, x_ND.dtype, self.rotary_factor)
        x_ND, delta, experts = self._blocks(x_ND, _norm(x_ND, _first_norm(self._model)), rotary, plan, None)
        return *_add_norm(x_ND, delta, norm), experts

    def module(self, index: int, parent_ND: Tensor, token_N: Tensor, plan: PagedPlan) -> tuple[Tensor, Tensor]:
        """As `Transformer.run_module`."""
        module = self._model.mtp[index]
        assert isinstance(module, MTPModule)
        rotary = rotation(plan.position_N, self.frequency_R, parent_ND.dtype, self.rotary_factor)
        embedding_ND = self._model.embedding(token_N)
        joined = torch.cat((_norm(parent_ND, module.state_norm), _norm(embedding_ND, module.embedding_norm)), -1)
        x_ND, delta = self._module(index, joined, rotary, plan, None)
        return _add_norm(x_ND, delta, module.norm)

    def begun_main(
        self, x_ND: Tensor, normed_ND: Tensor, rotary: Rotation, plan: PagedPlan, ending: Ending
    ) -> tuple[Tensor, Tensor | None]:
        """`main` for rows that are already embedded and normed; returns the LM head's input and the experts. Padding
        rows (position −1) choose no experts."""
        x_ND, delta, experts = self._blocks(x_ND, normed_ND, rotary, plan, plan.position_N)
        return _end_norm(x_ND, delta, self._model.norm, ending), experts

    def begun_module(self, index: int, joined: Tensor, rotary: Rotation, plan: PagedPlan, ending: Ending) -> Tensor:
        """`module` for rows that are already joined and normed; returns the LM head's input."""
        module = self._model.mtp[index]
        assert isinstance(module, MTPModule)
        x_ND, delta = self._module(index, joined, rotary, plan, plan.position_N)
        return _end_norm(x_ND, delta, module.norm, ending)

    def _blocks(
        self, x_ND: Tensor, normed_ND: Tensor, rotary: Rotation, plan: PagedPlan, position_N: Tensor | None
    ) -> tuple[Tensor, Delta, Tensor | None]:
        delta: Delta | None = None
        chosen = list[Tensor]()
        for layer, block in enumerate(self._model.blocks):
            assert isinstance(block, Block)
            if delta is not None:
                x_ND, normed_ND = _add_norm(x_ND, delta, block.attention_norm)
            x_ND, delta, expert_NK = self._block(block, layer, layer, x_ND, normed_ND, rotary, plan, position_N)
            chosen += [] if expert_NK is None else [expert_NK]
        assert delta is not None
        return x_ND, delta, torch.stack(chosen, 1) if chosen else None

    def _module(
        self, index: int, joined: Tensor, rotary: Rotation, plan: PagedPlan, position_N: Tensor | None
    ) -> tuple[Tensor, Delta]:
        module, num_layers = self._model.mtp[index], self._model.config.num_layers
        assert isinstance(module, MTPModule)
        x_ND = linear(joined, module.projection.weight)
        normed_ND = _norm(x_ND, module.block.attention_norm)
        x_ND, delta, _ = self._block(
            module.block, num_layers - 1, num_layers + index, x_ND, normed_ND, rotary, plan, position_N
        )
        return x_ND, delta

    def _block(
        self,
        block: Block,
        layer: int,
        depth: int,
        x_ND: Tensor,
        normed_ND: Tensor,
        rotary: Rotation,
        plan: PagedPlan,
        position_N: Tensor | None,
    ) -> tuple[Tensor, Delta, Tensor | None]:
        """Returns the state before the last residual sum, the residual, and the chosen experts. `layer` selects the
        attention window, `depth` the layer of the cache; rows with `position_N` below 0 are padding."""
        window = self._model.config.attention.window if self._model.config.is_windowed(layer) else None
        sight = None if window is None else (window.size, window.num_sinks)
        x_ND, normed_ND = _add_norm(
            x_ND, self._attention(block.attention, depth, normed_ND, rotary, plan, sight), block.ffn_norm
        )
        if isinstance(block.ffn, DenseFFN):
            return x_ND, block.ffn(normed_ND)[0], None
        return x_ND, *_mixture(block.ffn, normed_ND, position_N)

    def _attention(
        self,
        attention: Attention,
        depth: int,
        x_ND: Tensor,
        rotary: Rotation,
        plan: PagedPlan,
        sight: tuple[int, int] | None,
    ) -> Tensor:
        from m2forge.kernels.rotary_triton import rotate_into_cache

        k_PTGK, v_PTGK = self._cache.k_YPTGK[depth], self._cache.v_YPTGK[depth]
        q_weight, k_weight, eps = None, None, 0.0
        if attention.config.qk_norm != "none":
            q_weight, k_weight, eps = attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps
        qkv_NW = attention.qkv(x_ND)
        q_NHK = rotate_into_cache(
            qkv_NW, k_PTGK, v_PTGK, plan.slot_N, *rotary, attention.config.qk_norm, q_weight, k_weight, eps
        )
        mixed_NHK = plan.attend(q_NHK, k_PTGK, v_PTGK, sight)
        return linear(mixed_NHK.flatten(1), attention.out.weight)


def _mixture(ffn: MixtureFFN, x_ND: Tensor, position_N: Tensor | None) -> tuple[Delta, Tensor]:
    from m2forge.kernels.expert_triton import expert_pairs, serves
    from m2forge.kernels.router_triton import select_experts

    router, config, num_rows = ffn.router, ffn.router.config, x_ND.shape[0]
    is_few = num_rows * config.top_k <= FEW_PAIRS and serves(x_ND, ffn.w13, ffn.w2)
    expert_NK, weight_NK = select_experts(
        *(linear_float32(x_ND, router.weight), router.bias, config.top_k, config.scoring, config.normalize),
        position_N=position_N if is_few else None,
    )
    if is_few and num_rows > 1:
        y_NKD = expert_pairs(x_ND, ffn.w13, ffn.w2, weight_NK, expert_NK)
        return Pairs(y_NKD, expert_NK, ffn.w2.shape[0]), expert_NK
    return expert_ffn_unsorted(x_ND, ffn.w13, ffn.w2, weight_NK, expert_NK), expert_NK


def _first_norm(model: Transformer) -> RMSNorm:
    block = model.blocks[0]
    assert isinstance(block, Block)
    return block.attention_norm


def _norm(x_ND: Tensor, norm: RMSNorm) -> Tensor:
    from m2forge.kernels.norm_triton import rms_norm_cuda

    return rms_norm_cuda(x_ND, norm.weight, norm.eps)


def _add_norm(x_ND: Tensor, delta: Delta, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    from m2forge.kernels.norm_triton import add_rms_norm

    return add_rms_norm(x_ND, delta, norm.weight, norm.eps)


def _end_norm(x_ND: Tensor, delta: Delta, norm: RMSNorm, ending: Ending) -> Tensor:
    from m2forge.kernels.norm_triton import end_rms_norm

    return end_rms_norm(x_ND, delta, norm.weight, norm.eps, ending)


# -- steps with prompts ------------------------------------------------------------------------------------------------

TILE_TOKENS = 32
MOST_ROWS = 16384
LAYER_LAUNCH_S, FLOPS = 1e-3, 4e14
"""About what the launches of a layer take, and the rate of matrix products on a large GPU."""
MOST_PADDING, MOST_PADDED_PART = 2, 8
"""A captured graph serves a shape if it has at most so many times its rows, or this part of `most_rows`."""
PATIENCE, PATIENCE_WITH_LARGER = 1, 24
"""Steps of a shape before it gets its own graph: which run without one, or in a larger one."""
LEAST_BLOCKS, MOST_GRAPHS = 32, 64
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
    """CUDA graphs of steps that prefill prompts: such a step is hundreds of kernel launches, for which a small
    network's GPU waits.

    A graph holds the forward pass over a fixed number of rows: one for each sequence that runs one token, and tiles of
    `TILE_TOKENS` rows, in which the spans of the other sequences lie, each beginning at a tile of its own. Every tile
    is a sequence for the attention, with the block table of its span. Rows without a token are padding. All that a step
    changes is one buffer of integers.

    A step with more rows than `most_rows` runs without a graph: its kernels take longer than their launches, and
    padding would cost more than it saves. So does a step whose shape is rare, because a capture takes as long as
    several steps.
    """

    def __init__(self, network: Network, cache: PagedCache, config: ModelConfig) -> None:
        self._network, self._cache, self._most_rows = network, cache, most_rows(config)
        self._captured: dict[Shape, _Captured] = {}
        self._num_missed = Counter[Shape]()
        self._pool = torch.cuda.graph_pool_handle()

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
        is_often = self._num_missed[wanted] > (PATIENCE_WITH_LARGER if larger else PATIENCE)
        if is_often and len(self._captured) < MOST_GRAPHS:
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
