"""Precision rules shared by every kernel and layer.

Sensitive arithmetic (norms, router, rotary angles, softmax) runs in *at least* float32: bfloat16 is raised to float32,
float64 stays float64, so that exactness tests can run the whole network in float64.
"""

import torch
from torch import Tensor


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def raised(x: Tensor) -> Tensor:
    """`x` in at least float32."""
    return x.to(at_least_float32(x.dtype))
