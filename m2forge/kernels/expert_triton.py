"""The experts of an MoE layer on CUDA: the whole layer for few tokens; row permutation and activation for many.

**Few tokens**, without gradients, bound by reading the weights:

    a[n, k] = weight[n, k] · silu(W1[e] x[n]) * (W3[e] x[n]),   e = expert[n, k]
    out[n] = Σ_k W2[e] a[n, k]

One token: each pair (n, k) is a separate product. A program of the first kernel computes columns of one pair's `a`, one
of the second computes columns of the output and adds up the pairs in order. Two launches.

Up to `FEW_TOKENS`: tokens of one expert share its matrices. A token never chooses an expert twice, so rows are tokens,
and a program finds its rows without a sort: it computes columns of one expert's rows. The norm that follows sums the
experts' outputs of a token (norm_triton.py). Two launches.

More tokens: `group` lists pairs by expert, without a sort; a program reads an expert's matrices once for every tile of
its rows. Three launches.

Pairs whose expert is E or more are padding: no weights are read and no output is written for them. Every sum has a
fixed order, and grids depend on shapes alone. The reference is `expert.expert_ffn_plain`.

**Many tokens**, with gradients: the pieces around the grouped matrix products of `expert.py`, whose torch branches are
the references. Each kernel reads and writes every row once. One program handles one token, so a token's row is read
once however many experts it goes to.

Shapes: N tokens, K experts per token, S = N·K pairs, E experts, D hidden size, F expert width. Within a kernel: M rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from m2forge.kernels.slow_path import EXPERT_MULTIPLE


class Tiling(NamedTuple):
    """Rows of an expert's matrix that one program computes, and its steps along them."""

    columns: int
    step: int
    num_warps: int
    num_stages: int


FEW_TOKENS = 32
"""Number of tokens up to which a program finds its rows itself."""
FEW_UP = Tiling(64, 64, 4, 4)
FEW_UP_SHORT = Tiling(32, 128, 4, 4)
"""For two tokens, where there would be too few programs."""
FEW_DOWN = Tiling(128, 64, 4, 4)
ROWS = 16
"""The smallest tile that tensor cores take; larger ones are slower and rarely needed by few tokens."""
SINGLE_UP = Tiling(32, 128, 4, 4)
SINGLE_UP_SHORT = Tiling(32, 256, 4, 3)
"""Used where there are too few programs to fill the SMs."""
SINGLE_DOWN = Tiling(8, 512, 2, 4)
GROUPED_UP = {16: Tiling(32, 128, 4, 4), 32: Tiling(64, 64, 4, 4), 64: Tiling(64, 64, 4, 4)}
GROUPED_DOWN = {16: Tiling(32, 128, 4, 4), 32: Tiling(64, 64, 4, 4), 64: Tiling(64, 64, 4, 4)}
"""By the rows of a tile."""
LEAST_PROGRAMS = 256
SCAN = 256
"""Pairs that the grouping kernel scans at once."""


def serves(x_ND: Tensor, w13_EGD: Tensor, w2_EDF: Tensor) -> bool:
    is_even = x_ND.shape[1] % EXPERT_MULTIPLE == 0 and w2_EDF.shape[2] % EXPERT_MULTIPLE == 0
    is_packed = x_ND.is_contiguous() and w13_EGD.is_contiguous() and w2_EDF.is_contiguous()
    is_same = x_ND.dtype == w13_EGD.dtype == w2_EDF.dtype
    return is_same and is_even and is_packed and x_ND.dtype in (torch.bfloat16, torch.float16, torch.float32)


# -- few tokens: kernels ----------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["S"])
def _group_kernel(expert, order, ends, S, SCAN: tl.constexpr):
    """A program per expert: places its pairs after those of lower experts, in their original order."""
    own = tl.program_id(0)
    before = tl.zeros((SCAN,), tl.int32)
    for first in range(0, S, SCAN):
        pair = first + tl.arange(0, SCAN)
        chosen = tl.load(expert + pair, mask=pair < S, other=own + 1)
        before += (chosen < own).to(tl.int32)
    end = tl.sum(before, 0)
    for first in range(0, S, SCAN):
        pair = first + tl.arange(0, SCAN)
        match = tl.load(expert + pair, mask=pair < S, other=own + 1) == own
        count = match.to(tl.int32)
        tl.store(order + end + tl.cumsum(count, 0) - 1, pair, mask=match)
        end += tl.sum(count, 0)
    tl.store(ends + own, end)


@triton.jit
def _up_tile(
    x, w13, weight, a, own, pair, live, column,
    D: tl.constexpr, F: tl.constexpr, K: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Computes columns of `a` for pairs of one expert."""
    step = tl.arange(0, STEP)
    w13 += own * (2 * F * D) + tl.minimum(column, F - 1)[:, None] * D + step[None, :]
    x += (pair // K)[:, None] * D + step[None, :]
    gate, up = tl.zeros((M, COLUMNS), tl.float32), tl.zeros((M, COLUMNS), tl.float32)
    for start in range(0, D, STEP):
        x_tile = tl.load(x + start, mask=live[:, None], other=0.0)
        w1, w3 = tl.load(w13 + start), tl.load(w13 + F * D + start)
        gate = tl.dot(x_tile, tl.trans(w1), gate, input_precision="ieee")
        up = tl.dot(x_tile, tl.trans(w3), up, input_precision="ieee")
    scale = tl.load(weight + pair, mask=live, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up * scale[:, None]
    at = pair[:, None] * F + column[None, :]
    tl.store(a + at, value.to(a.dtype.element_ty), mask=live[:, None] & (column < F)[None, :])


@triton.jit
def _down_tile(
    a, w2, y, own, pair, live, column,
    D: tl.constexpr, F: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    step = tl.arange(0, STEP)
    w2 += own * (D * F) + tl.minimum(column, D - 1)[:, None] * F + step[None, :]
    a += pair[:, None] * F + step[None, :]
    total = tl.zeros((M, COLUMNS), tl.float32)
    for start in range(0, F, STEP):
        a_tile = tl.load(a + start, mask=live[:, None], other=0.0)
        total = tl.dot(a_tile, tl.trans(tl.load(w2 + start)), total, input_precision="ieee")
    at = pair[:, None] * D + column[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=live[:, None] & (column < D)[None, :])


@triton.jit
def _rows_of(ends):
    """(expert, its first row, the row after its last) of this program; rows are indices into `order`."""
    own = tl.program_id(0)
    return own.to(tl.int64), tl.load(ends + own - 1, mask=own > 0, other=0), tl.load(ends + own)


@triton.jit
def _up_kernel(
    x, w13, weight, order, ends, a,
    D: tl.constexpr, F: tl.constexpr, K: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    own, begin, end = _rows_of(ends)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    for first in range(begin, end, M):
        row = first + tl.arange(0, M)
        pair = tl.load(order + row, mask=row < end, other=0)
        _up_tile(x, w13, weight, a, own, pair, row < end, column, D, F, K, M, COLUMNS, STEP)


@triton.jit
def _down_kernel(
    a, w2, order, ends, y,
    D: tl.constexpr, F: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    own, begin, end = _rows_of(ends)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    for first in range(begin, end, M):
        row = first + tl.arange(0, M)
        pair = tl.load(order + row, mask=row < end, other=0)
        _down_tile(a, w2, y, own, pair, row < end, column, D, F, M, COLUMNS, STEP)


@triton.jit
def _meeting(
    expert, N, E: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, CHOICES: tl.constexpr, BY_PAIR: tl.constexpr
):
    """(expert, each token's pair with it, number of earlier tokens that chose it or −1, number of tokens that chose
    it). A program handles one expert or, with BY_PAIR, one pair: then an expert's first pair serves all its tokens and
    its other pairs do nothing."""
    index, token, choice = tl.program_id(0), tl.arange(0, TOKENS), tl.arange(0, CHOICES)
    own = tl.load(expert + index).to(tl.int32) if BY_PAIR else index
    there = (token < N)[:, None] & (choice < K)[None, :]
    chosen = tl.load(expert + token[:, None] * K + choice[None, :], mask=there, other=-1).to(tl.int32)
    # With NaN logits a router may choose an expert twice: any of its indices is in range.
    choice_index = tl.max(tl.where(chosen == own, choice[None, :], -1), 1)
    live = (choice_index >= 0).to(tl.int32)
    pair = token * K + tl.maximum(choice_index, 0)
    rank = tl.sum(tl.where(token[None, :] < token[:, None], live[None, :], 0), 1)
    first = tl.min(tl.where(choice_index >= 0, pair, TOKENS * K), 0)
    serves = (own < E) & (first == index if BY_PAIR else first < TOKENS * K)
    return own.to(tl.int64), pair, tl.where(choice_index >= 0, rank, -1), tl.where(serves, tl.sum(live, 0), 0)


@triton.jit
def _rows_from(pair, rank, first, M: tl.constexpr):
    """(pairs, which rows are used) of a tile that starts at the token of rank `first`, where there are more tokens than
    rows. Otherwise each token has its own row."""
    is_row = rank[None, :] == first + tl.arange(0, M)[:, None]
    return tl.sum(tl.where(is_row, pair[None, :], 0), 1), tl.sum(is_row.to(tl.int32), 1) > 0


@triton.jit(do_not_specialize=["N"])
def _few_up_kernel(
    x, w13, weight, expert, a, N,
    E: tl.constexpr, D: tl.constexpr, F: tl.constexpr, K: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, TOKENS: tl.constexpr, CHOICES: tl.constexpr, BY_PAIR: tl.constexpr,
):  # fmt: skip
    own, pair_T, rank, count = _meeting(expert, N, E, K, TOKENS, CHOICES, BY_PAIR)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if TOKENS == M:
        if count > 0:
            _up_tile(x, w13, weight, a, own, pair_T, rank >= 0, column, D, F, K, M, COLUMNS, STEP)
    else:
        for first in range(0, count, M):
            pair, live = _rows_from(pair_T, rank, first, M)
            _up_tile(x, w13, weight, a, own, pair, live, column, D, F, K, M, COLUMNS, STEP)


@triton.jit(do_not_specialize=["N"])
def _few_down_kernel(
    a, w2, expert, y, N,
    E: tl.constexpr, D: tl.constexpr, F: tl.constexpr, K: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, TOKENS: tl.constexpr, CHOICES: tl.constexpr, BY_PAIR: tl.constexpr,
):  # fmt: skip
    own, pair_T, rank, count = _meeting(expert, N, E, K, TOKENS, CHOICES, BY_PAIR)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if TOKENS == M:
        if count > 0:
            _down_tile(a, w2, y, own, pair_T, rank >= 0, column, D, F, M, COLUMNS, STEP)
    else:
        for first in range(0, count, M):
            pair, live = _rows_from(pair_T, rank, first, M)
            _down_tile(a, w2, y, own, pair, live, column, D, F, M, COLUMNS, STEP)


@triton.jit
def _single_up_kernel(
    x, w13, weight, expert, a,
    E: tl.constexpr, D: tl.constexpr, F: tl.constexpr, K: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) + tl.arange(0, M)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    own = tl.minimum(tl.load(expert + tl.program_id(0)), E - 1)
    _up_tile(x, w13, weight, a, own, pair, tl.arange(0, M) < 1, column, D, F, K, M, COLUMNS, STEP)


@triton.jit(do_not_specialize=["N", "S"])
def _down_single_kernel(
    a, w2, expert, out, N, S,
    E: tl.constexpr, D: tl.constexpr, F: tl.constexpr, K: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rows are tokens. One loop over all pairs and the width, so that loads are prefetched across experts."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    step, token, lane = tl.arange(0, STEP), tl.arange(0, M), tl.arange(0, PAIRS)
    chosen = tl.minimum(tl.load(expert + lane, mask=lane < S, other=0).to(tl.int64), E - 1)
    w2 += tl.minimum(column, D - 1)[:, None] * F + step[None, :]
    total = tl.zeros((M, COLUMNS), tl.float32)
    for index in range(S * (F // STEP)):
        pair, start = index // (F // STEP), index % (F // STEP) * STEP
        # Not loaded from memory here: dependent loads are prefetched half as far.
        own = tl.sum(tl.where(lane == pair, chosen, 0), 0)
        mine = (token == pair // K)[:, None]
        a_tile = tl.load(a + pair * F + start + tl.zeros((M, 1), tl.int32) + step[None, :], mask=mine, other=0.0)
        total = tl.dot(a_tile, tl.trans(tl.load(w2 + own * (D * F) + start)), total, input_precision="ieee")
    at = token[:, None] * D + column[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(token < N)[:, None] & (column < D)[None, :])


# -- few tokens: functions --------------------------------------------------------------------------------------------


def group(expert_NK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(pairs grouped by expert, in their original order within it; cumulative pairs per expert), int32."""
    order_S = torch.empty(expert_NK.numel(), dtype=torch.int32, device=expert_NK.device)
    ends_E = torch.empty(num_experts, dtype=torch.int32, device=expert_NK.device)
    _group_kernel[(num_experts,)](expert_NK.contiguous(), order_S, ends_E, expert_NK.numel(), SCAN, num_warps=4)
    return order_S, ends_E


def expert_ffn_decode(x_ND: Tensor, w13_EGD: Tensor, w2_EDF: Tensor, weight_NK: Tensor, expert_NK: Tensor) -> Tensor:
    """(N, D); the operands must satisfy `serves`."""
    if x_ND.shape[0] == 0:
        return torch.empty_like(x_ND)
    if x_ND.shape[0] == 1:
        return _single(x_ND, w13_EGD, w2_EDF, weight_NK.contiguous(), expert_NK.contiguous())
    return expert_pairs(x_ND, w13_EGD, w2_EDF, weight_NK, expert_NK).sum(1).to(x_ND.dtype)


def expert_pairs(x_ND: Tensor, w13_EGD: Tensor, w2_EDF: Tensor, weight_NK: Tensor, expert_NK: Tensor) -> Tensor:
    """Each expert's output for each token (N, K, D), before the sum."""
    run = _few if x_ND.shape[0] <= FEW_TOKENS else _grouped
    return run(x_ND, w13_EGD, w2_EDF, weight_NK.contiguous(), expert_NK.contiguous())


def _single(x_ND: Tensor, w13_EGD: Tensor, w2_EDF: Tensor, weight_NK: Tensor, expert_NK: Tensor) -> Tensor:
    (num_tokens, num_chosen), (num_experts, dim, width) = expert_NK.shape, w2_EDF.shape
    num_pairs = num_tokens * num_chosen
    a_SF, out_ND = x_ND.new_empty(num_pairs, width), torch.empty_like(x_ND)
    is_long = num_pairs * triton.cdiv(width, SINGLE_UP.columns) >= LEAST_PROGRAMS
    up, down = SINGLE_UP if is_long else SINGLE_UP_SHORT, SINGLE_DOWN
    _single_up_kernel[(num_pairs, triton.cdiv(width, up.columns))](
        *(x_ND, w13_EGD, weight_NK, expert_NK, a_SF),
        *(num_experts, dim, width, num_chosen, 16, up.columns, _step(dim, up.step)),
        num_warps=up.num_warps,
        num_stages=up.num_stages,
    )
    rows = max(16, triton.next_power_of_2(num_tokens))
    _down_single_kernel[(triton.cdiv(dim, down.columns),)](
        *(a_SF, w2_EDF, expert_NK, out_ND, num_tokens, num_pairs),
        *(num_experts, dim, width, num_chosen, rows, down.columns, _step(width, down.step)),
        triton.next_power_of_2(num_pairs),
        num_warps=down.num_warps,
        num_stages=down.num_stages,
    )
    return out_ND


def _few(x_ND: Tensor, w13_EGD: Tensor, w2_EDF: Tensor, weight_NK: Tensor, expert_NK: Tensor) -> Tensor:
    (num_tokens, num_chosen), (num_experts, dim, width) = expert_NK.shape, w2_EDF.shape
    num_pairs = num_tokens * num_chosen
    a_SF, y_NKD = x_ND.new_empty(num_pairs, width), x_ND.new_empty((num_tokens, num_chosen, dim), dtype=torch.float32)
    num_programs, tokens = min(num_pairs, num_experts), max(ROWS, triton.next_power_of_2(num_tokens))
    up, down = FEW_UP if num_tokens > 2 else FEW_UP_SHORT, FEW_DOWN
    sizes = (num_experts, dim, width, num_chosen, ROWS)
    choice = (tokens, triton.next_power_of_2(num_chosen), num_pairs < num_experts)
    _few_up_kernel[(num_programs, triton.cdiv(width, up.columns))](
        *(x_ND, w13_EGD, weight_NK, expert_NK, a_SF, num_tokens, *sizes, up.columns, _step(dim, up.step), *choice),
        num_warps=up.num_warps,
        num_stages=up.num_stages,
    )
    _few_down_kernel[(num_programs, triton.cdiv(dim, down.columns))](
        *(a_SF, w2_EDF, expert_NK, y_NKD, num_tokens, *sizes, down.columns, _step(width, down.step), *choice),
        num_warps=down.num_warps,
        num_stages=down.num_stages,
    )
    return y_NKD


def _grouped(x_ND: Tensor, w13_EGD: Tensor, w2_EDF: Tensor, weight_NK: Tensor, expert_NK: Tensor) -> Tensor:
    (num_tokens, num_chosen), (num_experts, dim, width) = expert_NK.shape, w2_EDF.shape
    num_pairs = num_tokens * num_chosen
    order_S, ends_E = group(expert_NK, num_experts)
    a_SF, y_NKD = x_ND.new_empty(num_pairs, width), x_ND.new_empty(num_tokens, num_chosen, dim)
    rows = _rows_per_tile(num_pairs, num_experts, x_ND)
    up, down = GROUPED_UP[rows], GROUPED_DOWN[rows]
    _up_kernel[(num_experts, triton.cdiv(width, up.columns))](
        *(x_ND, w13_EGD, weight_NK, order_S, ends_E, a_SF),
        *(dim, width, num_chosen, rows, up.columns, _step(dim, up.step)),
        num_warps=up.num_warps,
        num_stages=up.num_stages,
    )
    _down_kernel[(num_experts, triton.cdiv(dim, down.columns))](
        *(a_SF, w2_EDF, order_S, ends_E, y_NKD),
        *(dim, width, rows, down.columns, _step(width, down.step)),
        num_warps=down.num_warps,
        num_stages=down.num_stages,
    )
    return y_NKD


def _rows_per_tile(num_pairs: int, num_experts: int, x_ND: Tensor) -> int:
    """Rows for twice an expert's mean load: with more, the weights are read again."""
    most = 16 if x_ND.dtype == torch.float32 else 64
    twice: int = triton.next_power_of_2(2 * num_pairs // num_experts)
    return max(16, min(most, twice))


def _step(length: int, most: int) -> int:
    """The largest power of two that divides the length, up to `most`."""
    return min(most, length & -length)


# -- many tokens ------------------------------------------------------------------------------------------------------


@triton.jit
def _spread_kernel(x, slot, out, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < D
    row = tl.load(x + token * D + column, mask=mask)
    for k in tl.static_range(K):
        target = tl.load(slot + token * K + k)
        tl.store(out + target * D + column, row, mask=mask & (target >= 0))


def spread(x_ND: Tensor, slot_NK: Tensor, num_rows: int) -> Tensor:
    (num_tokens, dim), num_chosen = x_ND.shape, slot_NK.shape[1]
    out_SD = x_ND.new_empty(num_rows, dim)
    block = triton.next_power_of_2(dim)
    _spread_kernel[(num_tokens,)](x_ND.contiguous(), slot_NK, out_SD, dim, num_chosen, block, num_warps=_warps(block))
    return out_SD


@triton.jit
def _collect_kernel(y, slot, out, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, SUM: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < D
    total = tl.zeros((BLOCK,), SUM)
    for k in tl.static_range(K):
        source = tl.load(slot + token * K + k)
        total += tl.load(y + source * D + column, mask=mask & (source >= 0), other=0.0).to(SUM)
    tl.store(out + token * D + column, total.to(out.dtype.element_ty), mask=mask)


def collect(y_SD: Tensor, slot_NK: Tensor) -> Tensor:
    (num_tokens, num_chosen), dim = slot_NK.shape, y_SD.shape[1]
    out_ND = y_SD.new_empty(num_tokens, dim)
    block = triton.next_power_of_2(dim)
    _collect_kernel[(num_tokens,)](
        y_SD, slot_NK, out_ND, dim, num_chosen, block, _sum_type(y_SD), num_warps=_warps(block)
    )
    return out_ND


@triton.jit
def _activate_kernel(h, weight, out, S, F: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SUM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < S) & (column < F)
    gate = tl.load(h + row * (2 * F) + column, mask=mask, other=0.0).to(SUM)
    up = tl.load(h + row * (2 * F) + F + column, mask=mask, other=0.0).to(SUM)
    scale = tl.load(weight + row, mask=row < S, other=0.0).to(SUM)
    a = gate / (1.0 + tl.exp(-gate)) * up * scale
    tl.store(out + row * F + column, a.to(out.dtype.element_ty), mask=mask)


def activate(h_SG: Tensor, weight_S: Tensor) -> Tensor:
    num_rows, width = h_SG.shape[0], h_SG.shape[1] // 2
    out_SF = h_SG.new_empty(num_rows, width)
    block = min(512, triton.next_power_of_2(width))
    grid = (triton.cdiv(num_rows, 4), triton.cdiv(width, block))
    _activate_kernel[grid](h_SG, weight_S, out_SF, num_rows, width, 4, block, _sum_type(h_SG), num_warps=4)
    return out_SF


@triton.jit
def _activate_backward_kernel(
    grad, h, weight, grad_h, grad_weight, out, S, F: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SUM: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    live = row < S
    scale = tl.load(weight + row, mask=live, other=0.0).to(SUM)
    total = tl.zeros((ROWS,), SUM)
    for start in tl.static_range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        mask = live & (column < F)
        gate = tl.load(h + row * (2 * F) + column, mask=mask, other=0.0).to(SUM)
        up = tl.load(h + row * (2 * F) + F + column, mask=mask, other=0.0).to(SUM)
        g = tl.load(grad + row * F + column, mask=mask, other=0.0).to(SUM)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        silu = gate * sigmoid
        total += tl.sum(g * silu * up, axis=1)
        g = g * scale
        grad_gate = g * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(out + row * F + column, (silu * up * scale).to(out.dtype.element_ty), mask=mask)
        tl.store(grad_h + row * (2 * F) + column, grad_gate.to(grad_h.dtype.element_ty), mask=mask)
        tl.store(grad_h + row * (2 * F) + F + column, (g * silu).to(grad_h.dtype.element_ty), mask=mask)
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(grad_weight + line, total.to(grad_weight.dtype.element_ty), mask=line < S)


def activate_backward(grad_SF: Tensor, h_SG: Tensor, weight_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, width = grad_SF.shape
    grad_h_SG, grad_weight_S, out_SF = torch.empty_like(h_SG), torch.empty_like(weight_S), torch.empty_like(grad_SF)
    block = min(512, triton.next_power_of_2(width))
    _activate_backward_kernel[(triton.cdiv(num_rows, 4),)](
        grad_SF, h_SG, weight_S, grad_h_SG, grad_weight_S, out_SF, num_rows, width, 4, block, _sum_type(h_SG),
        num_warps=4,
    )  # fmt: skip
    return grad_h_SG, grad_weight_S, out_SF


def _sum_type(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))
