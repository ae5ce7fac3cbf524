"""A linear map whose output is in at least float32, whatever its operands.

Products of bfloat16 numbers are exact in float32, so multiplying bfloat16 operands with float32 sums equals raising
them first; on CUDA that is one tensor-core product with a float32 output. The router and the float32 head use it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from m2forge.kernels.precision import raised


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    if x.is_cuda and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16):
        out: Tensor = _LinearFloat32.apply(x, weight)  # type: ignore[no-untyped-call]
        return out
    return F.linear(raised(x), raised(weight))


class _LinearFloat32(torch.autograd.Function):
    """Gradients are rounded to the operands' type before their products, as any low-precision layer does."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, weight_ED)
        return torch.mm(x_ND, weight_ED.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad_NE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_ND, weight_ED = ctx.saved_tensors
        grad_NE = grad_NE.to(x_ND.dtype)
        grad_x = grad_NE @ weight_ED if ctx.needs_input_grad[0] else None
        grad_weight = grad_NE.t() @ x_ND if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight
