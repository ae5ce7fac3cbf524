"""Rotation of the leading dimensions of each head by the token's angles, in the half-rotation layout.

    (a, b) → (a·cos − b·sin, b·cos + a·sin)     with a, b the two halves of the rotating dimensions

Shapes: N tokens, H heads, K head dimension, R = rotating dimensions / 2.
"""

from typing import Any

import torch
from torch import Tensor

from m2forge.kernels import native


def rotate(x_NHK: Tensor, cos_NR: Tensor, sin_NR: Tensor) -> Tensor:
    """The angles are in at least float32 and so is the rotation; the result has the type of `x_NHK`."""
    if native.serves(x_NHK, cos_NR, sin_NR):
        turned: Tensor = _rotate(x_NHK, cos_NR, sin_NR, 1.0)
        return turned
    return rotate_plain(x_NHK, cos_NR, sin_NR)


def rotate_plain(x_NHK: Tensor, cos_NR: Tensor, sin_NR: Tensor) -> Tensor:
    cos, sin = cos_NR[:, None], sin_NR[:, None]
    half = cos.shape[-1]
    a, b, rest = x_NHK.split((half, half, x_NHK.shape[-1] - 2 * half), dim=-1)
    turned = ((a * cos - b * sin).to(x_NHK.dtype), (b * cos + a * sin).to(x_NHK.dtype))
    return torch.cat((*turned, rest), dim=-1)


@torch.library.custom_op("m2forge::rotate", mutates_args=())
def _rotate(x_NHK: Tensor, cos_NR: Tensor, sin_NR: Tensor, sign: float) -> Tensor:
    x = x_NHK if x_NHK.stride(2) == 1 and x_NHK.stride(1) == x_NHK.shape[2] else x_NHK.contiguous()
    y = torch.empty(x.shape)
    native.call("rotate", x, cos_NR, sin_NR, x.stride(0), *x.shape, cos_NR.shape[1], sign, y)
    return y


@_rotate.register_fake
def _(x_NHK: Tensor, cos_NR: Tensor, sin_NR: Tensor, sign: float) -> Tensor:
    return x_NHK.new_empty(x_NHK.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos_NR, sin_NR, ctx.sign = inputs
    ctx.save_for_backward(cos_NR, sin_NR)


def _backward(ctx: Any, grad_NHK: Tensor) -> tuple[Tensor | None, ...]:
    """A rotation's gradient turns back by the same angles."""
    return _rotate(grad_NHK, *ctx.saved_tensors, -ctx.sign), None, None, None


_rotate.register_autograd(_backward, setup_context=_save)
