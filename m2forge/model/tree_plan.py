"""The attention plan of token trees: each token of a flat tree attends to its ancestors only.

A token's position is its depth; it attends to itself and its ancestors, and counts in expert loads as often as samples
contain it. So the network computes each token once, with the result it would have in every row that contains it.

Padding up to `length` forms one more tree after the others, a chain with count zero. It does not change the other
trees, and lets trees of many sizes share a few lengths.

Shapes as in `plan`; V nodes.
"""

import functools
import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from m2forge.kernels.flex import tree_mask
from m2forge.kernels.slow_path import tree_kernel_problem, tree_kernel_serves
from m2forge.kernels.tree_attention import TreeLayout, tree_attention, tree_attention_plain
from m2forge.kernels.tree_schedule import Schedule, make_schedule
from m2forge.model.config import WindowConfig
from m2forge.model.plan import Attend, FlexAttend, visible
from m2forge.observe.log import warn_once
from m2forge.tree.flat import FlatTree

_log = logging.getLogger(__name__)


class Trees:
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
            return FlexAttend(tree_mask(self.exit_N, self.position_N, window.size, window.num_sinks))
        if self.device.type == "cuda":
            return ScheduledTreeAttend(self._schedule, self.layout)
        if window is None:
            return TreeAttend(self.layout)
        depth_V = self.position_N[self.layout.start_V].tolist()
        num_V = (self.layout.end_V - self.layout.start_V).tolist()
        masks = tuple(visible(depth + num, window, depth) for depth, num in zip(depth_V, num_V, strict=True))
        return MaskedTreeAttend(self.layout, masks)

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
        out_NHK: Tensor = self._plain(q_NHK, k_NGK, v_NGK)
        return out_NHK

    # Inlined into a compiled block, its nodes would be recompiled for every tree.
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch does not type it
    def _plain(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        problem = tree_kernel_problem(q_NHK.dtype, q_NHK.shape[2])
        if problem is not None and q_NHK.dtype != torch.float64:
            warn_once(_log, problem)
        return tree_attention_plain(q_NHK, k_NGK, v_NGK, self.layout)
