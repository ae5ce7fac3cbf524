"""Paged attention on CUDA, for decode, verification and prefill.

    out[b, q] = Σ_{l seen by q} softmax_l( query[b, q] · key[b, l] / √K ) value[b, l]
    key[b, l] = k[table[b, l // T], l mod T]

The rows of a tile are the query heads of one key head, for all queries of a sequence: even one new token fills a
tensor-core product with its heads. A program iterates over the key tiles that its rows see, each gathered from several
blocks, with the softmax in float32. With few programs, each handles one of several splits of the sequence, and a second
kernel merges the splits (flash decoding):

    out = Σ_s 2^lse[s] part[s] / Σ_s 2^lse[s],   lse[s] = log2 of the part's sum of weights

The number of splits depends on shapes alone. Positions and block tables are read on the device, so a CUDA graph can be
replayed with other values in the same buffers. A padding query (position −1) attends to nothing, and its output is 0.
The reference is `paged_attention_plain`.

Shapes: as there. Within a kernel: M rows, N keys of a tile.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from m2forge.kernels.slow_path import paged_kernel_problem

LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-1.0e30)
"""Replaces minus infinity where differences of it are taken."""
PROGRAMS_PER_PROCESSOR = 4
"""With fewer programs per SM, memory bandwidth is idle and the sequence is split."""
LEAST_PART_TOKENS = 128
"""A shorter split costs more to merge than it saves."""
MOST_PARTS = 64


def serves(k_PTGK: Tensor) -> bool:
    _, block_tokens, _, head_dim = k_PTGK.shape
    return paged_kernel_problem(k_PTGK.dtype, head_dim, block_tokens) is None


# -- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _attend(
    sum_MK, total_M, top_M, q_MK, position_M, last, k, v, table, start, block_stride, token_stride, scale, size,
    num_sinks, T: tl.constexpr, K: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One key tile: updates the running sum of values, sum of weights, and highest score, in powers of two."""
    token = start + tl.arange(0, N)
    column = tl.arange(0, K)[None, :]
    if MASKED:
        # Behind the last token is another sequence's data, or uninitialised memory.
        inside = token <= last
        block = tl.load(table + token // T, mask=inside, other=0).to(tl.int64)
        at = (block * block_stride + token % T * token_stride)[:, None] + column
        k_NK = tl.load(k + at, mask=inside[:, None], other=0.0)
        v_NK = tl.load(v + at, mask=inside[:, None], other=0.0)
    else:
        block = tl.load(table + token // T).to(tl.int64)
        at = (block * block_stride + token % T * token_stride)[:, None] + column
        k_NK, v_NK = tl.load(k + at), tl.load(v + at)
    score_MN = tl.dot(q_MK, tl.trans(k_NK), input_precision="ieee") * scale
    if MASKED:
        back_MN = position_M[:, None] - token[None, :]
        keep_MN = back_MN >= 0
        if WINDOW:
            keep_MN = keep_MN & ((back_MN < size) | (token < num_sinks)[None, :])
        score_MN = tl.where(keep_MN, score_MN, LOWEST)
        higher_M = tl.maximum(top_M, tl.max(score_MN, 1))
        # A row without a visible key so far has its top at LOWEST, where exp2 of the difference is 1.
        weight_MN = tl.where(keep_MN, tl.math.exp2(score_MN - higher_M[:, None]), 0.0)
    else:
        higher_M = tl.maximum(top_M, tl.max(score_MN, 1))
        weight_MN = tl.math.exp2(score_MN - higher_M[:, None])
    shrink_M = tl.math.exp2(top_M - higher_M)
    sum_MK = tl.dot(weight_MN.to(v_NK.dtype), v_NK, sum_MK * shrink_M[:, None], input_precision="ieee")
    return sum_MK, total_M * shrink_M + tl.sum(weight_MN, 1), higher_M


# These values change with the load: do not recompile for them.
@triton.jit(do_not_specialize=["num_queries", "num_splits", "table_stride", "size", "num_sinks"])
def _paged_kernel(
    q, k, v, table, position, out, part, lse, num_queries, num_splits, batch_stride, query_stride, block_stride,
    token_stride, head_stride, table_stride, scale, size, num_sinks,
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, T: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    LONG: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    split, group, batch = tl.program_id(0) % num_splits, tl.program_id(1), tl.program_id(2).to(tl.int64)
    # The last queries attend to the most keys: their programs start first.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // num_splits
    row = tile * M + tl.arange(0, M)
    query, head = row // R, group * R + row % R
    live = query < num_queries
    position_M = tl.load(position + batch * num_queries + query, mask=live, other=-1).to(tl.int32)
    last = tl.max(position_M, 0)
    first = tl.min(tl.where(live, position_M, last), 0)
    num_tiles = (last + N) // N
    if WINDOW:
        # Sink tiles, then those from where the first query's window begins.
        num_front = tl.minimum((num_sinks + N - 1) // N, num_tiles)
        nearest = tl.min(tl.where(position_M >= 0, position_M, last), 0)
        jump = tl.maximum(tl.maximum(nearest - size + 1, 0) // N - num_front, 0)
        num_tiles -= jump
    per_split = (num_tiles + num_splits - 1) // num_splits
    begin = split * per_split
    end = tl.minimum(begin + per_split, num_tiles)
    flat = (batch * num_queries + query) * H + head
    if SPLIT:
        part += split * tl.num_programs(2).to(tl.int64) * num_queries * H * K
        lse += split * tl.num_programs(2).to(tl.int64) * num_queries * H
        if begin >= end:
            tl.store(lse + flat, tl.full((M,), LOWEST, tl.float32), mask=live)
            return
    column = tl.arange(0, K)[None, :]
    at = (batch * batch_stride + query * query_stride + head * K)[:, None] + column
    q_MK = tl.load(q + at, mask=live[:, None], other=0.0)
    k += group * head_stride
    v += group * head_stride
    table += batch * table_stride
    sum_MK = tl.zeros((M, K), tl.float32)
    total_M, top_M = tl.zeros((M,), tl.float32), tl.full((M,), LOWEST, tl.float32)
    masked_begin = begin
    if LONG:
        # All rows attend to all keys of these tiles.
        masked_begin = tl.maximum(tl.minimum((first + 1) // N, end), begin)
        for index in range(begin, masked_begin):
            sum_MK, total_M, top_M = _attend(
                sum_MK, total_M, top_M, q_MK, position_M, last, k, v, table, index * N, block_stride, token_stride,
                scale, size, num_sinks, T, K, N, False, False,
            )  # fmt: skip
    for index in range(masked_begin, end):
        start = index * N
        if WINDOW:
            start = tl.where(index < num_front, index, index + jump) * N
        sum_MK, total_M, top_M = _attend(
            sum_MK, total_M, top_M, q_MK, position_M, last, k, v, table, start, block_stride, token_stride, scale,
            size, num_sinks, T, K, N, True, WINDOW,
        )  # fmt: skip
    blind_M = total_M == 0.0
    total_M = tl.where(blind_M, 1.0, total_M)
    out_MK = sum_MK / total_M[:, None]
    at = flat[:, None] * K + column
    if SPLIT:
        tl.store(part + at, out_MK, mask=live[:, None])
        tl.store(lse + flat, tl.where(blind_M, LOWEST, top_M + tl.math.log2(total_M)), mask=live)
    else:
        tl.store(out + at, out_MK.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["num_splits", "num_rows"])
def _merge_kernel(part, lse, out, num_splits, num_rows, K: tl.constexpr, SPLITS: tl.constexpr):
    row, split = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    lse_S = tl.load(lse + split * num_rows + row, mask=split < num_splits, other=LOWEST)
    filled = lse_S > LOWEST
    weight_S = tl.where(filled, tl.math.exp2(lse_S - tl.max(lse_S, 0)), 0.0)
    total = tl.sum(weight_S, 0)
    at = (split * num_rows + row)[:, None] * K + tl.arange(0, K)[None, :]
    part_SK = tl.load(part + at, mask=filled[:, None], other=0.0)
    out_K = tl.sum(part_SK * weight_S[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * K + tl.arange(0, K), out_K.to(out.dtype.element_ty))


# -- the function -----------------------------------------------------------------------------------------------------


class Tiling(NamedTuple):
    rows: int
    keys: int
    num_warps: int
    num_stages: int


def tiling(num_rows: int, head_dim: int, is_wide: bool) -> Tiling:
    """`is_wide`: four-byte elements."""
    rows = max(16, min(128, triton.next_power_of_2(num_rows)))
    if is_wide:
        return Tiling(min(rows, 32), 32, 4, 2)
    keys = 128 if rows == 16 and head_dim <= 64 else 64
    return Tiling(rows, keys, 8, 5) if rows == 128 else Tiling(rows, keys, 4, 3)


def num_parts(num_programs: int, most_tokens: int, num_processors: int) -> int:
    """Number of splits of a sequence, one program each."""
    wanted = num_processors * PROGRAMS_PER_PROCESSOR // num_programs
    return max(1, min(wanted, most_tokens // LEAST_PART_TOKENS, MOST_PARTS))


def paged_attention_cuda(
    q_BQHK: Tensor,
    k_PTGK: Tensor,
    v_PTGK: Tensor,
    table_BS: Tensor,
    position_BQ: Tensor,
    window: tuple[int, int] | None = None,
    parts: int | None = None,
) -> Tensor:
    """(B, Q, H, K). `parts`: number of splits, instead of the default for these shapes."""
    num_batch, num_queries, num_heads, head_dim = q_BQHK.shape
    _, block_tokens, num_kv_heads, _ = k_PTGK.shape
    repeats = num_heads // num_kv_heads
    if q_BQHK.stride(3) != 1 or q_BQHK.stride(2) != head_dim:
        q_BQHK = q_BQHK.contiguous()
    if table_BS.stride(1) != 1:
        table_BS = table_BS.contiguous()
    out_BQHK = q_BQHK.new_empty(q_BQHK.shape)
    if out_BQHK.numel() == 0:
        return out_BQHK
    tile = tiling(num_queries * repeats, head_dim, q_BQHK.element_size() == torch.float32.itemsize)
    num_tiles = triton.cdiv(num_queries * repeats, tile.rows)
    most_tokens = table_BS.shape[1] * block_tokens
    parts = parts or num_parts(num_batch * num_kv_heads * num_tiles, most_tokens, _num_processors(q_BQHK.device))
    num_rows, is_split = num_batch * num_queries * num_heads, parts > 1
    part = out_BQHK.new_empty((parts, num_rows, head_dim) if is_split else 0, dtype=torch.float32)
    lse = out_BQHK.new_empty((parts, num_rows) if is_split else 0, dtype=torch.float32)
    size, num_sinks = window or (0, 0)
    _paged_kernel[(num_tiles * parts, num_kv_heads, num_batch)](
        *(q_BQHK, k_PTGK, v_PTGK, table_BS, position_BQ.contiguous(), out_BQHK, part, lse),
        *(num_queries, parts, *q_BQHK.stride()[:2], *k_PTGK.stride()[:3], table_BS.stride(0)),
        *(head_dim**-0.5 * LOG2_E, size, num_sinks),
        *(num_heads, repeats, head_dim, block_tokens, tile.rows, tile.keys),
        *(tile.rows >= 64 and window is None, window is not None, is_split),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if is_split:
        _merge_kernel[(num_rows,)](
            part, lse, out_BQHK, parts, num_rows, head_dim, triton.next_power_of_2(parts), num_warps=2
        )
    return out_BQHK


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
