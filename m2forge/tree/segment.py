"""A flat tree cut into segments: the parts that a walk over the tree computes one at a time.

A segment is a range of tokens in depth-first order, of one of two kinds:

    inner   a run of tokens of one branch; other segments continue it below its last token
    leaf    one or more whole subtrees below one token, or what is left of a branch with all that branches off it

Every token that a segment's tokens attend to lies in the segment itself or in its ancestors, which are all inner: their
tokens are the path from the root to the token above the segment. Small subtrees side by side share a segment, so the
number of segments follows the number of tokens, not the number of leaves.

Shapes: N tokens, V nodes, S samples, M loss edges.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from m2forge.records import IntArray
from m2forge.tree.flat import FlatTree, Indices


@dataclass(frozen=True, slots=True)
class Segment:
    start: int
    end: int
    """Index after its last token."""
    parent: int
    """Index of the segment that it continues, −1 for none."""
    depth: int
    """Number of tokens on the path above it."""
    is_leaf: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def is_whole(self) -> bool:
        """It holds whole trees: nothing is above or below it."""
        return self.is_leaf and self.parent < 0


def cut_segments(flat: FlatTree, max_tokens: int) -> list[Segment]:
    """Segments of at most `max_tokens` in depth-first order; together they hold every token once."""
    exit_V = flat.exit_N[flat.node_start_V]
    columns = (flat.node_start_V, flat.node_end_V, flat.node_parent_V, flat.node_depth_V, exit_V)
    starts, ends, parents, depths, exits = (column.tolist() for column in columns)
    return _cut(starts, ends, parents, depths, exits, max_tokens)


def cut_documents(lengths: Sequence[int], max_tokens: int) -> list[Segment]:
    """The same for packed documents, each a tree of one branch."""
    ends = np.cumsum(lengths).tolist()
    starts = [end - length for end, length in zip(ends, lengths, strict=True)]
    return _cut(starts, ends, [-1] * len(ends), [0] * len(ends), ends, max_tokens)


def _cut(
    starts: list[int], ends: list[int], parents: list[int], depths: list[int], exits: list[int], max_tokens: int
) -> list[Segment]:
    segments: list[Segment] = []
    open_segments: list[tuple[int, int]] = []
    """Inner segments on the path to the current token: index, and the index after its last descendant."""
    token = node = 0
    while node < len(starts):
        while open_segments and open_segments[-1][1] <= token:
            open_segments.pop()
        parent = open_segments[-1][0] if open_segments else -1
        depth = depths[node] + token - starts[node]
        if exits[node] - token <= max_tokens:
            end, above, may_share = exits[node], parents[node], token == starts[node]
            node = bisect_left(starts, end)
            while may_share and node < len(starts) and parents[node] == above and exits[node] - token <= max_tokens:
                end = exits[node]
                node = bisect_left(starts, end)
            segments.append(Segment(token, end, parent, depth, is_leaf=True))
            token = end
        else:
            end = min(token + max_tokens, ends[node])
            segments.append(Segment(token, end, parent, depth, is_leaf=False))
            open_segments.append((len(segments) - 1, exits[node]))
            token = end
            if token == ends[node]:
                node += 1
    return segments


def slice_tree(flat: FlatTree, segment: Segment, edge_M: Indices) -> FlatTree:
    """The segment as a flat tree. Positions stay those in the whole tree; parents and edges count from the segment's
    first token, and what lies outside the segment is −1. `edge_M`: its edges, see `edges_by_segment`."""
    start, end = segment.start, segment.end
    tokens = slice(start, end)
    first, last = (int(flat.node_start_V.searchsorted(token, "right")) - 1 for token in (start, end - 1))
    nodes = slice(first, last + 1)
    num_edges_S = np.bincount(flat.edge_sample_M[edge_M], minlength=flat.sample_S.size)
    return replace(
        flat,
        tokens_N=flat.tokens_N[tokens],
        position_N=flat.position_N[tokens],
        parent_N=np.maximum(flat.parent_N[tokens] - start, -1),
        exit_N=np.minimum(flat.exit_N[tokens], end) - start,
        multiplicity_N=flat.multiplicity_N[tokens],
        node_start_V=np.maximum(flat.node_start_V[nodes], start) - start,
        node_end_V=np.minimum(flat.node_end_V[nodes], end) - start,
        node_parent_V=np.where(
            flat.node_start_V[nodes] <= start, -1, np.maximum(flat.node_parent_V[nodes] - first, -1)
        ),
        node_depth_V=flat.position_N[np.maximum(flat.node_start_V[nodes], start)],
        last_S=_inside(flat.last_S, segment),
        edge_end_S=num_edges_S.cumsum().astype(np.int32),
        edge_position_M=flat.edge_position_M[edge_M] - start,
        edge_child_M=_inside(flat.edge_child_M[edge_M], segment),
        edge_target_M=flat.edge_target_M[edge_M],
        edge_sample_M=flat.edge_sample_M[edge_M],
        edge_logprob_M=flat.edge_logprob_M[edge_M],
        edge_version_M=flat.edge_version_M[edge_M],
        experts_NLK=None if flat.experts_NLK is None else flat.experts_NLK[tokens],
    )


def edges_by_segment(flat: FlatTree, segments: Sequence[Segment]) -> list[Indices]:
    """Edges whose predicting token each segment holds, in ascending order."""
    order_M = np.argsort(flat.edge_position_M, kind="stable")
    bounds = flat.edge_position_M[order_M].searchsorted([0, *(segment.end for segment in segments)])
    return [np.sort(order_M[a:b]) for a, b in pairwise(bounds.tolist())]


def _inside(token_X: IntArray, segment: Segment) -> IntArray:
    is_inside_X = (token_X >= segment.start) & (token_X < segment.end)
    inside_X: IntArray = np.where(is_inside_X, token_X - segment.start, -1).astype(np.int32)
    return inside_X
