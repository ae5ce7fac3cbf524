"""A token tree flattened to one sequence of tokens, the input of a model and a loss.

Tokens are in depth-first order, so the descendants of token n are exactly the tokens after n and before `exit_N[n]`:

    a is b or an ancestor of b   ⇔   a ≤ b < exit_N[a]

A node is a run of tokens without a branch; a token's position is its depth. Several trees are concatenated to one
forest. Edges are grouped by sample, in token order, so `edges_of` selects one sample's part of a per-edge result.
All arrays are read-only, and int32 unless stated otherwise.

Shapes: N tokens, V nodes, S samples, M loss edges, L layers with a router, K experts chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from m2forge.errors import RecordError
from m2forge.records import FloatArray, IntArray
from m2forge.tree.sample import UNKNOWN_EXPERT, ExpertArray


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


_TOKEN_INDICES = ("parent_N", "exit_N", "node_start_V", "node_end_V", "last_S", "edge_position_M", "edge_child_M")


def join(flats: Sequence[FlatTree]) -> FlatTree:
    """Concatenate trees. The `tree_S` of each is kept."""
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
    return frozen(FlatTree(**columns, experts_NLK=_joined_experts(flats)))  # type: ignore[arg-type]  # by field name


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


def _joined_experts(flats: Sequence[FlatTree]) -> ExpertArray | None:
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
