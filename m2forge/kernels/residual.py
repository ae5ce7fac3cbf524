"""Inputs and outputs of the residual stream in the fused norms of norm_triton.py.

Shapes: N rows, D columns, K experts of a token, P slots of a cache.
"""

from typing import NamedTuple

from torch import Tensor


class Pairs(NamedTuple):
    """Each expert's output for each token, before the sum."""

    y_NKD: Tensor
    expert_NK: Tensor
    """`num_experts` for padding, for which no output was written."""
    num_experts: int


class Ending(NamedTuple):
    """Where the network's final states and norms are written."""

    keep_PD: Tensor | None
    """Cache that receives the states, at `slot_N`."""
    slot_N: Tensor
    target_N: Tensor | None = None
    """Output row of each norm; −1: not written. None: all rows, in order."""
    num_targets: int = 0
