"""The memory-bound kernels of a layer, each beside the torch reference it must equal: RMSNorm, rotary embedding, gate.

Shapes: N tokens, H heads, K head dimension, R = rotating dimensions / 2.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from m2forge.kernels import arithmetic as native
from m2forge.kernels.arithmetic import raised

_PARTIAL_ROWS = 252
"""Rows per partial sum of the weight's gradient: ROWS of c/row.c."""


# -- RMSNorm -----------------------------------------------------------------------------------------------------------


class Norm(NamedTuple):
    """The parameters of `rms_norm`."""

    weight: Tensor
    eps: float


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension: x / sqrt(mean(x²) + eps) · weight, the mean in at least float32."""
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


# -- rotary embedding --------------------------------------------------------------------------------------------------


def rotate(x_NHK: Tensor, cos_NR: Tensor, sin_NR: Tensor) -> Tensor:
    """Rotary embedding of the leading dimensions of each head, in the half-rotation layout.

        (a, b) → (a·cos − b·sin, b·cos + a·sin)     with a, b the two halves of the rotating dimensions

    Angles and arithmetic are in at least float32; the result has the dtype of `x_NHK`.
    """
    if native.serves(x_NHK, cos_NR, sin_NR):
        turned: Tensor = _Rotate.apply(x_NHK, cos_NR, sin_NR)  # type: ignore[no-untyped-call]
        return turned
    if native.serves(x_NHK, dtype=torch.bfloat16) and native.serves(cos_NR, sin_NR):
        x, cos_NR, sin_NR = native.head_contiguous(x_NHK), cos_NR.contiguous(), sin_NR.contiguous()
        y = x.new_empty(x.shape)
        native.call("rotate_bfloat16", x, cos_NR, sin_NR, x.stride(0), *x.shape, cos_NR.shape[1], y)
        return y
    return rotate_plain(x_NHK, cos_NR, sin_NR)


def rotate_plain(x_NHK: Tensor, cos_NR: Tensor, sin_NR: Tensor) -> Tensor:
    cos, sin = cos_NR[:, None], sin_NR[:, None]
    half = cos.shape[-1]
    a, b, rest = x_NHK.split((half, half, x_NHK.shape[-1] - 2 * half), dim=-1)
    turned = ((a * cos - b * sin).to(x_NHK.dtype), (b * cos + a * sin).to(x_NHK.dtype))
    return torch.cat((*turned, rest), dim=-1)


class _Rotate(torch.autograd.Function):
    """The gradient is rotated back by the same angles."""

    @staticmethod
    def forward(ctx: Any, x_NHK: Tensor, cos_NR: Tensor, sin_NR: Tensor) -> Tensor:
        ctx.save_for_backward(cos_NR, sin_NR)
        return _rotate(x_NHK, cos_NR, sin_NR, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHK: Tensor) -> tuple[Tensor, None, None]:
        cos_NR, sin_NR = ctx.saved_tensors
        return _rotate(grad_NHK, cos_NR, sin_NR, -1.0), None, None


def _rotate(x_NHK: Tensor, cos_NR: Tensor, sin_NR: Tensor, sign: float) -> Tensor:
    x = native.head_contiguous(x_NHK)
    y = x.new_empty(x.shape)
    native.call("rotate", x, cos_NR.contiguous(), sin_NR.contiguous(), x.stride(0), *x.shape, cos_NR.shape[1], sign, y)
    return y


def rotate_into_cache(
    qkv_NW: Tensor,
    k_PTGK: Tensor,
    v_PTGK: Tensor,
    slot_N: Tensor,
    rotation: tuple[Tensor, Tensor],
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
) -> Tensor:
    """QK norm, rotary embedding and KV cache write after the QKV projection, in bfloat16 on a CPU, without gradients.
    The norms span each head or all heads, according to the length of their weights. Returns q (N, H, K). The CUDA form
    is in rotary_triton.py."""
    (num_tokens, width), (_, _, num_kv_heads, head_dim) = qkv_NW.shape, k_PTGK.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    q_NHK = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv_NW.dtype)
    weights = (None, None) if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight)
    eps, is_flat = (0.0, 0) if q_norm is None else (q_norm.eps, int(q_norm.weight.shape[0] != head_dim))
    sizes = (num_tokens, num_heads, num_kv_heads, head_dim, rotation[0].shape[1])
    native.call("rotate_into_cache", qkv_NW, *weights, eps, is_flat, *rotation, slot_N, *sizes, q_NHK, k_PTGK, v_PTGK)
    return q_NHK


# -- the gate of a SwiGLU network --------------------------------------------------------------------------------------


def gated(h_NG: Tensor) -> Tensor:
    """silu(gate) · up, gate and up the two halves of each row: (N, G / 2)."""
    if native.serves(h_NG, dtype=torch.bfloat16):
        h_NG = h_NG.contiguous()
        num_rows, width = h_NG.shape[0], h_NG.shape[1] // 2
        y_NF = h_NG.new_empty(num_rows, width)
        native.call("gate_bfloat16", h_NG, num_rows, width, y_NF)
        return y_NF
    return gated_plain(h_NG)


def gated_plain(h_NG: Tensor) -> Tensor:
    gate_NF, up_NF = h_NG.chunk(2, dim=-1)
    return F.silu(gate_NF) * up_NF
