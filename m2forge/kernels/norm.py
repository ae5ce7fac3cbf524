"""RMSNorm over the last dimension: x / sqrt(mean(x²) + eps) · weight, the mean in at least float32."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from m2forge.kernels import native
from m2forge.kernels.precision import raised

_PARTIAL_ROWS = 252
"""Rows per partial sum of the weight's gradient: ROWS of c/row.c."""


class Norm(NamedTuple):
    """The parameters of `rms_norm`."""

    weight: Tensor
    eps: float


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if native.serves(x, weight):
        y: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
        return y
    if native.serves(x, weight, dtype=torch.bfloat16):
        x_RD, y = _rows(x), x.new_empty(x.shape)
        native.call("norm_bfloat16", x_RD, weight.contiguous(), x_RD.stride(0), *x_RD.shape, eps, y)
        return y
    return rms_norm_plain(x, weight, eps)


def rms_norm_plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = raised(x)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_RD = _rows(x)
        y, scale_R = x.new_empty(x.shape), x.new_empty(x_RD.shape[0])
        weight = weight.contiguous()
        native.call("norm_forward", x_RD, weight, x_RD.stride(0), *x_RD.shape, eps, y, scale_R)
        ctx.save_for_backward(x, weight, scale_R)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale_R = ctx.saved_tensors
        x_RD, grad_x = _rows(x), x.new_empty(x.shape)
        partial = x.new_empty(-(-x_RD.shape[0] // _PARTIAL_ROWS), x_RD.shape[1])
        operands = (grad.contiguous(), x_RD, weight, scale_R)
        native.call("norm_backward", *operands, x_RD.stride(0), *x_RD.shape, grad_x, partial)
        return grad_x, partial.sum(0), None


def _rows(x: Tensor) -> Tensor:
    """(rows, D) with contiguous D and any row stride: a slice of a fused projection needs no copy."""
    return x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous().view(-1, x.shape[-1])
