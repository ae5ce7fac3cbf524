"""Causal attention over token trees: each token sees itself and its ancestors.

    out[n] = Σ_{m ≤ n < exit[m]} softmax_m( q[n]·k[m] / √K ) v[m]

Tokens are in depth-first order, so the descendants of token m are those after m and before `exit[m]`, and the ancestors
shared by a node's tokens form a path. A single document is a tree of one node; packed documents are a forest.

Float32 on a CPU uses c/attention.c, half precision on CUDA a kernel there, everything else the plain form, node by
node. Frequent callers on CUDA build the kernel's schedule once (tree_schedule.py).

Shapes: N tokens, V nodes, H query heads, G key/value heads, K head dimension.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from m2forge.kernels import arithmetic as native


@dataclass(frozen=True)
class TreeLayout:
    """The nodes of a forest in depth-first order; int64 on the CPU. Nodes are contiguous and never empty."""

    start_V: Tensor
    end_V: Tensor
    parent_V: Tensor
    """Index of the parent node, −1 for a root."""
    exit_V: Tensor
    """Index after the last descendant of each node's tokens."""

    def __post_init__(self) -> None:
        # The kernels do not validate the table.
        columns = (self.start_V, self.end_V, self.parent_V, self.exit_V)
        if not self.start_V.numel():
            raise ValueError("a tree layout needs at least one node")
        if any(x.dtype != torch.int64 or x.device.type != "cpu" or x.shape != self.start_V.shape for x in columns):
            raise ValueError("a tree layout takes columns of one length, int64 on the CPU")
        follow_on = self.bounds[0] == 0 and torch.equal(self.start_V[1:], self.end_V[:-1])
        if not follow_on or not (self.start_V < self.end_V).all():
            raise ValueError(
                f"nodes must follow one another from 0 and not be empty, got bounds {self.bounds.tolist()[:8]}"
            )
        if not ((self.parent_V >= -1) & (self.parent_V < torch.arange(self.parent_V.shape[0], device="cpu"))).all():
            raise ValueError(f"a node's index must exceed its parent's, got parents {self.parent_V.tolist()[:8]}")
        self._check_exits()

    def _check_exits(self) -> None:
        """Checks that each node's exit is the end of the last node in its subtree."""
        ends, parents = self.end_V.tolist(), self.parent_V.tolist()
        path: list[int] = []
        exits = list(ends)
        for node, parent in enumerate(parents):
            while path and path[-1] != parent:
                exits[path.pop()] = ends[node - 1]
            if parent >= 0 and not path:
                raise ValueError(f"nodes must stand depth-first: node {node} is below node {parent}, which had ended")
            path.append(node)
        for node in path:
            exits[node] = ends[-1]
        if exits != self.exit_V.tolist():
            raise ValueError(f"exits {self.exit_V.tolist()[:8]} are not those of the parents: {exits[:8]}")

    @property
    def num_tokens(self) -> int:
        return int(self.end_V[-1])

    @property
    def bounds(self) -> Tensor:
        """The start of each node, then the end of the last one."""
        return torch.cat((self.start_V, self.end_V[-1:]))


def documents_layout(lengths: Sequence[int]) -> TreeLayout:
    """Packed documents: every node is a root."""
    end_V = torch.tensor(list(accumulate(lengths)), dtype=torch.int64, device="cpu")
    start_V = end_V - torch.tensor(list(lengths), dtype=torch.int64, device="cpu")
    return TreeLayout(start_V, end_V, torch.full_like(start_V, -1), end_V)


def tree_attention(q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, layout: TreeLayout) -> Tensor:
    if layout.num_tokens != q_NHK.shape[0]:
        raise ValueError(f"trees of {layout.num_tokens} tokens cannot explain {q_NHK.shape[0]} queries")
    if native.serves(q_NHK, k_NGK, v_NGK):
        return tree_attention_native(q_NHK, k_NGK, v_NGK, layout)
    return tree_attention_plain(q_NHK, k_NGK, v_NGK, layout)


def tree_attention_plain(
    q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, layout: TreeLayout, masks: Sequence[Tensor | None] | None = None
) -> Tensor:
    """`masks[v]`: the tokens of its path, from the root to its own last, that each token of node v sees; None for all
    up to itself."""
    num_V = (layout.end_V - layout.start_V).tolist()
    return run_attention(q_NHK, k_NGK, v_NGK, zip(num_V, paths(layout), strict=True), masks)


Run: TypeAlias = tuple[int, Tensor]
"""Queries of tokens that follow one another in a node: their number, and the path from the root to the last."""


def run_attention(
    q_QHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, runs: Iterable[Run], masks: Sequence[Tensor | None] | None = None
) -> Tensor:
    """`runs`: those of the queries, in order. `masks`: the tokens of its path that each query of a run sees; None for
    all up to itself."""
    outs, start = [], 0
    for index, (num, path_P) in enumerate(runs):
        q = q_QHK[start : start + num].transpose(0, 1)[None]
        start += num
        k, v = (x.index_select(0, path_P.to(x.device)).transpose(0, 1)[None] for x in (k_NGK, v_NGK))
        mask = None if masks is None else masks[index]
        if mask is None:
            mask = torch.ones(num, path_P.shape[0], dtype=torch.bool).tril(path_P.shape[0] - num)
        gqa = q.shape[1] != k.shape[1]
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.device), enable_gqa=gqa)[0])
    return torch.cat(outs, dim=1).transpose(0, 1)


def query_runs(layout: TreeLayout, query_Q: Tensor) -> Iterator[Run]:
    """The runs of some tokens, which ascend."""
    query_Q = query_Q.cpu()
    node_Q = torch.searchsorted(layout.end_V, query_Q, right=True)
    is_next_Q = (query_Q.diff() == 1) & (node_Q.diff() == 0)
    (last_R,) = torch.cat((~is_next_Q, is_next_Q.new_ones(1))).nonzero(as_tuple=True)
    num_R = last_R.diff(prepend=last_R.new_tensor([-1])).tolist()
    ends_R = zip(node_Q[last_R].tolist(), query_Q[last_R].tolist(), num_R, strict=True)
    by_node = {node: list(group) for node, group in groupby(ends_R, key=lambda end: end[0])}
    for node, (end, path_P) in enumerate(zip(layout.end_V.tolist(), paths(layout), strict=True)):
        for _, last, num in by_node.get(node, []):
            yield num, path_P[: path_P.shape[0] - (end - 1 - last)]


def paths(layout: TreeLayout) -> Iterator[Tensor]:
    """For each node, the tokens from its root to its own last."""
    above: list[Tensor] = []
    """The tokens of each node on the path from the root to the previous node."""
    depth: list[int] = []
    for start, end, parent in zip(*(x.tolist() for x in (layout.start_V, layout.end_V, layout.parent_V)), strict=True):
        depth.append(0 if parent < 0 else depth[parent] + 1)
        del above[depth[-1] :]
        above.append(torch.arange(start, end))
        yield torch.cat(above)


def tree_attention_native(q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, layout: TreeLayout) -> Tensor:
    """Requires `native.serves`."""
    num_tokens, num_heads, head_dim = q_NHK.shape
    fits = k_NGK.shape == v_NGK.shape == (num_tokens, k_NGK.shape[1], head_dim) and num_heads % k_NGK.shape[1] == 0
    if not fits:
        shapes = [tuple(x.shape) for x in (q_NHK, k_NGK, v_NGK)]
        raise ValueError(f"queries, keys and values of shapes {shapes} do not go together")
    out_NHK: Tensor = _TreeAttention.apply(q_NHK, k_NGK, v_NGK, layout)  # type: ignore[no-untyped-call]
    return out_NHK


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, layout: TreeLayout) -> Tensor:
        q, k, v = (native.head_contiguous(x) for x in (q_NHK, k_NGK, v_NGK))
        out_NHK, lse_NH = q.new_empty(q.shape), q.new_empty(q.shape[:2])
        native.call("attention_forward", q, k, v, *_geometry(q, k, v, layout), out_NHK, lse_NH)
        ctx.save_for_backward(q, k, v, out_NHK, lse_NH)
        ctx.layout = layout
        return out_NHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHK: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out_NHK, lse_NH = ctx.saved_tensors
        grads = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        geometry = _geometry(q, k, v, ctx.layout)
        native.call("attention_backward", grad_NHK.contiguous(), q, k, v, out_NHK, lse_NH, *geometry, *grads)
        return *grads, None


def _geometry(q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout) -> tuple[Tensor | int | float, ...]:
    strides = (q.stride(0), k.stride(0), v.stride(0))
    nodes = (layout.bounds, layout.parent_V, layout.exit_V, layout.start_V.shape[0])
    return *strides, *nodes, q.shape[1], k.shape[1], q.shape[2], q.shape[2] ** -0.5
