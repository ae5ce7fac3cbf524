"""A token tree flattened to one sequence of tokens, the input of a model and a loss.

Tokens are in depth-first order, so the descendants of token n are exactly the tokens after n and before `exit_N[n]`:

    a is b or an ancestor of b   ⇔   a ≤ b < exit_N[a]

A node is a run of tokens without a branch; a token's position is its depth. Several trees are concatenated to one
forest. Edges are grouped by sample, in token order, so `edges_of` selects one sample's part of a per-edge result.
All arrays are read-only, and int32 unless stated otherwise.

`flatten` lays out a whole tree, or the part that some of its samples need: exactly the union of their paths. Unneeded
nodes are omitted, nodes are truncated where the longest path ends, and a node left with one child is merged with it.
Loops run over nodes; everything per token is one vector operation.

Shapes: N tokens, U nodes of the tree, V nodes of the flat tree, S samples, M loss edges, L layers with a router, K
experts chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from m2forge.errors import RecordError
from m2forge.records import FloatArray, IntArray
from m2forge.tree.token_tree import UNKNOWN_EXPERT, ExpertArray, Node, Sample, TokenTree

Indices: TypeAlias = npt.NDArray[np.int64]
_TOKEN_INDICES = ("parent_N", "exit_N", "node_start_V", "node_end_V", "last_S", "edge_position_M", "edge_child_M")


@dataclass(frozen=True, slots=True, eq=False)
class FlatTree:
    tokens_N: IntArray
    position_N: IntArray
    """Depth of each token, from 0."""
    parent_N: IntArray
    """Index of the parent token, −1 for a first token."""
    exit_N: IntArray
    """Index after the last descendant of each token."""
    multiplicity_N: IntArray
    """Number of samples that contain each token."""

    node_start_V: IntArray
    node_end_V: IntArray
    """Nodes are contiguous: each ends where the next begins."""
    node_parent_V: IntArray
    """Index of the parent node, −1 for a root."""
    node_depth_V: IntArray
    """Position of each node's first token."""

    tree_S: IntArray
    """Index of each sample's tree among the packed trees; 0 if there is one."""
    sample_S: IntArray
    """Index of each sample in its tree."""
    last_S: IntArray
    """Index of the last token of each sample's path."""
    advantage_S: npt.NDArray[np.float64]
    weight_S: npt.NDArray[np.float64]
    """Weight of each of a sample's edges, relative to the others of the same optimizer step."""
    temperature_S: npt.NDArray[np.float64]
    """Sampling temperature, 0 for greedy sampling."""
    is_truncated_S: npt.NDArray[np.bool_]
    """Whether sampling was truncated or penalised, so that `edge_logprob_M` is not from a plain softmax."""
    edge_end_S: IntArray
    """Index after the last edge of each sample."""

    edge_position_M: IntArray
    """Index of the predicting token."""
    edge_child_M: IntArray
    """Index of the predicted token."""
    edge_target_M: IntArray
    """Id of the predicted token."""
    edge_sample_M: IntArray
    """Index, into the arrays of S, of the sample that sampled the token."""
    edge_logprob_M: FloatArray
    """Logprob with which the token was sampled, float32."""
    edge_version_M: IntArray
    """Policy version (step) that sampled the token."""

    experts_NLK: ExpertArray | None = None
    """Recorded routing, int16, −1 where unknown; None if no tree has any."""

    @property
    def num_tokens(self) -> int:
        return self.tokens_N.size

    @property
    def num_input_tokens(self) -> int:
        """Tokens of all samples, shared ones counted each time: what separate rows would compute."""
        return int(self.multiplicity_N.sum(dtype=np.int64))

    @property
    def num_edges(self) -> int:
        return self.edge_position_M.size

    def edges_of(self, sample: int) -> slice:
        return slice(int(self.edge_end_S[sample - 1]) if sample else 0, int(self.edge_end_S[sample]))

    def path(self, sample: int) -> IntArray:
        """Indices of a sample's tokens, from first to last."""
        end = int(self.last_S[sample]) + 1
        node = int(self.node_start_V.searchsorted(end, "left")) - 1
        parts = []
        while node >= 0:
            parts.append(np.arange(self.node_start_V[node], end, dtype=np.int32))
            node = int(self.node_parent_V[node])
            end = int(self.node_end_V[node])
        return np.concatenate(parts[::-1])


# -- one tree, or a part of it -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """Positions of the needed tokens in the flat tree."""

    nodes: list[Node]
    num_used_U: Indices
    """Number of tokens needed of each node, from its first."""
    start_V: Indices
    end_V: Indices
    exit_V: Indices
    parent_V: Indices
    depth_V: Indices
    node_S: Indices
    """Flat node that contains the last token of each sample."""
    last_S: Indices


def flatten(
    tree: TokenTree, samples: Sequence[int] | None = None, tree_index: int = 0, *, with_experts: bool = True
) -> FlatTree:
    """`samples`: those to keep, by default all. `tree_index`: value of `tree_S`. `with_experts`: whether to include
    recorded routing."""
    all_samples = tree.samples
    sample_S = np.arange(len(all_samples)) if samples is None else np.array(samples, np.int64)
    selected = [all_samples[index] for index in sample_S]
    layout = _lay_out(tree, sample_S)
    num_V = layout.end_V - layout.start_V
    used = list(zip(layout.nodes, layout.num_used_U.tolist(), strict=True))
    tokens_N: IntArray = np.concatenate([np.empty(0, np.int32), *(node.tokens[:num] for node, num in used)])
    token_N = np.arange(tokens_N.size)
    parent_N = token_N - 1
    parent_N[layout.start_V] = np.where(layout.parent_V < 0, -1, layout.end_V[layout.parent_V] - 1)
    exit_N = np.repeat(layout.exit_V, num_V)
    # A sample contains a token exactly if its path ends at the token or below it.
    num_ended = np.concatenate(([0], np.bincount(layout.last_S, minlength=tokens_N.size).cumsum()))
    child_M, sample_M = _predicted(layout, selected)
    flat = FlatTree(
        tokens_N=tokens_N,
        position_N=_int32(token_N + np.repeat(layout.depth_V - layout.start_V, num_V)),
        parent_N=_int32(parent_N),
        exit_N=_int32(exit_N),
        multiplicity_N=_int32(num_ended[exit_N] - num_ended[token_N]),
        node_start_V=_int32(layout.start_V),
        node_end_V=_int32(layout.end_V),
        node_parent_V=_int32(layout.parent_V),
        node_depth_V=_int32(layout.depth_V),
        tree_S=np.full(len(selected), tree_index, np.int32),
        sample_S=_int32(sample_S),
        last_S=_int32(layout.last_S),
        advantage_S=np.array([sample.advantage for sample in selected], np.float64),
        weight_S=np.array([sample.weight for sample in selected], np.float64),
        temperature_S=np.array([sample.sampling.temperature for sample in selected], np.float64),
        is_truncated_S=np.array([sample.sampling.is_truncated for sample in selected], np.bool_),
        edge_end_S=_int32(np.cumsum([sample.num_response for sample in selected], dtype=np.int64)),
        edge_position_M=_int32(parent_N[child_M]),
        edge_child_M=_int32(child_M),
        edge_target_M=tokens_N[child_M],
        edge_sample_M=_int32(sample_M),
        edge_logprob_M=_concat_logprobs(selected),
        edge_version_M=_concat_versions(selected),
        experts_NLK=_experts(tree, used) if with_experts else None,
    )
    return frozen(flat)


def _lay_out(tree: TokenTree, chosen_S: Indices) -> _Layout:
    nodes, parents = tree.nodes()
    index_of = {node: index for index, node in enumerate(nodes)}
    ends, samples = tree.ends(), tree.samples
    parent_U = np.array(parents, np.int64)
    depth_U = np.array([node.depth for node in nodes], np.int64)
    end_U = np.array([node.end for node in nodes], np.int64)
    behind_U = _subtree_ends(parents)
    node_S = np.array([index_of[ends[index]] for index in chosen_S], np.int64)
    end_S = np.array([samples[index].num_tokens for index in chosen_S], np.int64)

    num_own_U = np.bincount(node_S, minlength=len(nodes))
    num_before = np.concatenate(([0], num_own_U.cumsum()))
    num_below_U = num_before[behind_U] - num_before[:-1]
    reach_U = np.zeros(len(nodes), np.int64)
    np.maximum.at(reach_U, node_S, end_S)
    reach_U = np.where(num_below_U > num_own_U, end_U, reach_U)
    is_used_U = num_below_U > 0
    num_used_U = np.where(is_used_U, reach_U - depth_U, 0)

    # An only child directly follows its parent, so both are one run of tokens.
    num_children_U = np.bincount(parent_U[is_used_U & (parent_U >= 0)], minlength=len(nodes))
    is_head_U = is_used_U & ((parent_U < 0) | (num_children_U[parent_U] > 1)) if nodes else is_used_U
    head_U = is_head_U.cumsum() - 1
    (heads_V,) = is_head_U.nonzero()
    start = np.concatenate(([0], num_used_U.cumsum()))
    above_V = parent_U[heads_V]
    return _Layout(
        nodes=nodes,
        num_used_U=num_used_U,
        start_V=start[heads_V],
        end_V=np.append(start[heads_V][1:], start[-1])[: heads_V.size],
        exit_V=start[behind_U[heads_V]],
        parent_V=np.where(above_V < 0, -1, head_U[above_V]) if nodes else above_V,
        depth_V=depth_U[heads_V],
        node_S=head_U[node_S],
        last_S=start[node_S] + end_S - depth_U[node_S] - 1,
    )


def _subtree_ends(parents: Sequence[int]) -> Indices:
    """For each node of a depth-first list the index after its last descendant."""
    behind = list(range(1, len(parents) + 1))
    for node in range(len(parents) - 1, -1, -1):
        if parents[node] >= 0:
            behind[parents[node]] = max(behind[parents[node]], behind[node])
    return np.array(behind, np.int64)


def _predicted(layout: _Layout, samples: Sequence[Sample]) -> tuple[Indices, Indices]:
    """Index of each sampled token and its sample, grouped by sample, in token order.

    All samples climb from the ends of their paths together, one node per round, to their first sampled token.
    """
    first_S = np.array([sample.num_prompt for sample in samples], np.int64)
    end_S = np.array([sample.num_tokens for sample in samples], np.int64)
    (sample,) = (end_S > first_S).nonzero()
    node, end = layout.node_S[sample], end_S[sample]
    runs: list[tuple[Indices, Indices, Indices]] = []
    while sample.size:
        begin = np.maximum(first_S[sample], layout.depth_V[node])
        start = layout.start_V[node] + begin - layout.depth_V[node]
        runs.append((sample, start, end - begin))
        above = begin > first_S[sample]
        sample, node, end = sample[above], layout.parent_V[node[above]], begin[above]
    if not runs:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    sample_R, start_R, num_R = (np.concatenate(column) for column in zip(*runs, strict=True))
    # Depth-first order puts ancestors first, so the runs of one sample are ordered by start.
    order = np.lexsort((start_R, sample_R))
    sample_R, start_R, num_R = sample_R[order], start_R[order], num_R[order]
    before_R = num_R.cumsum() - num_R
    return np.arange(num_R.sum()) + np.repeat(start_R - before_R, num_R), np.repeat(sample_R, num_R)


def _experts(tree: TokenTree, used: Sequence[tuple[Node, int]]) -> ExpertArray | None:
    if tree.experts_shape is None:
        return None
    none = np.empty((0, *tree.experts_shape), np.int16)
    return np.concatenate([none, *(node.experts(tree.experts_shape)[:num] for node, num in used)])


def _concat_logprobs(samples: Sequence[Sample]) -> FloatArray:
    return np.concatenate([np.empty(0, np.float32), *(sample.logprobs for sample in samples)])


def _concat_versions(samples: Sequence[Sample]) -> IntArray:
    return np.concatenate([np.empty(0, np.int32), *(sample.versions for sample in samples)])


def _int32(array: Indices) -> IntArray:
    return array.astype(np.int32)


# -- several to one ----------------------------------------------------------------------------------------------------


def join(flats: Sequence[FlatTree]) -> FlatTree:
    """Concatenate trees. The `tree_S` of each is unchanged."""
    if len(flats) == 1:
        return flats[0]
    shifts = {name: [flat.num_tokens for flat in flats] for name in _TOKEN_INDICES}
    shifts["node_parent_V"] = [flat.node_start_V.size for flat in flats]
    shifts["edge_sample_M"] = [flat.sample_S.size for flat in flats]
    shifts["edge_end_S"] = [flat.num_edges for flat in flats]
    columns: dict[str, npt.NDArray[np.generic]] = {}
    for item in fields(FlatTree):
        if item.name != "experts_NLK":
            arrays = [getattr(flat, item.name) for flat in flats]
            columns[item.name] = _shifted(arrays, shifts[item.name]) if item.name in shifts else np.concatenate(arrays)
    return frozen(FlatTree(**columns, experts_NLK=_concat_experts(flats)))  # type: ignore[arg-type]  # by field name


def frozen(flat: FlatTree) -> FlatTree:
    for item in fields(flat):
        array = getattr(flat, item.name)
        if array is not None:
            array.flags.writeable = False
    return flat


def _shifted(arrays: Sequence[IntArray], sizes: Sequence[int]) -> IntArray:
    """Concatenate arrays of local indices, offset to the concatenated items; −1 still means none."""
    starts = np.cumsum([0, *sizes[:-1]], dtype=np.int32)
    return np.concatenate(
        [np.where(array < 0, array, array + start) for array, start in zip(arrays, starts, strict=True)]
    )


def _concat_experts(flats: Sequence[FlatTree]) -> ExpertArray | None:
    shapes = {flat.experts_NLK.shape[1:] for flat in flats if flat.experts_NLK is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise RecordError(f"trees of one pack need routing of one shape per token, received {sorted(shapes)}")
    (shape,) = shapes
    return np.concatenate(
        [
            np.full((flat.num_tokens, *shape), UNKNOWN_EXPERT, np.int16)
            if flat.experts_NLK is None
            else flat.experts_NLK
            for flat in flats
        ]
    )
