"""RMSNorm over the last dimension: x / sqrt(mean(x²) + eps) · weight, the mean in at least float32."""

from typing import Any

import torch
from torch import Tensor

from m2forge.kernels import native
from m2forge.kernels.precision import raised

_PARTIAL_ROWS = 252
"""Rows per partial sum of the weight's gradient: ROWS of native.c."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if native.serves(x, weight):
        y: Tensor = _rms_norm(x, weight, eps)[0]
        return y
    return rms_norm_plain(x, weight, eps)


def rms_norm_plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = raised(x)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight


@torch.library.custom_op("m2forge::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x_RD = _rows(x)
    y, scale_R = torch.empty(x.shape), torch.empty(x_RD.shape[0])
    native.call("norm_forward", x_RD, weight, x_RD.stride(0), *x_RD.shape, eps, y, scale_R)
    return y, scale_R


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1].numel())


@torch.library.custom_op("m2forge::rms_norm_backward", mutates_args=())
def _rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale_R: Tensor) -> tuple[Tensor, Tensor]:
    x_RD, grad_x = _rows(x), torch.empty(x.shape)
    partial = torch.empty(-(-x_RD.shape[0] // _PARTIAL_ROWS), x_RD.shape[1])
    operands = (grad.contiguous(), x_RD, weight, scale_R)
    native.call("norm_backward", *operands, x_RD.stride(0), *x_RD.shape, grad_x, partial)
    return grad_x, partial.sum(0)


@_rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, scale_R: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight)


def _rows(x: Tensor) -> Tensor:
    """(rows, D) with D contiguous and any distance between rows: a slice of a joint projection needs no copy."""
    return x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous().view(-1, x.shape[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_rms_norm_backward(grad, *ctx.saved_tensors), None


_rms_norm.register_autograd(_backward, setup_context=_save)
