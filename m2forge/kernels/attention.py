"""Causal attention over documents laid end to end, on a CPU.

    out[n] = Σ_{m ≤ n, same document} softmax_m( q[n]·k[m] / √K ) v[m]

Float32 without a window goes to c/attention.c; everything else to the plain form, document by document.

Shapes: N tokens, H query heads, G key/value heads, K head dimension.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from m2forge.kernels import native


def document_attention(
    q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, lengths: Sequence[int], masks: Sequence[Tensor | None]
) -> Tensor:
    """`masks[t]`: which keys each query of document t sees, None for all up to itself."""
    if sum(lengths) != q_NHK.shape[0]:
        raise ValueError(f"documents of {sum(lengths)} tokens cannot explain {q_NHK.shape[0]} queries")
    if any(mask is not None for mask in masks) or not native.serves(q_NHK, k_NGK, v_NGK):
        return document_attention_plain(q_NHK, k_NGK, v_NGK, lengths, masks)
    out_NHK: Tensor = _CausalAttention.apply(q_NHK, k_NGK, v_NGK, lengths)  # type: ignore[no-untyped-call]
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


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, lengths: Sequence[int]) -> Tensor:
        q, k, v = (native.head_contiguous(x) for x in (q_NHK, k_NGK, v_NGK))
        out_NHK, lse_NH = q.new_empty(q.shape), q.new_empty(q.shape[:2])
        native.call("attention_forward", q, k, v, *_geometry(q, k, v, lengths), out_NHK, lse_NH)
        ctx.save_for_backward(q, k, v, out_NHK, lse_NH)
        ctx.lengths = lengths
        return out_NHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHK: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out_NHK, lse_NH = ctx.saved_tensors
        grads = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        geometry = _geometry(q, k, v, ctx.lengths)
        native.call("attention_backward", grad_NHK.contiguous(), q, k, v, out_NHK, lse_NH, *geometry, *grads)
        return *grads, None


def _geometry(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> tuple[Tensor | int | float, ...]:
    strides = (q.stride(0), k.stride(0), v.stride(0))
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int64, device="cpu")
    return *strides, starts, len(lengths), q.shape[1], k.shape[1], q.shape[2], q.shape[2] ** -0.5
