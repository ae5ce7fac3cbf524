"""Rotary embedding of the leading dimensions of each head, in the half-rotation layout.

    (a, b) → (a·cos − b·sin, b·cos + a·sin)     with a, b the two halves of the rotating dimensions

Shapes: N tokens, H heads, K head dimension, R = rotating dimensions / 2.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from m2forge.kernels import native
from m2forge.kernels.norm import Norm


def rotate(x_NHK: Tensor, cos_NR: Tensor, sin_NR: Tensor) -> Tensor:
    """Angles and arithmetic are in at least float32; the result has the dtype of `x_NHK`."""
    if native.serves(x_NHK, cos_NR, sin_NR):
        turned: Tensor = _Rotate.apply(x_NHK, cos_NR, sin_NR)  # type: ignore[no-untyped-call]
        return turned
    if native.serves(x_NHK, dtype=torch.bfloat16) and native.serves(cos_NR, sin_NR):
        x, cos_NR, sin_NR = native.head_contiguous(x_NHK), cos_NR.contiguous(), sin_NR.contiguous()
        y = x.new_empty(x.shape)
        native.call("rotate_bfloat16", x, cos_NR, sin_NR, x.stride(0), *x.shape, cos_NR.shape[1], y)
        return y
    return rotate_plain(x_NHK, cos_NR, sin_NR)


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
        return _turn(x_NHK, cos_NR, sin_NR, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHK: Tensor) -> tuple[Tensor, None, None]:
        cos_NR, sin_NR = ctx.saved_tensors
        return _turn(grad_NHK, cos_NR, sin_NR, -1.0), None, None


def _turn(x_NHK: Tensor, cos_NR: Tensor, sin_NR: Tensor, sign: float) -> Tensor:
    x = native.head_contiguous(x_NHK)
    y = x.new_empty(x.shape)
    native.call("rotate", x, cos_NR.contiguous(), sin_NR.contiguous(), x.stride(0), *x.shape, cos_NR.shape[1], sign, y)
    return y
