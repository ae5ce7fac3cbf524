"""The attention plan of one step over the paged cache.

Each sequence runs a span of new tokens behind those it has in the cache. Layer by layer the plan writes the keys and
values of all new tokens to their places and lets every token see its own sequence up to itself. All that does not
depend on the layer (places, tables, masks) is made once per step.

Tokens of the step stand in the order of `arranged`: spans of equal size and similar length are one bundle, computed
together. Padding is at most as long as the bundle's shortest sequence.

Shapes: N tokens of the step, B sequences of a bundle, Q new tokens of each, S blocks of the longest, Y layers,
P blocks, T tokens of one, H query heads, G key/value heads, K head dimension.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from m2forge.kernels.paged_attention import paged_attention
from m2forge.model.config import ModelConfig, WindowConfig
from m2forge.model.plan import Attend
from m2forge.rollout.scheduler import Copy


class PagedCache:
    """Keys and values of all layers. A block's index is the same in each."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (config.num_layers, num_blocks, block_tokens, config.attention.num_kv_heads, config.attention.head_dim)
        # Zeros, because what is unseen is multiplied by 0, and memory may hold values that 0 does not silence.
        self.k_YPTGK = torch.zeros(shape, device=device, dtype=dtype)
        self.v_YPTGK = torch.zeros(shape, device=device, dtype=dtype)

    @property
    def block_tokens(self) -> int:
        return self.k_YPTGK.shape[2]

    @property
    def device(self) -> torch.device:
        return self.k_YPTGK.device

    def copy(self, copies: Sequence[Copy]) -> None:
        """One after the other: a block may be written that an earlier copy has read."""
        for source, target in copies:
            for x in (self.k_YPTGK, self.v_YPTGK):
                x[:, target] = x[:, source]

    def zero(self) -> None:
        self.k_YPTGK.zero_()
        self.v_YPTGK.zero_()


@dataclass(frozen=True)
class Span:
    """New tokens of one sequence."""

    start: int
    """Tokens before them, all of which are in the cache."""
    num_tokens: int
    blocks: Sequence[int]
    """Where the sequence lies, the new tokens included."""

    @property
    def shape(self) -> tuple[int, int]:
        """Spans of equal shape are computed together."""
        return self.num_tokens, (len(self.blocks) - 1).bit_length()


def arranged(spans: Sequence[Span]) -> list[int]:
    """The order of the spans in a step."""
    return sorted(range(len(spans)), key=lambda place: spans[place].shape)


@dataclass(frozen=True)
class _Bundle:
    first: int
    """Row of the step where the bundle's tokens begin."""
    table_BS: Tensor
    position_BQ: Tensor


class PagedPlan:
    def __init__(self, cache: PagedCache, spans: Sequence[Span]) -> None:
        """`spans` in the order of `arranged`."""
        self.cache, size = cache, cache.block_tokens
        self._bundles = list(_bundled(spans, cache.device))
        self.position_N = torch.cat([bundle.position_BQ.flatten() for bundle in self._bundles])
        blocks = [bundle.table_BS.gather(1, bundle.position_BQ // size).flatten() for bundle in self._bundles]
        self._slot_N = torch.cat(blocks) * size + self.position_N % size
        self.count_N: Tensor | None = None
        self._layers = iter(range(cache.k_YPTGK.shape[0]))

    def bind(self, window: WindowConfig | None) -> Attend:
        sight = None if window is None else (window.size, window.num_sinks)
        return _PagedAttend(self.cache, self._layers, self._slot_N, self._bundles, sight)

    def to_parent(self, x_ND: Tensor) -> Tensor:
        raise NotImplementedError("the step keeps no states for prediction modules")


@dataclass(frozen=True)
class _PagedAttend:
    """Writes the new keys and values where they belong, then lets each bundle see its own."""

    cache: PagedCache
    layers: Iterator[int]
    """Shared by all that attend in this step: each call is the next layer's, whatever its window."""
    slot_N: Tensor
    bundles: Sequence[_Bundle]
    window: tuple[int, int] | None

    def __call__(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        layer = next(self.layers)
        k_PTGK, v_PTGK = self.cache.k_YPTGK[layer], self.cache.v_YPTGK[layer]
        k_PTGK.view(-1, *k_NGK.shape[1:]).index_copy_(0, self.slot_N, k_NGK)
        v_PTGK.view(-1, *v_NGK.shape[1:]).index_copy_(0, self.slot_N, v_NGK)
        outs = []
        for bundle in self.bundles:
            num_rows = bundle.position_BQ.numel()
            q_BQHK = q_NHK[bundle.first : bundle.first + num_rows].unflatten(0, bundle.position_BQ.shape)
            out_BQHK = paged_attention(q_BQHK, k_PTGK, v_PTGK, bundle.table_BS, bundle.position_BQ, self.window)
            outs.append(out_BQHK.flatten(0, 1))
        return torch.cat(outs)


def _bundled(spans: Sequence[Span], device: torch.device) -> Iterator[_Bundle]:
    first = 0
    for (num_tokens, _), members in groupby(spans, key=lambda span: span.shape):
        together = list(members)
        table_BS = np.zeros((len(together), max(len(span.blocks) for span in together)), np.int64)
        for row, span in enumerate(together):
            table_BS[row, : len(span.blocks)] = span.blocks
        start_B = torch.tensor([span.start for span in together], device=device)
        position_BQ = start_B[:, None] + torch.arange(num_tokens, device=device)
        yield _Bundle(first, torch.from_numpy(table_BS).to(device), position_BQ)
        first += num_tokens * len(together)
