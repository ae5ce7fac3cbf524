"""The attention plan of one step over the paged KV cache.

Each sequence runs a span of new tokens after its cached ones. In each layer the plan writes the keys and values of all
new tokens to their slots and lets every token attend to its own sequence up to itself. Everything that does not depend
on the layer (slots, block tables, masks) is computed once per step.

The tokens of the step are in the order of `arranged`. Spans of equal size form one bundle and are computed together; on
a CPU, where short sequences would be padded to long ones, spans of equal size and similar length.

Shapes: N tokens of the step, B sequences of a bundle, Q new tokens of each, S blocks of the longest, Y layers, P
blocks, T tokens per block, H query heads, G key/value heads, K head dimension.
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
from m2forge.rollout.kv.scheduler import Copy


class PagedCache:
    """Keys and values of all layers, the main model's before the MTP modules', and the hidden states that each module
    takes from the one before it. A block has the same index in all of them."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        num_modules: int = 0,
    ) -> None:
        # One scratch block beyond the pool: padding writes there, and no token attends to it.
        slots, attention = (num_blocks + 1, block_tokens), config.attention
        shape = (config.num_layers + num_modules, *slots, attention.num_kv_heads, attention.head_dim)
        # Zeros, because attention multiplies masked values by 0, and uninitialised memory may hold NaN or infinity.
        self.k_YPTGK = torch.zeros(shape, device=device, dtype=dtype)
        self.v_YPTGK = torch.zeros(shape, device=device, dtype=dtype)
        self.state_MPTD = torch.zeros((num_modules, *slots, config.hidden_size), device=device, dtype=dtype)
        """Input states by the module that takes them; index 0 holds those of the main model."""

    @property
    def block_tokens(self) -> int:
        return self.k_YPTGK.shape[2]

    @property
    def num_modules(self) -> int:
        return self.state_MPTD.shape[0]

    @property
    def scratch_slot(self) -> int:
        """The first slot of the scratch block, where padding writes."""
        return (self.k_YPTGK.shape[1] - 1) * self.block_tokens

    @property
    def device(self) -> torch.device:
        return self.k_YPTGK.device

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copies blocks in order: a later copy may overwrite a block that an earlier one has read."""
        if not copies:
            return
        sources, targets = (list(blocks) for blocks in zip(*copies, strict=True))
        # All are read before any is written.
        is_one = len({*targets}) == len(targets) and not {*targets[:-1]} & {*sources[1:]}
        for source, target in [(sources, targets)] if is_one else [([s], [t]) for s, t in copies]:
            source_C, target_C = torch.tensor([source, target], device=self.device)
            for x in (self.k_YPTGK, self.v_YPTGK, self.state_MPTD):
                x.index_copy_(1, target_C, x.index_select(1, source_C))

    def zero(self) -> None:
        for x in (self.k_YPTGK, self.v_YPTGK, self.state_MPTD):
            x.zero_()

    def write_states(self, module: int, plan: "PagedPlan", state_ND: Tensor) -> None:
        """Write the input states of `module` at the plan's slots."""
        self.state_MPTD[module].flatten(0, 1).index_copy_(0, plan.slot_N, state_ND)

    def parent_states(self, module: int, plan: "PagedPlan") -> Tensor:
        """The input states of `module` for the plan's tokens: the state at the previous position; zero at position
        0."""
        state_ND = self.state_MPTD[module].flatten(0, 1).index_select(0, plan.parent_slot_N)
        return torch.where(plan.position_N[:, None] > 0, state_ND, 0)


@dataclass(frozen=True)
class Span:
    """The new tokens of one sequence in a step."""

    start: int
    """Tokens of the sequence before the span; all are in the cache."""
    num_tokens: int
    blocks: Sequence[int] | npt.NDArray[np.int64]
    """The sequence's block table, including the blocks of the new tokens."""

    @property
    def shape(self) -> tuple[int, int]:
        """A CPU computes spans of equal shape together."""
        return self.num_tokens, (len(self.blocks) - 1).bit_length()


def arranged(spans: Sequence[Span]) -> list[int]:
    """Indices of the spans in the order in which a step runs them."""
    return sorted(range(len(spans)), key=lambda index: spans[index].shape)


@dataclass(frozen=True)
class Bundle:
    """Sequences with the same number of new tokens."""

    first: int
    """Row of the step at which the bundle's tokens begin."""
    table_BS: Tensor
    position_BQ: Tensor
    """Positions of the new tokens; padding has −1, its attention output is undefined and it writes to the scratch
    block."""


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
        """`first_layer`: cache layer of the first layer that runs. `position_N`, `slot_N` and `parent_slot_N`:
        position, cache slot and previous token's slot of every token; computed here if there is one bundle and they are
        not given."""
        self.cache, self._bundles = cache, bundles
        self.position_N = bundles[0].position_BQ.flatten() if position_N is None else position_N
        self.slot_N = self._slots(0) if slot_N is None else slot_N
        self._parent_slot_N = parent_slot_N
        self.count_N: Tensor | None = None
        self._layers = iter(range(first_layer, cache.k_YPTGK.shape[0]))

    @property
    def parent_slot_N(self) -> Tensor:
        """Slot of the previous token; the scratch slot for a first token."""
        return self._slots(1) if self._parent_slot_N is None else self._parent_slot_N

    def _slots(self, num_back: int) -> Tensor:
        (bundle,), size = self._bundles, self.cache.block_tokens
        position_BQ = bundle.position_BQ - num_back
        block_BQ = bundle.table_BS.gather(1, position_BQ.clamp(min=0) // size)
        return torch.where(position_BQ >= 0, block_BQ * size + position_BQ % size, self.cache.scratch_slot).flatten()

    def attend(self, q_NHK: Tensor, k_PTGK: Tensor, v_PTGK: Tensor, sight: tuple[int, int] | None) -> Tensor:
        """Attention of one layer, whose keys and values are already in the cache."""
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
        raise NotImplementedError("modules run over other spans than the main model, one at a time (model_runner.py)")


@dataclass(frozen=True)
class _PagedAttend:
    """Writes the new keys and values to the cache, then computes the attention of each bundle."""

    plan: PagedPlan
    layers: Iterator[int]
    """Shared by all instances of a step: each call takes the next layer, whatever its window."""
    sight: tuple[int, int] | None

    def __call__(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        layer, cache = next(self.layers), self.plan.cache
        k_PTGK, v_PTGK = cache.k_YPTGK[layer], cache.v_YPTGK[layer]
        k_PTGK.view(-1, *k_NGK.shape[1:]).index_copy_(0, self.plan.slot_N, k_NGK)
        v_PTGK.view(-1, *v_NGK.shape[1:]).index_copy_(0, self.plan.slot_N, v_NGK)
        return self.plan.attend(q_NHK, k_PTGK, v_PTGK, self.sight)


def planned(cache: PagedCache, spans: Sequence[Span], first_layer: int = 0) -> PagedPlan:
    """The plan of `spans`, which are in the order of `arranged`. Positions and slots are computed on the host and
    copied in one transfer: computing them on the device, bundle by bundle, takes as many kernel launches as several
    layers."""
    groups, size = [], cache.block_tokens
    is_on_host = cache.device.type == "cpu"
    for _, members in groupby(spans, key=lambda span: span.shape if is_on_host else span.num_tokens):
        together = list(members)
        table_BS = np.zeros((len(together), max(len(span.blocks) for span in together)), np.int64)
        for row, span in enumerate(together):
            table_BS[row, : len(span.blocks)] = span.blocks
        position_BQ = np.array([span.start for span in together])[:, None] + np.arange(together[0].num_tokens)
        groups.append((table_BS, position_BQ))

    def slots_of(table_BS: npt.NDArray[np.int64], position_BQ: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.take_along_axis(table_BS, position_BQ // size, 1) * size + position_BQ % size

    positions = [position_BQ for _, position_BQ in groups]
    slots = [slots_of(*group) for group in groups]
    parents = [np.where(at > 0, slots_of(table, np.maximum(at - 1, 0)), cache.scratch_slot) for table, at in groups]
    rows = [np.concatenate([part.ravel() for part in parts]) for parts in (positions, slots, parents)]
    position_N, slot_N, parent_slot_N, *tensors = _copy_to_device([*rows, *chain.from_iterable(groups)], cache.device)
    bundles, first = [], 0
    for table, position in zip(tensors[::2], tensors[1::2], strict=True):
        bundles.append(Bundle(first, table, position))
        first += position.numel()
    return PagedPlan(cache, bundles, first_layer, position_N, slot_N, parent_slot_N)


def _copy_to_device(arrays: Sequence[npt.NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """Moves the arrays to the device in one copy. Each starts at a multiple of 16 bytes, because Triton compiles a
    kernel again for other alignments."""
    starts = np.cumsum([0, *(array.size + array.size % 2 for array in arrays)])
    flat = np.zeros(starts[-1], np.int64)
    for start, array in zip(starts, arrays, strict=False):
        flat[start : start + array.size] = array.ravel()
    copied = torch.from_numpy(flat).to(device)
    return [copied[start : start + array.size].view(array.shape) for start, array in zip(starts, arrays, strict=False)]
