"""The experts of a mixture layer on CUDA, for few tokens and without gradients: time is that of reading the matrices.

    a[n, k] = weight[n, k] · silu(W1[e] x[n]) * (W3[e] x[n]),   e = expert[n, k]
    out[n] = Σ_k W2[e] a[n, k]

Very few pairs (n, k): each is a product of its own. A program of the first kernel owns columns of one pair's `a`, one
of the second owns columns of the output, and adds up the pairs in their order. Two launches.

More pairs: those of one expert share its matrices. `group` lists them by expert, without a sort; a program owns columns
of one expert's rows, and reads its matrices once for every tile of rows. The rows of a token are added up last. Four
launches.

Every sum has a fixed order, and the grids follow from shapes alone. The twin is `expert.expert_ffn_plain`.

Shapes: N tokens, K experts per token, S = N·K pairs, E experts, D hidden size, F expert width. Within a kernel: M rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tiling(NamedTuple):
    """Of a matrix of an expert: rows of it that one program owns, and how it walks along them."""

    columns: int
    step: int
    num_warps: int
    num_stages: int


SINGLE_PAIRS = 16
"""Up to here each pair is a product of its own: experts rarely meet twice, and grouping costs two launches."""
SINGLE_UP = Tiling(32, 128, 4, 4)
SINGLE_UP_SHORT = Tiling(32, 256, 4, 3)
"""Where there are too few programs to fill the processors."""
SINGLE_DOWN = Tiling(8, 512, 2, 4)
GROUPED_UP = {16: Tiling(32, 128, 4, 4), 32: Tiling(64, 64, 4, 4), 64: Tiling(64, 64, 4, 4)}
GROUPED_DOWN = {16: Tiling(32, 128, 4, 4), 32: Tiling(64, 64, 4, 4), 64: Tiling(64, 64, 4, 4)}
"""By the rows of a tile."""
LEAST_PROGRAMS = 256
SCAN = 256
"""Pairs that are looked at together when they are grouped."""


def serves(x_ND: Tensor, w13_EGD: Tensor, w2_EDF: Tensor) -> bool:
    is_even = x_ND.shape[1] % 64 == 0 and w2_EDF.shape[2] % 64 == 0
    is_packed = x_ND.is_contiguous() and w13_EGD.is_contiguous() and w2_EDF.is_contiguous()
    is_same = x_ND.dtype == w13_EGD.dtype == w2_EDF.dtype
    return is_same and is_even and is_packed and x_ND.dtype in (torch.bfloat16, torch.float16, torch.float32)


# -- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["S"])
def _group_kernel(expert, order, ends, S, SCAN: tl.constexpr):
    """A program per expert: pairs of smaller experts come before its own, which keep their order."""
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
def _rows_of(expert, order, ends, M: tl.constexpr, GROUPED: tl.constexpr):
    """(expert, its first row, the row behind its last): rows are places in `order`, or else pairs."""
    index = tl.program_id(0)
    if GROUPED:
        own, end = index, tl.load(ends + index)
        begin = tl.load(ends + index - 1, mask=index > 0, other=0)
    else:
        own, begin, end = tl.load(expert + index).to(tl.int32), index, index + 1
    return own.to(tl.int64), begin, end


@triton.jit
def _up_kernel(
    x, w13, weight, expert, order, ends, a,
    D: tl.constexpr, F: tl.constexpr, K: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    GROUPED: tl.constexpr,
):  # fmt: skip
    own, begin, end = _rows_of(expert, order, ends, M, GROUPED)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < F
    step = tl.arange(0, STEP)
    w13 += own * (2 * F * D) + tl.minimum(column, F - 1)[:, None] * D + step[None, :]
    for first in range(begin, end, M):
        row = first + tl.arange(0, M)
        live = row < end
        pair = tl.load(order + row, mask=live, other=0) if GROUPED else row
        x_row = x + (pair // K)[:, None] * D + step[None, :]
        gate, up = tl.zeros((M, COLUMNS), tl.float32), tl.zeros((M, COLUMNS), tl.float32)
        for start in range(0, D, STEP):
            x_tile = tl.load(x_row + start, mask=live[:, None], other=0.0)
            w1, w3 = tl.load(w13 + start), tl.load(w13 + F * D + start)
            gate = tl.dot(x_tile, tl.trans(w1), gate, input_precision="ieee")
            up = tl.dot(x_tile, tl.trans(w3), up, input_precision="ieee")
        scale = tl.load(weight + pair, mask=live, other=0.0).to(tl.float32)
        value = gate / (1.0 + tl.exp(-gate)) * up * scale[:, None]
        at = pair[:, None] * F + column[None, :]
        tl.store(a + at, value.to(a.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def _down_kernel(
    a, w2, expert, order, ends, y,
    D: tl.constexpr, F: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    own, begin, end = _rows_of(expert, order, ends, M, True)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, STEP)
    w2 += own * (D * F) + tl.minimum(column, D - 1)[:, None] * F + step[None, :]
    for first in range(begin, end, M):
        row = first + tl.arange(0, M)
        live = row < end
        pair = tl.load(order + row, mask=live, other=0)
        a_row = a + pair[:, None] * F + step[None, :]
        total = tl.zeros((M, COLUMNS), tl.float32)
        for start in range(0, F, STEP):
            a_tile = tl.load(a_row + start, mask=live[:, None], other=0.0)
            total = tl.dot(a_tile, tl.trans(tl.load(w2 + start)), total, input_precision="ieee")
        at = pair[:, None] * D + column[None, :]
        tl.store(y + at, total.to(y.dtype.element_ty), mask=live[:, None] & (column < D)[None, :])


@triton.jit(do_not_specialize=["N", "S"])
def _down_single_kernel(
    a, w2, expert, out, N, S,
    D: tl.constexpr, F: tl.constexpr, K: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Rows are tokens. One loop over all pairs and the width, so that loads run ahead from one expert to the next."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    step, token, lane = tl.arange(0, STEP), tl.arange(0, M), tl.arange(0, PAIRS)
    chosen = tl.load(expert + lane, mask=lane < S, other=0).to(tl.int64)
    w2 += tl.minimum(column, D - 1)[:, None] * F + step[None, :]
    total = tl.zeros((M, COLUMNS), tl.float32)
    for index in range(S * (F // STEP)):
        pair, start = index // (F // STEP), index % (F // STEP) * STEP
        # Not read from memory here: a load that waits for another runs ahead half as far.
        own = tl.sum(tl.where(lane == pair, chosen, 0), 0)
        mine = (token == pair // K)[:, None]
        a_tile = tl.load(a + pair * F + start + tl.zeros((M, 1), tl.int32) + step[None, :], mask=mine, other=0.0)
        total = tl.dot(a_tile, tl.trans(tl.load(w2 + own * (D * F) + start)), total, input_precision="ieee")
    at = token[:, None] * D + column[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(token < N)[:, None] & (column < D)[None, :])


# -- functions --------------------------------------------------------------------------------------------------------


def group(expert_NK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(pairs sorted by expert and in their order within it, cumulative pairs per expert), int32."""
    order_S = torch.empty(expert_NK.numel(), dtype=torch.int32, device=expert_NK.device)
    ends_E = torch.empty(num_experts, dtype=torch.int32, device=expert_NK.device)
    _group_kernel[(num_experts,)](expert_NK.contiguous(), order_S, ends_E, expert_NK.numel(), SCAN, num_warps=4)
    return order_S, ends_E


def expert_ffn_decode(x_ND: Tensor, w13_EGD: Tensor, w2_EDF: Tensor, weight_NK: Tensor, expert_NK: Tensor) -> Tensor:
    """(N, D), of operands that this module `serves`."""
    if x_ND.shape[0] == 0:
        return torch.empty_like(x_ND)
    run = _single if expert_NK.numel() <= SINGLE_PAIRS else _grouped
    return run(x_ND, w13_EGD, w2_EDF, weight_NK.contiguous(), expert_NK.contiguous())


def _single(x_ND: Tensor, w13_EGD: Tensor, w2_EDF: Tensor, weight_NK: Tensor, expert_NK: Tensor) -> Tensor:
    (num_tokens, num_chosen), (_, dim, width) = expert_NK.shape, w2_EDF.shape
    num_pairs = num_tokens * num_chosen
    a_SF, out_ND = x_ND.new_empty(num_pairs, width), torch.empty_like(x_ND)
    is_long = num_pairs * triton.cdiv(width, SINGLE_UP.columns) >= LEAST_PROGRAMS
    up, down = SINGLE_UP if is_long else SINGLE_UP_SHORT, SINGLE_DOWN
    _up_kernel[(num_pairs, triton.cdiv(width, up.columns))](
        *(x_ND, w13_EGD, weight_NK, expert_NK, expert_NK, expert_NK, a_SF),
        *(dim, width, num_chosen, 16, up.columns, _step(dim, up.step), False),
        num_warps=up.num_warps,
        num_stages=up.num_stages,
    )
    rows = max(16, triton.next_power_of_2(num_tokens))
    _down_single_kernel[(triton.cdiv(dim, down.columns),)](
        *(a_SF, w2_EDF, expert_NK, out_ND, num_tokens, num_pairs),
        *(dim, width, num_chosen, rows, down.columns, _step(width, down.step)),
        triton.next_power_of_2(num_pairs),
        num_warps=down.num_warps,
        num_stages=down.num_stages,
    )
    return out_ND


def _grouped(x_ND: Tensor, w13_EGD: Tensor, w2_EDF: Tensor, weight_NK: Tensor, expert_NK: Tensor) -> Tensor:
    (num_tokens, num_chosen), (num_experts, dim, width) = expert_NK.shape, w2_EDF.shape
    num_pairs = num_tokens * num_chosen
    order_S, ends_E = group(expert_NK, num_experts)
    a_SF, y_SD = x_ND.new_empty(num_pairs, width), x_ND.new_empty(num_pairs, dim)
    rows = _rows_per_tile(num_pairs, num_experts, x_ND)
    up, down = GROUPED_UP[rows], GROUPED_DOWN[rows]
    _up_kernel[(num_experts, triton.cdiv(width, up.columns))](
        *(x_ND, w13_EGD, weight_NK, expert_NK, order_S, ends_E, a_SF),
        *(dim, width, num_chosen, rows, up.columns, _step(dim, up.step), True),
        num_warps=up.num_warps,
        num_stages=up.num_stages,
    )
    _down_kernel[(num_experts, triton.cdiv(dim, down.columns))](
        *(a_SF, w2_EDF, expert_NK, order_S, ends_E, y_SD),
        *(dim, width, rows, down.columns, _step(width, down.step)),
        num_warps=down.num_warps,
        num_stages=down.num_stages,
    )
    return y_SD.view(num_tokens, num_chosen, dim).sum(1)


def _rows_per_tile(num_pairs: int, num_experts: int, x_ND: Tensor) -> int:
    """Room for twice an expert's mean share: beyond it the matrices are read again."""
    most = 16 if x_ND.dtype == torch.float32 else 64
    twice: int = triton.next_power_of_2(2 * num_pairs // num_experts)
    return max(16, min(most, twice))


def _step(length: int, most: int) -> int:
    """The longest power of two that divides the length, up to `most`."""
    return min(most, length & -length)
