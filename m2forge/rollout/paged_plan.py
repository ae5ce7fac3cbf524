"""The attention plan of one step over the paged cache.

Each sequence runs a span of new tokens behind those it has in the cache. Layer by layer the plan writes the keys and
values of all new tokens to their places and lets every token see its own sequence up to itself. All that does not
depend on the layer (places, tables, masks) is made once per step.

Tokens of the step stand in the order of `arranged`: spans of equal size are one bundle, computed together; on a CPU,
where short sequences would be padded to long ones, those of similar length.

Shapes: N tokens of the step, B sequences of a bundle, Q new tokens of each, S blocks of the longest, Y layers,
P blocks, T tokens of one, H query heads, G key/value heads, K head dimension.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from m2forge.kernels.paged_attention import paged_attention
from m2forge.model.config import ModelConfig, WindowConfig
from m2forge.model.plan import Attend
from m2forge.rollout.scheduler import Copy


class PagedCache:
    """Keys and values of all layers, those of the main model before those of its prediction modules, and the states
    that each module takes from the one before it. A block's index is the same in each."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        num_modules: int = 0,
    ) -> None:
        # One block more than are given out: what is no token is written there, and nobody reads it.
        places, attention = (num_blocks + 1, block_tokens), config.attention
        shape = (config.num_layers + num_modules, *places, attention.num_kv_heads, attention.head_dim)
        # Zeros, because what is unseen is multiplied by 0, and memory may hold values that 0 does not silence.
        self.k_YPTGK = torch.zeros(shape, device=device, dtype=dtype)
        self.v_YPTGK = torch.zeros(shape, device=device, dtype=dtype)
        self.state_MPTD = torch.zeros((num_modules, *places, config.hidden_size), device=device, dtype=dtype)
        """By the module that takes them: first those of the main model."""

    @property
    def block_tokens(self) -> int:
        return self.k_YPTGK.shape[2]

    @property
    def num_modules(self) -> int:
        return self.state_MPTD.shape[0]

    @property
    def nowhere(self) -> int:
        """A place that nobody reads."""
        return (self.k_YPTGK.shape[1] - 1) * self.block_tokens

    @property
    def device(self) -> torch.device:
        return self.k_YPTGK.device

    def copy(self, copies: Sequence[Copy]) -> None:
        """One after the other: a block may be written that an earlier copy has read."""
        for source, target in copies:
            for x in (self.k_YPTGK, self.v_YPTGK, self.state_MPTD):
                x[:, target] = x[:, source]

    def zero(self) -> None:
        for x in (self.k_YPTGK, self.v_YPTGK, self.state_MPTD):
            x.zero_()

    def keep_states(self, module: int, plan: "PagedPlan", state_ND: Tensor) -> None:
        """Write what `module` will take, at the plan's places."""
        self.state_MPTD[module].flatten(0, 1).index_copy_(0, plan.slot_N, state_ND)

    def parent_states(self, module: int, plan: "PagedPlan") -> Tensor:
        """What `module` takes at each of the plan's tokens: the state at the place before; zero before a first one."""
        state_ND = self.state_MPTD[module].flatten(0, 1).index_select(0, plan.parent_slot_N)
        return torch.where(plan.position_N[:, None] > 0, state_ND, 0)


@dataclass(frozen=True)
class Span:
    """New tokens of one sequence."""

    start: int
    """Tokens before them, all of which are in the cache."""
    num_tokens: int
    blocks: Sequence[int] | npt.NDArray[np.int64]
    """Where the sequence lies, the new tokens included."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of equal shape are spans that are computed together on a CPU."""
        return self.num_tokens, (len(self.blocks) - 1).bit_length()


def arranged(spans: Sequence[Span]) -> list[int]:
    """The order of the spans in a step."""
    return sorted(range(len(spans)), key=lambda place: spans[place].shape)


@dataclass(frozen=True)
class Bundle:
    """Sequences that run equally many tokens."""

    first: int
    """Row of the step where the bundle's tokens begin."""
    table_BS: Tensor
    position_BQ: Tensor
    """−1 where there is no token: it sees nothing, or anything, and is written nowhere."""


class PagedPlan:
    def __init__(
        self,
        cache: PagedCache,
        bundles: Sequence[Bundle],
        first_layer: int = 0,
        position_N: Tensor | None = None,
        slot_N: Tensor | None = None,
        parent_slot_N: Tensor | None = None,
    ) -> None:
        """`first_layer`: the layer of the cache that is run first. `position_N`, `slot_N`, `parent_slot_N`: the places
        of all tokens, in the cache too, and those before them; of one bundle they are found here."""
        self.cache, self._bundles = cache, bundles
        self.position_N = bundles[0].position_BQ.flatten() if position_N is None else position_N
        self.slot_N = self._slots(0) if slot_N is None else slot_N
        self._parent_slot_N = parent_slot_N
        self.count_N: Tensor | None = None
        self._layers = iter(range(first_layer, cache.k_YPTGK.shape[0]))

    @property
    def parent_slot_N(self) -> Tensor:
        """The place before each token; for a first token nowhere."""
        return self._slots(1) if self._parent_slot_N is None else self._parent_slot_N

    def _slots(self, num_back: int) -> Tensor:
        (bundle,), size = self._bundles, self.cache.block_tokens
        position_BQ = bundle.position_BQ - num_back
        block_BQ = bundle.table_BS.gather(1, position_BQ.clamp(min=0) // size)
        return torch.where(position_BQ >= 0, block_BQ * size + position_BQ % size, self.cache.nowhere).flatten()

    def attend(self, q_NHK: Tensor, k_PTGK: Tensor, v_PTGK: Tensor, sight: tuple[int, int] | None) -> Tensor:
        """The attention of one layer, whose keys and values are in the cache."""
        outs = []
        for bundle in self._bundles:
            num_rows = bundle.position_BQ.numel()
            q_BQHK = q_NHK[bundle.first : bundle.first + num_rows].unflatten(0, bundle.position_BQ.shape)
            out_BQHK = paged_attention(q_BQHK, k_PTGK, v_PTGK, bundle.table_BS, bundle.position_BQ, sight)
            outs.append(out_BQHK.flatten(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def bind(self, window: WindowConfig | None) -> Attend:
        sight = None if window is None else (window.size, window.num_sinks)
        return _PagedAttend(self, self._layers, sight)

    def to_parent(self, x_ND: Tensor) -> Tensor:
        raise NotImplementedError("modules run over other spans than the main model, one at a time (runner.py)")


@dataclass(frozen=True)
class _PagedAttend:
    """Writes the new keys and values where they belong, then lets each bundle see its own."""

    plan: PagedPlan
    layers: Iterator[int]
    """Shared by all that attend in this step: each call is the next layer's, whatever its window."""
    sight: tuple[int, int] | None

    def __call__(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        layer, cache = next(self.layers), self.plan.cache
        k_PTGK, v_PTGK = cache.k_YPTGK[layer], cache.v_YPTGK[layer]
        k_PTGK.view(-1, *k_NGK.shape[1:]).index_copy_(0, self.plan.slot_N, k_NGK)
        v_PTGK.view(-1, *v_NGK.shape[1:]).index_copy_(0, self.plan.slot_N, v_NGK)
        return self.plan.attend(q_NHK, k_PTGK, v_PTGK, self.sight)


def planned(cache: PagedCache, spans: Sequence[Span], first_layer: int = 0) -> PagedPlan:
    """Of spans in the order of `arranged`. Their places are found here and go to the device in one piece: found there,
    bundle by bundle, they take as many launches as several layers."""
    groups, size = [], cache.block_tokens
    is_on_host = cache.device.type == "cpu"
    for _, members in groupby(spans, key=lambda span: span.shape if is_on_host else span.num_tokens):
        together = list(members)
        table_BS = np.zeros((len(together), max(len(span.blocks) for span in together)), np.int64)
        for row, span in enumerate(together):
            table_BS[row, : len(span.blocks)] = span.blocks
        position_BQ = np.array([span.start for span in together])[:, None] + np.arange(together[0].num_tokens)
        groups.append((table_BS, position_BQ))

    def places(table_BS: npt.NDArray[np.int64], position_BQ: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.take_along_axis(table_BS, position_BQ // size, 1) * size + position_BQ % size

    positions = [position_BQ for _, position_BQ in groups]
    slots = [places(*group) for group in groups]
    parents = [np.where(at > 0, places(table, np.maximum(at - 1, 0)), cache.nowhere) for table, at in groups]
    rows = [np.concatenate([part.ravel() for part in parts]) for parts in (positions, slots, parents)]
    position_N, slot_N, parent_slot_N, *tensors = _put_together([*rows, *chain.from_iterable(groups)], cache.device)
    bundles, first = [], 0
    for table, position in zip(tensors[::2], tensors[1::2], strict=True):
        bundles.append(Bundle(first, table, position))
        first += position.numel()
    return PagedPlan(cache, bundles, first_layer, position_N, slot_N, parent_slot_N)


def _put_together(arrays: Sequence[npt.NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """By one copy. Each begins at a multiple of 16 bytes: kernels are compiled for that, and again for others."""
    starts = np.cumsum([0, *(array.size + array.size % 2 for array in arrays)])
    flat = np.zeros(starts[-1], np.int64)
    for start, array in zip(starts, arrays, strict=False):
        flat[start : start + array.size] = array.ravel()
    put = torch.from_numpy(flat).to(device)
    return [put[start : start + array.size].view(array.shape) for start, array in zip(starts, arrays, strict=False)]
