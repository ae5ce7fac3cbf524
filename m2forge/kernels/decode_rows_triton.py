"""The rows of a decode step on CUDA: their positions and network inputs, and the update after verification.

Four kernels replace what rollout/execution/decode.py computes between its networks and products. `begin` and
`begin_module` compute every row's position, cache slot, rotary angles and normed input of the first product. `settle`
counts the accepted drafts and writes the step's output and the integer inputs of the next step. Drafting follows
(verdict_triton.py).

    known      per sequence: the previous token, those of all rows, the new drafts
    course     per sequence: its position, the tokens that fit in its blocks, how many tokens of the step count, how
               many modules have run over its last token; then `known`

The layouts of integers, reals and out are those of rollout/execution/decode.py, which is the reference.

Shapes: B sequences, K drafts to verify, J = K + 1 rows, D hidden size, S blocks, W rows of a module, N = B·J or B·W, R
= rotating dimensions / 2, T tokens per block.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from m2forge.kernels.pointwise import Norm

NUM_COURSE = 4
"""Fields of `course` before `known`."""


class Rows(NamedTuple):
    """The rows of one forward pass."""

    position_N: Tensor
    slot_N: Tensor
    cos_NR: Tensor
    sin_NR: Tensor


# -- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _normed(s, weight, column, inside, D: tl.constexpr, EPS: tl.constexpr, kind: tl.constexpr):
    scaled = (s * tl.rsqrt(tl.sum(s * s, 0) / D + EPS)).to(kind).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    return (scaled * w).to(kind)


@triton.jit
def _store_position(
    row, token_position, table, nowhere, frequency, position, slot, cos, sin,
    T: tl.constexpr, R: tl.constexpr, R_LANES: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Stores position, slot, and cos and sin of the rotary angles of one row."""
    seen = tl.maximum(token_position, 0)
    block = tl.load(table + seen // T)
    tl.store(position + row, token_position)
    tl.store(slot + row, tl.where(token_position >= 0, block * T + seen % T, nowhere))
    lane = tl.arange(0, R_LANES)
    angle = token_position.to(tl.float32) * tl.load(frequency + lane, mask=lane < R, other=0.0)
    tl.store(cos + row * R + lane, tl.cos(angle) * FACTOR, mask=lane < R)
    tl.store(sin + row * R + lane, tl.sin(angle) * FACTOR, mask=lane < R)


# These values change with the load: do not recompile for them.
@triton.jit(do_not_specialize=["width", "nowhere", "J"])
def _begin_kernel(
    integers, embedding, weight, frequency, position, slot, cos, sin, x, out, width, nowhere, J,
    FIELDS: tl.constexpr, T: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, R: tl.constexpr,
    R_LANES: tl.constexpr, FACTOR: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    j = row % J
    integers += row // J * width
    start, num_drafts, room = tl.load(integers + 1), tl.load(integers + 2), tl.load(integers + 3)
    token = tl.load(integers + tl.where(j == 0, 0, FIELDS + j - 1))
    token_position = tl.where((j <= num_drafts) & (j < room), start + j, -1)
    table = integers + FIELDS + J - 1
    _store_position(row, token_position, table, nowhere, frequency, position, slot, cos, sin, T, R, R_LANES, FACTOR)
    column = tl.arange(0, LANES)
    inside = column < D
    x_D = tl.load(embedding + token * D + column, mask=inside, other=0.0)
    tl.store(x + row * D + column, x_D, mask=inside)
    out_D = _normed(x_D.to(tl.float32), weight, column, inside, D, EPS, out.dtype.element_ty)
    tl.store(out + row * D + column, out_D, mask=inside)


@triton.jit(do_not_specialize=["width", "nowhere", "module", "J", "KNOWN"])
def _begin_module_kernel(
    integers, course, states, embedding, state_weight, embedding_weight, frequency, position, slot, cos, sin, target,
    joined, width, nowhere, module, J, KNOWN,
    FIELDS: tl.constexpr, COURSE: tl.constexpr, T: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, R: tl.constexpr,
    R_LANES: tl.constexpr, FACTOR: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch = row // (J + 1 + module)
    course += batch * (COURSE + KNOWN)
    start, room, num, num_run = tl.load(course), tl.load(course + 1), tl.load(course + 2), tl.load(course + 3)
    last = num + module
    w = row % (J + 1 + module) + tl.where(module < num_run, tl.minimum(num, module + 1), 0)
    token_position = tl.where((w <= last) & (w < room), start + w, -1)
    # The new drafts follow the last token that counts.
    token = tl.load(course + COURSE + tl.minimum(tl.where(w <= num, w, w - num + J), J + module))
    table = integers + batch * width + FIELDS + J - 1
    _store_position(row, token_position, table, nowhere, frequency, position, slot, cos, sin, T, R, R_LANES, FACTOR)
    tl.store(target + row, tl.where(w == last, batch, -1))
    before = tl.maximum(token_position - 1, 0)
    parent = tl.load(table + before // T) * T + before % T
    column = tl.arange(0, LANES)
    inside = column < D
    kind: tl.constexpr = joined.dtype.element_ty
    state_D = tl.load(states + parent * D + column, mask=inside & (token_position > 0), other=0.0).to(tl.float32)
    embedding_D = tl.load(embedding + token * D + column, mask=inside, other=0.0).to(tl.float32)
    joined += row * (2 * D)
    tl.store(joined + column, _normed(state_D, state_weight, column, inside, D, EPS, kind), mask=inside)
    tl.store(joined + D + column, _normed(embedding_D, embedding_weight, column, inside, D, EPS, kind), mask=inside)


@triton.jit(do_not_specialize=["width", "J", "depth"])
def _settle_kernel(
    integers, token, stands, logprob, raw_logprob, course, out, width, J, depth,
    LANES: tl.constexpr, COURSE: tl.constexpr,
):  # fmt: skip
    batch, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    inside = lane < J
    integers += batch * width
    before, start = tl.load(integers), tl.load(integers + 1)
    num_drafts, room = tl.load(integers + 2), tl.load(integers + 3)
    token_J = tl.load(token + batch * J + lane, mask=inside, other=0)
    # The first rejected draft ends the row; if all are accepted, the index behind them.
    stood = (tl.load(stands + batch * J + lane, mask=inside, other=0) != 0) & (lane < J - 1) & (lane < num_drafts)
    num = 1 + tl.min(tl.where(stood, LANES, lane), 0).to(tl.int64)
    course += batch * (COURSE + 1 + J + depth)
    tl.store(course, start)
    tl.store(course + 1, room)
    tl.store(course + 2, num)
    tl.store(course + 3, tl.load(integers + 7))
    tl.store(course + COURSE, before)
    tl.store(course + COURSE + 1 + lane, token_J, mask=inside)
    room = tl.maximum(room - num, 0)
    tl.store(integers, tl.sum(tl.where(lane == num - 1, token_J, 0), 0))
    tl.store(integers + 1, start + num)
    new_drafts = tl.minimum(tl.maximum(room - 1, 0), depth)
    tl.store(integers + 2, tl.where(num_drafts < 0, -1, new_drafts))
    tl.store(integers + 3, room)
    tl.store(integers + 7, tl.where(num_drafts < 0, 0, new_drafts))
    out += batch * (3 * J + 2 + depth)
    tl.store(out + lane, token_J.to(tl.float64), mask=inside)
    tl.store(out + J, num.to(tl.float64))
    tl.store(out + J + 1, num_drafts.to(tl.float64))
    out += J + 2 + depth
    logprob_J = tl.load(logprob + batch * J + lane, mask=inside, other=0.0)
    raw_logprob_J = tl.load(raw_logprob + batch * J + lane, mask=inside, other=0.0)
    tl.store(out + lane, logprob_J.to(tl.float64), mask=inside)
    tl.store(out + J + lane, raw_logprob_J.to(tl.float64), mask=inside)


# -- functions --------------------------------------------------------------------------------------------------------


def begin(
    integers: Tensor,
    num_rows: int,
    num_fields: int,
    block_tokens: int,
    nowhere: int,
    embedding_VD: Tensor,
    norm: Norm,
    frequency_R: Tensor,
    rotary_factor: float,
) -> tuple[Rows, Tensor, Tensor]:
    """Returns the main model's rows, their embeddings, and the normed embeddings. `nowhere`: the scratch slot of
    padding rows. `rotary_factor`: multiplies cos and sin."""
    num, dim = integers.shape[0] * num_rows, embedding_VD.shape[1]
    rows = _rows(num, frequency_R)
    x_ND, out_ND = embedding_VD.new_empty(num, dim), embedding_VD.new_empty(num, dim)
    lanes = triton.next_power_of_2(dim)
    _begin_kernel[(num,)](
        *(integers, embedding_VD, norm.weight, frequency_R, *rows, x_ND, out_ND, integers.shape[1]),
        *(nowhere, num_rows, num_fields, block_tokens, dim, lanes, frequency_R.shape[0]),
        *(triton.next_power_of_2(frequency_R.shape[0]), rotary_factor, norm.eps),
        num_warps=_num_warps(lanes),
    )
    return rows, x_ND, out_ND


def begin_module(
    module: int,
    integers: Tensor,
    course: Tensor,
    num_rows: int,
    num_fields: int,
    nowhere: int,
    state_PTD: Tensor,
    embedding_VD: Tensor,
    norms: tuple[Norm, Norm],
    frequency_R: Tensor,
    rotary_factor: float,
) -> tuple[Rows, Tensor, Tensor]:
    """Returns a module's rows; for each, the sequence whose last row it is, or −1; and the input of the module's
    projection. `num_rows`: rows per sequence in the main model. `state_PTD`: the cached input states of the module.
    `norms`: of states, and of embeddings."""
    num, (_, block_tokens, dim) = integers.shape[0] * (num_rows + 1 + module), state_PTD.shape
    rows = _rows(num, frequency_R)
    target_N = torch.empty_like(rows.slot_N)
    joined = embedding_VD.new_empty(num, 2 * dim)
    lanes = triton.next_power_of_2(dim)
    _begin_module_kernel[(num,)](
        *(integers, course, state_PTD, embedding_VD, norms[0].weight, norms[1].weight, frequency_R),
        *(*rows, target_N, joined, integers.shape[1], nowhere),
        *(module, num_rows, course.shape[1] - NUM_COURSE, num_fields, NUM_COURSE, block_tokens, dim, lanes),
        *(frequency_R.shape[0], triton.next_power_of_2(frequency_R.shape[0]), rotary_factor, norms[0].eps),
        num_warps=_num_warps(lanes),
    )
    return rows, target_N, joined


def settle(
    integers: Tensor, token_BJ: Tensor, stands_BJ: Tensor, logprob_BJ: Tensor, raw_logprob_BJ: Tensor, depth: int
) -> tuple[Tensor, Tensor]:
    """Returns (course, out), both without the new drafts; `integers` then holds the next step's inputs."""
    num_sequences, num_rows = token_BJ.shape
    course = integers.new_empty(num_sequences, NUM_COURSE + 1 + num_rows + depth)
    out = integers.new_empty((num_sequences, 3 * num_rows + 2 + depth), dtype=torch.float64)
    _settle_kernel[(num_sequences,)](
        *(integers, token_BJ, stands_BJ, logprob_BJ, raw_logprob_BJ, course, out, integers.shape[1]),
        *(num_rows, depth, max(4, triton.next_power_of_2(num_rows)), NUM_COURSE),
        num_warps=1,
    )
    return course, out


def _rows(num: int, frequency_R: Tensor) -> Rows:
    position_N, slot_N = (torch.empty(num, dtype=torch.int64, device=frequency_R.device) for _ in range(2))
    cos_NR, sin_NR = (frequency_R.new_empty(num, frequency_R.shape[0]) for _ in range(2))
    return Rows(position_N, slot_N, cos_NR, sin_NR)


def _num_warps(lanes: int) -> int:
    return max(1, min(8, lanes // 512))
