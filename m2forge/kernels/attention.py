"""Causal attention over documents laid end to end, on a CPU.

    out[n] = Σ_{m ≤ n, same document} softmax_m( q[n]·k[m] / √K ) v[m]

Float32 without a window goes to native.c; everything else to the plain form, document by document.

Shapes: N tokens, H query heads, G key/value heads, K head dimension.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from m2forge.kernels import native


def document_attention(
    q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, lengths: Sequence[int], masks: Sequence[Tensor | None]
) -> Tensor:
    """`masks[t]`: which keys each query of document t sees, None for all up to itself."""
    if any(mask is not None for mask in masks) or not native.serves(q_NHK, k_NGK, v_NGK):
        return document_attention_plain(q_NHK, k_NGK, v_NGK, lengths, masks)
    out_NHK: Tensor = _causal_attention(q_NHK, k_NGK, v_NGK, list(lengths))[0]
    return out_NHK


def document_attention_plain(
    q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, lengths: Sequence[int], masks: Sequence[Tensor | None]
) -> Tensor:
    outs = []
    parts = (x.transpose(0, 1)[None].split(list(lengths), dim=2) for x in (q_NHK, k_NGK, v_NGK))
    for q, k, v, mask in zip(*parts, masks, strict=True):
        gqa = q.shape[1] != k.shape[1]
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa))
    return torch.cat(outs, dim=2)[0].transpose(0, 1)


@torch.library.custom_op("m2forge::causal_attention", mutates_args=())
def _causal_attention(q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    q, k, v = (_head_contiguous(x) for x in (q_NHK, k_NGK, v_NGK))
    out_NHK = torch.empty(q.shape)
    lse_NH = torch.empty(q.shape[0], q.shape[1])
    native.call("attention_forward", q, k, v, *_geometry(q, k, v, lengths), out_NHK, lse_NH)
    return out_NHK, lse_NH


@_causal_attention.register_fake
def _(q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    return q_NHK.new_empty(q_NHK.shape), q_NHK.new_empty(q_NHK.shape[:2])


@torch.library.custom_op("m2forge::causal_attention_backward", mutates_args=())
def _causal_attention_backward(
    grad_NHK: Tensor, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, out_NHK: Tensor, lse_NH: Tensor, lengths: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (_head_contiguous(x) for x in (q_NHK, k_NGK, v_NGK))
    grads = torch.empty(q.shape), torch.zeros(k.shape), torch.zeros(v.shape)
    geometry = _geometry(q, k, v, lengths)
    native.call("attention_backward", grad_NHK.contiguous(), q, k, v, out_NHK, lse_NH, *geometry, *grads)
    return grads


@_causal_attention_backward.register_fake
def _(
    grad_NHK: Tensor, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, out_NHK: Tensor, lse_NH: Tensor, lengths: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    return q_NHK.new_empty(q_NHK.shape), k_NGK.new_empty(k_NGK.shape), v_NGK.new_empty(v_NGK.shape)


def _geometry(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> tuple[Tensor | int | float, ...]:
    strides = (q.stride(0), k.stride(0), v.stride(0))
    starts = torch.tensor([0, *accumulate(lengths)])
    return *strides, starts, len(lengths), q.shape[1], k.shape[1], q.shape[2], q.shape[2] ** -0.5


def _head_contiguous(x: Tensor) -> Tensor:
    """Each token's heads side by side, tokens at any stride: what a slice of a joint projection already is."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.lengths = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_NHK: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_causal_attention_backward(grad_NHK, *ctx.saved_tensors, ctx.lengths), None


_causal_attention.register_autograd(_backward, setup_context=_save)
