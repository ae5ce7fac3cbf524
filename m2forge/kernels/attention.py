"""Causal attention over packed documents on a CPU.

    out[n] = Σ_{m ≤ n, same document} softmax_m( q[n]·k[m] / √K ) v[m]

Float32 without a window uses c/attention.c, which treats documents as trees of one node; everything else uses the plain
form, document by document.

Shapes: N tokens, H query heads, G key/value heads, K head dimension.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from m2forge.kernels import arithmetic as native
from m2forge.kernels.tree_attention import documents_layout, tree_attention_native


def document_attention(
    q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, lengths: Sequence[int], masks: Sequence[Tensor | None]
) -> Tensor:
    """`masks[t]`: the keys that each query of document t sees, None for all up to itself."""
    if sum(lengths) != q_NHK.shape[0]:
        raise ValueError(f"documents of {sum(lengths)} tokens cannot explain {q_NHK.shape[0]} queries")
    if any(mask is not None for mask in masks) or not native.serves(q_NHK, k_NGK, v_NGK):
        return document_attention_plain(q_NHK, k_NGK, v_NGK, lengths, masks)
    return tree_attention_native(q_NHK, k_NGK, v_NGK, documents_layout(lengths))


def document_attention_plain(
    q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, lengths: Sequence[int], masks: Sequence[Tensor | None]
) -> Tensor:
    outs = []
    parts = (x.transpose(0, 1)[None].split(list(lengths), dim=2) for x in (q_NHK, k_NGK, v_NGK))
    for q, k, v, mask in zip(*parts, masks, strict=True):
        gqa = q.shape[1] != k.shape[1]
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa))
    return torch.cat(outs, dim=2)[0].transpose(0, 1)
