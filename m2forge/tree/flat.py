"""A token tree laid out in one row of tokens, as a network and a loss take it.

Tokens stand depth-first, so the descendants of token n are exactly the tokens after n and before `exit_N[n]`:

    a is b or an ancestor of b   ⇔   a ≤ b < exit_N[a]

A node is a run of tokens without a branch; a token's position is its depth. Several trees lie side by side as one
forest. Edges stand sample by sample, each in the order of its tokens, so a result per edge comes apart by `edges_of`.
All arrays are read-only, int32 where not said otherwise.

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
    """Index of the token before, −1 for a first one."""
    exit_N: IntArray
    """Index behind the last descendant of each token."""
    multiplicity_N: IntArray
    """How many samples contain each token."""

    node_start_V: IntArray
    node_end_V: IntArray
    """Nodes follow one another: each ends where the next begins."""
    node_parent_V: IntArray
    """Index of the node above, −1 for a root."""
    node_depth_V: IntArray
    """Position of each node's first token."""

    tree_S: IntArray
    """Which of the trees packed together each sample belongs to; 0 where there is one."""
    sample_S: IntArray
    """Index of each sample in its tree."""
    last_S: IntArray
    """Index of the last token of each sample's path."""
    advantage_S: npt.NDArray[np.float64]
    weight_S: npt.NDArray[np.float64]
    """How much each of a sample's edges counts, relative to the others of the same optimizer step."""
    temperature_S: npt.NDArray[np.float64]
    """What the logits were divided by when the sample was drawn, 0 where the likeliest token was taken."""
    is_truncated_S: npt.NDArray[np.bool_]
    """Whether a sample was cut off or penalised as it was drawn, so that `edge_logprob_M` is of no plain softmax."""
    edge_end_S: IntArray
    """Index behind the last edge of each sample."""

    edge_position_M: IntArray
    """Index of the token that predicts."""
    edge_child_M: IntArray
    """Index of the token predicted."""
    edge_target_M: IntArray
    """Id of the token predicted."""
    edge_sample_M: IntArray
    """Which sample, as an index into the arrays of S, sampled the token."""
    edge_logprob_M: FloatArray
    """Log-probability the token was sampled with, float32."""
    edge_version_M: IntArray
    """Step of the policy that sampled it."""

    experts_NLK: ExpertArray | None = None
    """Recorded routing, int16, −1 where unknown; None where no tree holds any."""

    @property
    def num_tokens(self) -> int:
        return self.tokens_N.size

    @property
    def num_input_tokens(self) -> int:
        """Tokens of all samples, shared ones each time: what rows would compute."""
        return int(self.multiplicity_N.sum(dtype=np.int64))

    @property
    def num_edges(self) -> int:
        return self.edge_position_M.size

    def edges_of(self, sample: int) -> slice:
        return slice(int(self.edge_end_S[sample - 1]) if sample else 0, int(self.edge_end_S[sample]))

    def path(self, sample: int) -> IntArray:
        """Indices of a sample's tokens, from its first to its last."""
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
    """Lay trees side by side. `tree_S` stays as it is in each."""
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
    """Indices into things laid end to end, of which each array knew its own; −1 keeps meaning none."""
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
