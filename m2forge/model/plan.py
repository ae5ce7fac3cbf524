"""Attention plans define which tokens attend to which, outside the network.

The network runs over N flat tokens. A plan gives each token's position (`position_N`), the masked attention (`bind`)
and each token's predecessor (`to_parent`). The same blocks serve every plan.

    CausalRows   B rows of equal length, each causal; trailing padding needs no mask
    Documents    packed documents in one flat sequence, each causal and isolated from the others
    Trees        token trees, each token attends to its ancestors
    PathPlan     part of a tree, over the path above it (model/path.py)

Shapes: N tokens, H query heads, G key/value heads, K head dimension, V nodes of a tree.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from m2forge.kernels.attention import document_attention
from m2forge.kernels.slow_path import tree_kernel_serves
from m2forge.kernels.tree_attention import (
    Run,
    TreeLayout,
    documents_layout,
    query_runs,
    run_attention,
    tree_attention,
    tree_attention_plain,
)
from m2forge.kernels.tree_schedule import Schedule, make_schedule
from m2forge.model.config import WindowConfig
from m2forge.tree.flat import FlatTree

if TYPE_CHECKING:
    # kernels/flex.py loads torch's compiler, which takes over a second; only CUDA needs it.
    from torch.nn.attention.flex_attention import BlockMask


class Attend(Protocol):
    """Attention with a fixed mask."""

    def __call__(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor: ...


@runtime_checkable
class LayeredAttend(Protocol):
    """Attention that differs by layer, because it holds keys and values of each."""

    def at_layer(self, layer: int) -> Attend:
        """`layer`: the main model's layers come first, then the MTP modules."""
        ...


@runtime_checkable
class SharedPlan(Protocol):
    """A plan whose queries several ranks may divide."""

    def bind_queries(self, window: WindowConfig | None, query_Q: Tensor) -> Attend:
        """The attention of the tokens `query_Q`, which ascend: takes their queries, and the keys and values of all."""
        ...


class AttentionPlan(Protocol):
    @property
    def position_N(self) -> Tensor:
        """Position of each token in its document, from 0."""
        ...

    @property
    def count_N(self) -> Tensor | None:
        """Weight of each token in expert loads and the auxiliary loss, int64; None: 1 each."""
        ...

    def bind(self, window: WindowConfig | None) -> Attend:
        """The attention of layers with this window."""
        ...

    def to_parent(self, x_ND: Tensor) -> Tensor:
        """Row n is x at the token before n in its document; zero for a first token."""
        ...


# -- rows and documents ------------------------------------------------------------------------------------------------


class CausalRows:
    def __init__(self, num_rows: int, length: int, device: torch.device | str | None = None) -> None:
        self.num_rows, self.length, self.device = num_rows, length, torch.device(device or "cpu")
        self.position_N = torch.arange(length, device=device).repeat(num_rows)
        self.count_N: Tensor | None = None

    def bind(self, window: WindowConfig | None) -> Attend:
        if window is None and self.device.type == "cuda":
            return CausalAttend(self.num_rows, self.length)
        return self._documents().bind(window)

    def bind_queries(self, window: WindowConfig | None, query_Q: Tensor) -> Attend:
        return self._documents().bind_queries(window, query_Q)

    def to_parent(self, x_ND: Tensor) -> Tensor:
        x_BLD = x_ND.view(self.num_rows, self.length, -1)
        return F.pad(x_BLD[:, :-1], (0, 0, 1, 0)).flatten(0, 1)

    def _documents(self) -> "Documents":
        return Documents([self.length] * self.num_rows, self.device)


class Documents:
    def __init__(self, lengths: Sequence[int], device: torch.device | str | None = None) -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"every document needs at least one token, got lengths {list(lengths)[:8]}")
        self.lengths, self.device = tuple(lengths), torch.device(device or "cpu")
        length_D = torch.tensor(self.lengths)
        start_D = length_D.cumsum(0) - length_D
        self.start_N = start_D.repeat_interleave(length_D).to(self.device)
        """First token of each token's document."""
        self.position_N = torch.arange(sum(self.lengths), device=self.device) - self.start_N
        self.count_N: Tensor | None = None

    def bind(self, window: WindowConfig | None) -> Attend:
        if self.device.type == "cuda":
            from m2forge.kernels.flex import document_mask

            size, num_sinks = (window.size, window.num_sinks) if window else (None, 0)
            return FlexAttend(document_mask(self.start_N, size, num_sinks))
        return DocumentAttend(self.lengths, tuple(visible(length, window) for length in self.lengths))

    def bind_queries(self, window: WindowConfig | None, query_Q: Tensor) -> Attend:
        layout = documents_layout(self.lengths)
        exit_N = layout.exit_V.repeat_interleave(torch.tensor(self.lengths)).to(self.device)
        return _attend_queries(layout, exit_N, self.position_N, window, query_Q)

    def to_parent(self, x_ND: Tensor) -> Tensor:
        return x_ND.roll(1, 0) * (self.position_N > 0)[:, None].to(x_ND.dtype)


def visible(length: int, window: WindowConfig | None, first: int = 0) -> Tensor | None:
    """(length − first, length) mask of the keys that each query of a document sees, from the `first` query on; None
    where the plain causal mask suffices."""
    if window is None or window.size >= length:
        return None
    token = torch.arange(length)
    back = token[first:, None] - token[None, :]
    return (back >= 0) & ((back < window.size) | (token < window.num_sinks)[None, :])


@dataclass(frozen=True)
class CausalAttend:
    num_rows: int
    length: int

    def __call__(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        q, k, v = (x.view(self.num_rows, self.length, *x.shape[1:]).transpose(1, 2) for x in (q_NHK, k_NGK, v_NGK))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).reshape(q_NHK.shape)


@dataclass(frozen=True)
class DocumentAttend:
    lengths: tuple[int, ...]
    masks: tuple[Tensor | None, ...]

    def __call__(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        return document_attention(q_NHK, k_NGK, v_NGK, self.lengths, self.masks)


@dataclass(frozen=True)
class FlexAttend:
    mask: "BlockMask"

    def __call__(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        from m2forge.kernels.flex import flex

        q, k, v = (x.transpose(0, 1)[None] for x in (q_NHK, k_NGK, v_NGK))
        return flex(q, k, v, self.mask)[0].transpose(0, 1)


# -- token trees -------------------------------------------------------------------------------------------------------


class Trees:
    """Each token of a flat tree attends to itself and its ancestors only. A token's position is its depth, and it
    counts in expert loads as often as samples contain it. So the network computes each token once, with the result
    it would have in every row that contains it.

    Padding up to `length` forms one more tree after the others, a chain with count zero. It does not change the other
    trees, and lets trees of many sizes share a few lengths.
    """

    def __init__(self, flat: FlatTree, device: torch.device | str | None = None, length: int | None = None) -> None:
        length = flat.num_tokens if length is None else length
        if not 0 < flat.num_tokens <= length:
            raise ValueError(f"a tree of {flat.num_tokens} tokens does not make a plan of {length}")
        self.device = torch.device(device or "cpu")
        num_padding = length - flat.num_tokens
        self.layout = _layout(flat, num_padding)
        padding = np.arange(num_padding)
        self.position_N = self._tokens(flat.position_N, padding)
        self.count_N = self._tokens(flat.multiplicity_N, np.zeros_like(padding))
        self.parent_N = self._tokens(flat.parent_N, np.where(padding > 0, flat.num_tokens + padding - 1, -1))
        """Index of the parent token, −1 for a first one."""
        self.exit_N = self._tokens(flat.exit_N, np.full_like(padding, length))
        """Index after the last descendant."""
        self.start_V = self.layout.start_V.to(self.device)

    def bind(self, window: WindowConfig | None) -> Attend:
        if self.device.type == "cuda" and window:
            from m2forge.kernels.flex import tree_mask

            return FlexAttend(tree_mask(self.exit_N, self.position_N, window.size, window.num_sinks))
        if self.device.type == "cuda":
            return ScheduledTreeAttend(self._schedule, self.layout)
        if window is None:
            return TreeAttend(self.layout)
        depth_V = self.position_N[self.layout.start_V].tolist()
        num_V = (self.layout.end_V - self.layout.start_V).tolist()
        masks = tuple(visible(depth + num, window, depth) for depth, num in zip(depth_V, num_V, strict=True))
        return MaskedTreeAttend(self.layout, masks)

    def bind_queries(self, window: WindowConfig | None, query_Q: Tensor) -> Attend:
        return _attend_queries(self.layout, self.exit_N, self.position_N, window, query_Q)

    def to_parent(self, x_ND: Tensor) -> Tensor:
        # Most tokens follow their parent: shift all, then set the first token of each node.
        parent_V = self.parent_N.index_select(0, self.start_V)
        begin_VD = x_ND.index_select(0, parent_V.clamp(min=0)).masked_fill((parent_V < 0)[:, None], 0)
        return x_ND.roll(1, 0).index_copy(0, self.start_V, begin_VD)

    @functools.cached_property
    def _schedule(self) -> Schedule:
        return make_schedule(self.layout, self.device)

    def _tokens(self, of_trees: npt.NDArray[np.integer], of_padding: npt.NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(np.concatenate((of_trees, of_padding)).astype(np.int64)).to(self.device)


def _layout(flat: FlatTree, num_padding: int) -> TreeLayout:
    num_tokens, length = flat.num_tokens, flat.num_tokens + num_padding
    table = (flat.node_start_V, flat.node_end_V, flat.node_parent_V, flat.exit_N[flat.node_start_V])
    chain = (num_tokens, length, -1, length)
    num_nodes = flat.node_start_V.size + (num_padding > 0)
    columns = (np.append(column, last)[:num_nodes] for column, last in zip(table, chain, strict=True))
    return TreeLayout(*(torch.from_numpy(column.astype(np.int64)) for column in columns))


@dataclass(frozen=True)
class TreeAttend:
    layout: TreeLayout

    def __call__(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        return tree_attention(q_NHK, k_NGK, v_NGK, self.layout)


@dataclass(frozen=True)
class MaskedTreeAttend:
    layout: TreeLayout
    masks: tuple[Tensor | None, ...]

    def __call__(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        return tree_attention_plain(q_NHK, k_NGK, v_NGK, self.layout, self.masks)


@dataclass(frozen=True)
class ScheduledTreeAttend:
    schedule: Schedule
    layout: TreeLayout

    def __call__(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        if tree_kernel_serves(q_NHK.dtype, q_NHK.shape[2]):
            from m2forge.kernels.tree_attention_triton import tree_attention_cuda

            return tree_attention_cuda(q_NHK, k_NGK, v_NGK, self.schedule)
        from m2forge.kernels.flex import eager_tree_attention

        out_NHK: Tensor = eager_tree_attention(q_NHK, k_NGK, v_NGK, self.layout)
        return out_NHK


# -- some of the queries -----------------------------------------------------------------------------------------------


def _attend_queries(
    layout: TreeLayout, exit_N: Tensor, position_N: Tensor, window: WindowConfig | None, query_Q: Tensor
) -> Attend:
    if query_Q.is_cuda:
        from m2forge.kernels.flex import path_mask

        size, num_sinks = (window.size, window.num_sinks) if window else (None, 0)
        return FlexQueryAttend(path_mask(exit_N, position_N, 0, size, num_sinks, query_Q))
    runs = tuple(query_runs(layout, query_Q))
    return QueryAttend(runs, tuple(visible(path_P.shape[0], window, path_P.shape[0] - num) for num, path_P in runs))


@dataclass(frozen=True)
class QueryAttend:
    runs: tuple[Run, ...]
    masks: tuple[Tensor | None, ...]

    def __call__(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        return run_attention(q_NHK, k_NGK, v_NGK, self.runs, self.masks)


@dataclass(frozen=True)
class FlexQueryAttend:
    mask: "BlockMask"

    def __call__(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        from m2forge.kernels.flex import run_eagerly

        # The number of queries differs from pack to pack, for which a compiled block would be compiled again.
        out_NHK: Tensor = run_eagerly(self._run, q_NHK, k_NGK, v_NGK)
        return out_NHK

    def _run(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        from m2forge.kernels.flex import path_flex

        missing = int(self.mask.seq_lengths[1]) - k_NGK.shape[0]
        padded = (F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x for x in (k_NGK, v_NGK))
        k, v = (x.transpose(0, 1)[None] for x in padded)
        return path_flex(q_NHK.transpose(0, 1)[None], k, v, self.mask)[0].transpose(0, 1)
