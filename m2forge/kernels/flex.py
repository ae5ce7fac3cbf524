"""FlexAttention over packed documents and token trees, with a block mask that is never built from N×N tokens.

A query block attends to a key block of 128 tokens *fully* (no per-token mask), *partly* (the per-token mask decides) or
not at all. Documents are contiguous, so the first and last token of each block decide which. For a tree, the minimum
and maximum exit and depth in each block decide: q sees token k if k ≤ q < exit[k].

Importing this module loads torch's compiler, which takes over a second: import it where CUDA needs it.
"""

import functools
import logging
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from m2forge.kernels.slow_path import tree_kernel_problem
from m2forge.kernels.tree_attention import TreeLayout, tree_attention_plain
from m2forge.observe.log import warn_once

_log = logging.getLogger(__name__)

BLOCK = 128


def document_mask(start_N: Tensor, size: int | None, num_sinks: int) -> BlockMask:
    """`start_N`: first token of each token's document. `size`: the window in tokens, None for no limit."""
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
    return _mask(some, full, _token_test(start_N, size, num_sinks), num_tokens)


def tree_mask(exit_N: Tensor, position_N: Tensor, size: int | None, num_sinks: int) -> BlockMask:
    """`exit_N`: index after each token's last descendant. `position_N`: its depth. `size`: the window in tokens, None
    for no limit; all descendants see the first `num_sinks`."""
    first_B = torch.arange(0, exit_N.shape[0], BLOCK, device=exit_N.device)
    q_first, k_first = first_B[:, None], first_B[None, :]
    last_B = (first_B + BLOCK - 1).clamp(max=exit_N.shape[0] - 1)
    (least_exit_B, most_exit_B), (least_B, most_B) = _range(exit_N), _range(position_N)
    some = (k_first <= q_first) & (most_exit_B[None, :] > q_first)
    full = (k_first < q_first) & (least_exit_B[None, :] > last_B[:, None])
    if size is not None:
        some &= (least_B[:, None] - most_B[None, :] < size) | (least_B[None, :] < num_sinks)
        full &= (most_B[:, None] - least_B[None, :] < size) | (most_B[None, :] < num_sinks)
    return _mask(some, full, _tree_test(exit_N, position_N, size, num_sinks), exit_N.shape[0])


def path_mask(
    exit_N: Tensor,
    position_N: Tensor,
    num_above: int,
    size: int | None,
    num_sinks: int,
    query_Q: Tensor | None = None,
) -> BlockMask:
    """The mask of path_attention.py: keys are `num_above` tokens of a path, then the N tokens themselves. `query_Q`:
    the tokens that have a query, ascending; None: all. Queries and keys are padded to whole blocks; no query sees a key
    of the padding, and queries of the padding see anything."""
    num_own, device = exit_N.shape[0], exit_N.device
    num_keys = num_above + num_own
    num_queries = num_own if query_Q is None else query_Q.shape[0]
    # The first query that sees each key, and the one after the last, both counted from the first query.
    first_M = _filled(torch.arange(num_keys, device=device) - num_above, num_own)
    exit_M = _filled(torch.cat((exit_N.new_full((num_above,), num_own), exit_N)), 0)
    position_M = _filled(torch.cat((torch.arange(num_above, device=device), position_N)), 0)
    position_Q = _filled(position_N if query_Q is None else position_N[query_Q], 0)
    q_first = torch.arange(0, num_queries, BLOCK, device=device)[:, None]
    q_last = (q_first + BLOCK - 1).clamp(max=num_queries - 1)
    if query_Q is not None:
        q_first, q_last = query_Q[q_first], query_Q[q_last]
    (least_first, most_first), (least_exit, most_exit) = _range(first_M), _range(exit_M)
    some = (least_first <= q_last) & (most_exit > q_first)
    full = (most_first <= q_first) & (least_exit > q_last)
    if size is not None:
        (least_q, most_q), (least_k, most_k) = _range(position_Q), _range(position_M)
        some &= (least_q[:, None] - most_k < size) | (least_k < num_sinks)
        full &= (most_q[:, None] - least_k < size) | (most_k < num_sinks)
    token_Q = None if query_Q is None else _filled(query_Q, 0)
    test = _path_test(first_M, exit_M, token_Q, position_Q, position_M, size, num_sinks)
    return _mask(some, full, test, whole_blocks(num_queries), whole_blocks(num_keys))


def whole_blocks(num_tokens: int) -> int:
    """The number of tokens with padding to whole blocks."""
    return num_tokens + -num_tokens % BLOCK


def _filled(x_N: Tensor, value: int) -> Tensor:
    return torch.cat((x_N, x_N.new_full((-x_N.shape[0] % BLOCK,), value)))


def _range(x_N: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of each block."""
    filled = torch.cat((x_N, x_N[-1:].expand(-x_N.shape[0] % BLOCK)))  # repeating the last value changes neither
    low_B, high_B = torch.aminmax(filled.view(-1, BLOCK), dim=1)
    return low_B, high_B


TokenTest = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _mask(
    some_BB: Tensor, full_BB: Tensor, test: TokenTest, num_queries: int, num_keys: int | None = None
) -> BlockMask:
    return BlockMask.from_kv_blocks(
        *_blocks(some_BB & ~full_BB),
        *_blocks(full_BB),
        BLOCK_SIZE=BLOCK,
        mask_mod=test,
        seq_lengths=(num_queries, num_queries if num_keys is None else num_keys),
    )


def _blocks(meets_BB: Tensor) -> tuple[Tensor, Tensor]:
    """(number of key blocks that each query block attends to, key block indices with those first)."""
    indices = torch.argsort(meets_BB.to(torch.int8), dim=-1, descending=True, stable=True)
    return meets_BB.sum(-1, dtype=torch.int32)[None, None], indices.to(torch.int32)[None, None]


def _token_test(start_N: Tensor, size: int | None, num_sinks: int) -> TokenTest:
    # The test captures tensors, not Python numbers: another document layout does not recompile the kernel.
    def same_document(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k >= start_N[q])

    if size is None:
        return same_document
    size_1, sinks_1 = start_N.new_tensor(size), start_N.new_tensor(num_sinks)

    def in_window(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return same_document(batch, head, q, k) & ((q - k < size_1) | (k - start_N[k] < sinks_1))

    return in_window


def _tree_test(exit_N: Tensor, position_N: Tensor, size: int | None, num_sinks: int) -> TokenTest:
    def below(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < exit_N[k])

    if size is None:
        return below
    size_1, sinks_1 = exit_N.new_tensor(size), exit_N.new_tensor(num_sinks)

    def in_window(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        near = (position_N[q] - position_N[k] < size_1) | (position_N[k] < sinks_1)
        return below(batch, head, q, k) & near

    return in_window


def _path_test(
    first_M: Tensor,
    exit_M: Tensor,
    token_Q: Tensor | None,
    position_Q: Tensor,
    position_M: Tensor,
    size: int | None,
    num_sinks: int,
) -> TokenTest:
    """`token_Q`: the token of each query; None: its index."""

    def below(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        token = q if token_Q is None else token_Q[q]
        return (first_M[k] <= token) & (token < exit_M[k])

    if size is None:
        return below
    size_1, sinks_1 = exit_M.new_tensor(size), exit_M.new_tensor(num_sinks)

    def in_window(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return below(batch, head, q, k) & ((position_Q[q] - position_M[k] < size_1) | (position_M[k] < sinks_1))

    return in_window


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(flex_attention)
    return compiled


def _tiles(q: Tensor) -> dict[str, int]:
    """Kernel options, where torch's own are slower: on an H200 1.3 times in the forward pass with heads of 64."""
    if q.shape[3] != 64 or q.dtype not in (torch.bfloat16, torch.float16):
        return {}
    return {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3}


def flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """(1, heads, N, head dimension) each; compiles the kernel unless the caller is already being compiled."""
    attention = cast(Callable[..., Tensor], flex_attention) if torch.compiler.is_compiling() else _compiled()
    return attention(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1], kernel_options=_tiles(q))


def _any_length(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    # A function of its own: torch counts recompilations by function, and drops the kernel after eight.
    attention = cast(Callable[..., Tensor], flex_attention)
    # Torch cannot know that any length is one of whole blocks; a kernel that tests it is 1.2 to 1.4 times slower.
    options = {**_tiles(q), "IS_DIVISIBLE": True}
    return attention(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1], kernel_options=options)


@functools.cache
def _compiled_for_any_length() -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(_any_length, dynamic=True)
    return compiled


def path_flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """The same for keys of a path, whose number differs from call to call: one kernel serves all of them. Keys come in
    whole blocks."""
    num_queries = q.shape[2]
    q = torch.nn.functional.pad(q, (0, 0, 0, -num_queries % BLOCK))
    return _compiled_for_any_length()(q, k, v, mask)[:, :, :num_queries]


# Inlined into a compiled block, its nodes would be recompiled for every tree.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch does not type it
def eager_tree_attention(q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, layout: TreeLayout) -> Tensor:
    """Attention over a tree, node by node and never compiled, where no CUDA kernel serves."""
    problem = tree_kernel_problem(q_NHK.dtype, q_NHK.shape[2])
    if problem is not None and q_NHK.dtype != torch.float64:
        warn_once(_log, problem)
    return tree_attention_plain(q_NHK, k_NGK, v_NGK, layout)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_eagerly(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Runs `function` outside the graph of a compiled caller."""
    return function(*args)
