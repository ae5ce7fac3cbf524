"""Sampling, draft verification and drafting from rows of logits in a decode step on CUDA.

A program handles a row and iterates over its vocabulary in tiles a few times; it reads the logits as stored, and there
is no other pass over a vocabulary. Probabilities are summed in float64. Inverse CDF sampling first finds the tile in
which the cumulative weight exceeds the random number, then the token in it; a token without weight is never sampled.

    greedy     the argmax token, the lowest id of equals; a draft is accepted if it is that token
    sampled    p = softmax(x / temperature); rollout/speculation/verify.py defines acceptance and replacement of drafts

The references are `judged_greedy`, `judged` and `drafted` there. The layouts of integers and reals are those of
rollout/execution/decode.py, that of course of decode_rows_triton.py.

Shapes: B sequences, J rows of each, V vocabulary, S slots, K drafts of a slot.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from m2forge.kernels.decode_rows_triton import NUM_COURSE

TILE = 8192
MAX_WARPS = 16
LEAST = tl.constexpr(1.1754943508222875e-38)
"""The lowest temperature: the smallest normal float32, whose inverse is finite."""


class Judged(NamedTuple):
    token_BJ: Tensor
    stands_BJ: Tensor
    """Non-zero where the draft after the row is accepted."""
    logprob_BJ: Tensor
    raw_logprob_BJ: Tensor


# -- pieces of a program ----------------------------------------------------------------------------------------------


@triton.jit
def _top(x, V: tl.constexpr, BLOCK: tl.constexpr):
    """(maximum, its first index); the index is in range even for NaN logits."""
    lane = tl.arange(0, BLOCK)
    top_V, at_V = tl.full((BLOCK,), -float("inf"), tl.float32), lane
    for first in range(0, V, BLOCK):
        value_V = tl.load(x + first + lane, mask=first + lane < V, other=-float("inf")).to(tl.float32)
        higher = value_V > top_V
        top_V = tl.where(higher, value_V, top_V)
        at_V = tl.where(higher, first + lane, at_V)
    top = tl.max(top_V, 0)
    at = tl.min(tl.where(top_V == top, at_V, V - 1), 0)
    return top, tl.minimum(at, V - 1)


@triton.jit
def _log_totals(x, top, temperature, V: tl.constexpr, BLOCK: tl.constexpr):
    """log Σ exp(x − top), and the same with differences divided by the temperature."""
    lane = tl.arange(0, BLOCK)
    raw_V, warm_V = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, V, BLOCK):
        value_V = tl.load(x + first + lane, mask=first + lane < V, other=-float("inf")).to(tl.float32) - top
        raw_V += tl.exp(value_V)
        warm_V += tl.exp(value_V / temperature)
    return tl.log(tl.sum(raw_V, 0)), tl.log(tl.sum(warm_V, 0))


@triton.jit
def _weights(x, logq, first, top, temperature, total, is_left, V: tl.constexpr, BLOCK: tl.constexpr):
    """(p, max(p − q, 0)) of a tile, in float64; without q the second is p."""
    token = first + tl.arange(0, BLOCK)
    value_V = tl.load(x + token, mask=token < V, other=-float("inf")).to(tl.float32) - top
    p_V = tl.exp(value_V / temperature - total)
    q_V = tl.exp(tl.load(logq + token, mask=(token < V) & is_left, other=-float("inf")).to(tl.float32))
    left_V = p_V - q_V
    # NaN gives 0.
    return p_V.to(tl.float64), tl.where(left_V > 0.0, left_V, 0.0).to(tl.float64)


@triton.jit
def _pick(
    x, logq, number, top, temperature, total, is_left,
    V: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """The token that the random number selects from max(p − q, 0), or from p where `is_left` is false or that is 0
    everywhere."""
    tile, lane = tl.arange(0, TILES), tl.arange(0, BLOCK)
    p_T, left_T = tl.zeros((TILES,), tl.float64), tl.zeros((TILES,), tl.float64)
    for index in range((V + BLOCK - 1) // BLOCK):
        p_V, left_V = _weights(x, logq, index * BLOCK, top, temperature, total, is_left, V, BLOCK)
        p_T = tl.where(tile == index, tl.sum(p_V, 0), p_T)
        if LEFT:
            left_T = tl.where(tile == index, tl.sum(left_V, 0), left_T)
    takes_left = False
    if LEFT:
        takes_left = is_left & (tl.sum(left_T, 0) > 0.0)
        p_T = tl.where(takes_left, left_T, p_T)
    threshold = number * tl.sum(p_T, 0)
    until_T = tl.sum(tl.where(tile[None, :] <= tile[:, None], p_T[None, :], 0.0), 1)
    index = tl.minimum(tl.sum((until_T <= threshold).to(tl.int32), 0), (V - 1) // BLOCK)
    threshold -= tl.sum(tl.where(tile < index, p_T, 0.0), 0)
    p_V, left_V = _weights(x, logq, index * BLOCK, top, temperature, total, is_left, V, BLOCK)
    if LEFT:
        p_V = tl.where(takes_left, left_V, p_V)
    has_weight = p_V > 0.0
    exceeds = (tl.cumsum(p_V, 0) > threshold) & has_weight
    token = tl.min(tl.where(exceeds, lane, BLOCK), 0)
    # Sums in another order may differ in the last digit.
    token = tl.where(token < BLOCK, token, tl.max(tl.where(has_weight, lane, 0), 0))
    return tl.minimum(index * BLOCK + token, V - 1)


# -- kernels ----------------------------------------------------------------------------------------------------------


# These values change with the load: do not recompile for them.
@triton.jit(do_not_specialize=["width", "J"])
def _judge_greedy_kernel(
    logits, integers, token, stands, logprob, raw_logprob, width, J,
    FIELDS: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    top, at = _top(logits, V, BLOCK)
    lane = tl.arange(0, BLOCK)
    sum_V = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, V, BLOCK):
        value_V = tl.load(logits + first + lane, mask=first + lane < V, other=-float("inf")).to(tl.float32)
        sum_V += tl.exp(value_V - top)
    has_draft = row % J < J - 1
    draft = tl.load(integers + row // J * width + FIELDS + row % J, mask=has_draft, other=-1)
    tl.store(token + row, at.to(tl.int64))
    tl.store(stands + row, (has_draft & (at.to(tl.int64) == draft)).to(tl.int32))
    tl.store(logprob + row, 0.0)
    tl.store(raw_logprob + row, -tl.log(tl.sum(sum_V, 0)))


@triton.jit(do_not_specialize=["width", "real_width", "num_uniforms", "J"])
def _judge_kernel(
    logits, integers, reals, logq, token, stands, logprob, raw_logprob, width, real_width, num_uniforms, J,
    FIELDS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    LEFT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    j = row % J
    logits += row * V
    integers += row // J * width
    reals += row // J * real_width
    ahead = tl.load(integers + 1) - tl.load(integers + 6) + j
    at = tl.minimum(ahead, num_uniforms - 1)
    number, verdict = tl.load(reals + 1 + at), tl.load(reals + 1 + num_uniforms + at)
    warmth = tl.load(reals).to(tl.float32)
    temperature = tl.maximum(warmth, LEAST)
    has_draft = j < J - 1
    is_left = has_draft & (j < tl.load(integers + 2)) & (tl.load(integers + 5) == 0) & (warmth > 0.0)
    draft = tl.load(integers + FIELDS + j, mask=has_draft, other=0)
    top, _ = _top(logits, V, BLOCK)
    raw_total, total = _log_totals(logits, top, temperature, V, BLOCK)
    logq += (tl.load(integers + 4) * K + tl.where(has_draft, j, 0)) * V
    drawn = _pick(logits, logq, number, top, temperature, total, is_left, V, BLOCK, TILES, LEFT).to(tl.int64)
    value = tl.load(logits + draft).to(tl.float32) - top
    p = tl.exp(value / temperature - total).to(tl.float64)
    q = tl.exp(tl.load(logq + draft, mask=is_left, other=0.0).to(tl.float32)).to(tl.float64)
    stood = has_draft & tl.where(is_left, verdict * q < p, drawn == draft)
    drawn = tl.where(stood, draft, drawn)
    value = tl.load(logits + drawn).to(tl.float32) - top
    tl.store(token + row, drawn)
    tl.store(stands + row, stood.to(tl.int32))
    tl.store(logprob + row, value / temperature - total)
    tl.store(raw_logprob + row, value - raw_total)


@triton.jit(do_not_specialize=["width", "real_width", "num_uniforms", "module", "J", "depth"])
def _draft_kernel(
    logits, integers, reals, course, logq, out, width, real_width, num_uniforms, module, J, depth,
    FIELDS: tl.constexpr, COURSE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    logits += batch * V
    integers += batch * width
    course += batch * (COURSE + 1 + J + depth)
    top, at = _top(logits, V, BLOCK)
    drawn = at.to(tl.int64)
    if not GREEDY:
        reals += batch * real_width
        ahead = tl.load(course) - tl.load(integers + 6) + tl.load(course + 2) + module
        number = tl.load(reals + 1 + 2 * num_uniforms + tl.minimum(ahead, num_uniforms + depth - 1))
        warmth = tl.load(reals).to(tl.float32)
        temperature = tl.maximum(warmth, LEAST)
        _, total = _log_totals(logits, top, temperature, V, BLOCK)
        picked = _pick(logits, logits, number, top, temperature, total, False, V, BLOCK, TILES, False).to(tl.int64)
        drawn = tl.where((tl.load(integers + 5) == 0) & (warmth > 0.0), picked, drawn)
        logq += (tl.load(integers + 4) * K + module) * V
        for first in range(0, V, BLOCK):
            token = first + tl.arange(0, BLOCK)
            value_V = tl.load(logits + token, mask=token < V, other=0.0).to(tl.float32) - top
            tl.store(logq + token, value_V / temperature - total, mask=token < V)
    tl.store(course + COURSE + 1 + J + module, drawn)
    tl.store(integers + FIELDS + module, drawn)
    tl.store(out + batch * (3 * J + 2 + depth) + J + 2 + module, drawn.to(tl.float64))


# -- functions --------------------------------------------------------------------------------------------------------


def judge_greedy(logits_NV: Tensor, integers: Tensor, num_rows: int, num_fields: int) -> Judged:
    judged, (block, _, num_warps) = _blank(logits_NV, num_rows), _tiling(logits_NV.shape[1])
    _judge_greedy_kernel[(logits_NV.shape[0],)](
        *(logits_NV, integers, *judged, integers.shape[1], num_rows, num_fields, logits_NV.shape[1], block),
        num_warps=num_warps,
    )
    return judged


def judge(
    logits_NV: Tensor,
    integers: Tensor,
    reals: Tensor,
    logq_SKV: Tensor,
    num_rows: int,
    num_fields: int,
    num_uniforms: int,
) -> Judged:
    """`num_uniforms`: random numbers per sequence for tokens, and as many for verdicts."""
    judged, (block, tiles, num_warps) = _blank(logits_NV, num_rows), _tiling(logits_NV.shape[1])
    _judge_kernel[(logits_NV.shape[0],)](
        *(logits_NV, integers, reals, logq_SKV, *judged, integers.shape[1], reals.shape[1], num_uniforms),
        *(num_rows, num_fields, logq_SKV.shape[1], logits_NV.shape[1], block, tiles, num_rows > 1),
        num_warps=num_warps,
    )
    return judged


def draft(
    module: int,
    logits_BV: Tensor,
    integers: Tensor,
    reals: Tensor,
    course: Tensor,
    logq_SKV: Tensor,
    out: Tensor,
    num_rows: int,
    num_fields: int,
    num_uniforms: int,
    depth: int,
    is_greedy: bool,
) -> None:
    """Sample the draft of a module and write it to `course`, `integers` and `out`; unless greedy, write the
    log-probabilities it was sampled from to `logq_SKV`."""
    block, tiles, num_warps = _tiling(logits_BV.shape[1])
    _draft_kernel[(logits_BV.shape[0],)](
        *(logits_BV, integers, reals, course, logq_SKV, out, integers.shape[1], reals.shape[1], num_uniforms),
        *(module, num_rows, depth, num_fields, NUM_COURSE, logq_SKV.shape[1], logits_BV.shape[1], block, tiles),
        is_greedy,
        num_warps=num_warps,
    )


def _blank(logits_NV: Tensor, num_rows: int) -> Judged:
    shape = (logits_NV.shape[0] // num_rows, num_rows)
    kinds = (torch.int64, torch.int32, torch.float32, torch.float32)
    return Judged(*(torch.empty(shape, dtype=kind, device=logits_NV.device) for kind in kinds))


def _tiling(vocab_size: int) -> tuple[int, int, int]:
    """(tokens per tile, number of tiles rounded up to a power of two, warps)."""
    block = min(TILE, triton.next_power_of_2(vocab_size))
    tiles = max(2, triton.next_power_of_2(triton.cdiv(vocab_size, block)))
    return block, tiles, max(1, min(MAX_WARPS, block // 512))
