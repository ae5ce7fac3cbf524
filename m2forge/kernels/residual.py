"""What a residual stream takes and leaves, where norm_triton.py joins that to a norm.

Shapes: N rows, D columns, K experts of a token, P places of a cache.
"""

from typing import NamedTuple

from torch import Tensor


class Pairs(NamedTuple):
    """What each expert adds to each token, before the sum."""

    y_NKD: Tensor
    expert_NK: Tensor
    """`num_experts` where there is none: then nothing was written."""
    num_experts: int


class Ending(NamedTuple):
    """Where what a network ends with goes."""

    keep_PD: Tensor | None
    """A cache for the states, at `slot_N`."""
    slot_N: Tensor
    target_N: Tensor | None = None
    """The row of the output where a norm goes; −1: nowhere. None: all rows, as they are."""
    num_targets: int = 0
