"""FlexAttention over documents laid end to end, its block mask built from document starts, never from N×N tokens.

A query block and a key block of 128 tokens meet *fully* (no token test needed), *partly* (the token test decides) or
not at all. Documents are contiguous, so the first and last token of each block settle which.
"""

import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128


def document_mask(start_N: Tensor, size: int | None, num_sinks: int) -> BlockMask:
    """`start_N`: first token of each token's document. `size`: tokens visible back, None for all."""
    num_tokens, device = start_N.shape[0], start_N.device
    first_B = torch.arange(0, num_tokens, BLOCK, device=device)
    last_B = (first_B + BLOCK - 1).clamp(max=num_tokens - 1)
    q_first, q_last = first_B[:, None], last_B[:, None]
    k_first, k_last = first_B[None, :], last_B[None, :]
    some = (k_first <= q_first) & (k_last >= start_N[q_first])
    full = (k_last <= q_first) & (k_first >= start_N[q_last]) & (k_first != q_first)
    if size is not None:
        near_some, near_full = q_first - k_last < size, q_last - k_first < size
        sink_some = (k_first - start_N[k_first] < num_sinks) | (start_N[k_last] > start_N[k_first])
        some, full = some & (near_some | (sink_some & (num_sinks > 0))), full & near_full
    partial = some & ~full
    return BlockMask.from_kv_blocks(
        *_blocks(partial),
        *_blocks(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=_token_test(start_N, size, num_sinks),
        seq_lengths=(num_tokens, num_tokens),
    )


def _blocks(meets_BB: Tensor) -> tuple[Tensor, Tensor]:
    """(how many key blocks each query block meets, their indices first)."""
    indices = torch.argsort(meets_BB.to(torch.int8), dim=-1, descending=True, stable=True)
    return meets_BB.sum(-1, dtype=torch.int32)[None, None], indices.to(torch.int32)[None, None]


def _token_test(
    start_N: Tensor, size: int | None, num_sinks: int
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    # The test captures tensors, not Python numbers: another document layout does not recompile the kernel.
    def same_document(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k >= start_N[q])

    if size is None:
        return same_document
    size_1, sinks_1 = start_N.new_tensor(size), start_N.new_tensor(num_sinks)

    def in_window(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return same_document(batch, head, q, k) & ((q - k < size_1) | (k - start_N[k] < sinks_1))

    return in_window


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(flex_attention)
    return compiled


def flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """(1, heads, N, head dimension) each; compiled on its own unless the caller is being compiled already."""
    attention = cast(Callable[..., Tensor], flex_attention) if torch.compiler.is_compiling() else _compiled()
    return attention(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
