"""Paged attention: keys and values are stored in blocks, and each sequence has a block table.

    out[b, q] = Σ_{l seen by q} softmax_l( query[b, q] · key[b, l] / √K ) value[b, l]
    key[b, l] = k[table[b, l // T], l mod T]

Sequences with the same number of new tokens in a step are computed together: one token each in decode, several in
verification, many in prefill.

CUDA (paged_attention_triton.py), and float32 and bfloat16 on a CPU (c/paged_attention.c), read the blocks in place;
everything else gathers them first. Without gradients.

Shapes: P blocks, T tokens per block, B sequences computed together, Q new tokens of each, S blocks of the longest, L =
S·T, H query heads, G key/value heads, R = H / G, K head dimension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from m2forge.kernels import arithmetic as native


def paged_attention(
    q_BQHK: Tensor,
    k_PTGK: Tensor,
    v_PTGK: Tensor,
    table_BS: Tensor,
    position_BQ: Tensor,
    window: tuple[int, int] | None = None,
) -> Tensor:
    """(B, Q, H, K). Each query sees its sequence up to its own position, as in `visible_in_cache`; table entries past
    the end of a sequence may name any block."""
    if q_BQHK.is_cuda and not native.needs_gradient(q_BQHK, k_PTGK, v_PTGK):
        from m2forge.kernels import paged_attention_triton as triton_form

        if triton_form.serves(k_PTGK):
            return triton_form.paged_attention_cuda(q_BQHK, k_PTGK, v_PTGK, table_BS, position_BQ, window)
    cached = (k_PTGK, v_PTGK)
    is_plain = k_PTGK.is_contiguous() and v_PTGK.is_contiguous() and not native.needs_gradient(q_BQHK, *cached)
    if is_plain and (native.serves(q_BQHK, *cached) or native.serves(q_BQHK, *cached, dtype=torch.bfloat16)):
        return _native(q_BQHK, k_PTGK, v_PTGK, table_BS, position_BQ, window)
    return paged_attention_plain(q_BQHK, k_PTGK, v_PTGK, table_BS, position_BQ, window)


def _native(
    q_BQHK: Tensor,
    k_PTGK: Tensor,
    v_PTGK: Tensor,
    table_BS: Tensor,
    position_BQ: Tensor,
    window: tuple[int, int] | None,
) -> Tensor:
    (num_rows, num_new, num_heads, head_dim), (_, block_tokens, num_kv_heads, _) = q_BQHK.shape, k_PTGK.shape
    num_blocks = table_BS.shape[1]
    size, num_sinks = window or (num_blocks * block_tokens, 0)
    out_BQHK = q_BQHK.new_empty(q_BQHK.shape)
    q_NHK = native.head_contiguous(q_BQHK.flatten(0, 1))
    sizes = (
        q_NHK.stride(0),
        num_rows,
        num_new,
        num_blocks,
        block_tokens,
        num_heads,
        num_kv_heads,
        head_dim,
        size,
        num_sinks,
    )
    indexing = (table_BS.contiguous(), position_BQ.contiguous())
    is_narrow = int(q_BQHK.dtype == torch.bfloat16)
    native.call("paged_attention", q_NHK, k_PTGK, v_PTGK, *indexing, *sizes, is_narrow, out_BQHK)
    return out_BQHK


def paged_attention_plain(
    q_BQHK: Tensor,
    k_PTGK: Tensor,
    v_PTGK: Tensor,
    table_BS: Tensor,
    position_BQ: Tensor,
    window: tuple[int, int] | None = None,
) -> Tensor:
    """Gathers the blocks and masks the keys that a query does not see."""
    seen_BQL = visible_in_cache(position_BQ, table_BS.shape[1] * k_PTGK.shape[1], window)
    num_kv_heads = k_PTGK.shape[2]
    k_BGLK, v_BGLK = (x[table_BS].flatten(1, 2).transpose(1, 2) for x in (k_PTGK, v_PTGK))
    # Treat the query heads of one key head as additional queries.
    q_BGRQK = q_BQHK.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
    num_repeats = q_BGRQK.shape[2]
    mask_B1RQL = seen_BQL[:, None].repeat(1, 1, num_repeats, 1)
    out = F.scaled_dot_product_attention(q_BGRQK.flatten(2, 3), k_BGLK, v_BGLK, attn_mask=mask_B1RQL)
    out_BQHK: Tensor = out.unflatten(2, (num_repeats, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out_BQHK


def visible_in_cache(position_BQ: Tensor, length: int, window: tuple[int, int] | None = None) -> Tensor:
    """(B, Q, length): the tokens of its sequence that a token at each position sees. `window`: number of tokens back,
    itself included, and number of sink tokens."""
    token_L = torch.arange(length, device=position_BQ.device)
    back_BQL = position_BQ[..., None] - token_L
    seen_BQL = back_BQL >= 0
    if window is None:
        return seen_BQL
    size, num_sinks = window
    return seen_BQL & ((back_BQL < size) | (token_L < num_sinks))
