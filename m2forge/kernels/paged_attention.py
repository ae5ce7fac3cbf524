"""Attention over a paged cache: keys and values lie in blocks, and each sequence has a table of its own.

    out[b, q] = Σ_{l seen by q} softmax_l( query[b, q] · key[b, l] / √K ) value[b, l]
    key[b, l] = k[table[b, l // T], l mod T]

Sequences that run equally many tokens in a step are computed together: one token each while they are
completed, several where tokens are verified, many where a prompt is read.

Shapes: P blocks, T tokens of one, B sequences computed together, Q new tokens of each, S blocks of the longest,
L = S·T, H query heads, G key/value heads, R = H / G, K head dimension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def paged_attention(
    q_BQHK: Tensor,
    k_PTGK: Tensor,
    v_PTGK: Tensor,
    table_BS: Tensor,
    position_BQ: Tensor,
    window: tuple[int, int] | None = None,
) -> Tensor:
    """(B, Q, H, K). Each query sees its sequence up to its own position, as `visible_in_cache` says; where a table
    goes on past its sequence's end, it may name any block."""
    seen_BQL = visible_in_cache(position_BQ, table_BS.shape[1] * k_PTGK.shape[1], window)
    num_kv_heads = k_PTGK.shape[2]
    k_BGLK, v_BGLK = (x[table_BS].flatten(1, 2).transpose(1, 2) for x in (k_PTGK, v_PTGK))
    # The query heads of one key head stand below one another, as if they were so many more queries.
    q_BGRQK = q_BQHK.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
    num_repeats = q_BGRQK.shape[2]
    mask_B1RQL = seen_BQL[:, None].repeat(1, 1, num_repeats, 1)
    out = F.scaled_dot_product_attention(q_BGRQK.flatten(2, 3), k_BGLK, v_BGLK, attn_mask=mask_B1RQL)
    out_BQHK: Tensor = out.unflatten(2, (num_repeats, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out_BQHK


def visible_in_cache(position_BQ: Tensor, length: int, window: tuple[int, int] | None = None) -> Tensor:
    """(B, Q, length): which tokens of its sequence a token at this position sees. `window`: how many tokens back,
    itself included, and how many first ones besides."""
    token_L = torch.arange(length, device=position_BQ.device)
    back_BQL = position_BQ[..., None] - token_L
    seen_BQL = back_BQL >= 0
    if window is None:
        return seen_BQL
    size, num_sinks = window
    return seen_BQL & ((back_BQL < size) | (token_L < num_sinks))
