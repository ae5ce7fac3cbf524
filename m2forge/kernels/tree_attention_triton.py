"""Attention over token trees on CUDA, in half precision.

    out[n] = Σ_{m ≤ n < exit[m]} softmax_m( q[n]·k[m] / √K ) v[m]

A schedule (tree_schedule.py) lists which query tiles attend to which key tiles, and where the per-token mask is needed.

    forward    a program per query tile and head iterates over the key tiles it sees, as in FlashAttention
    backward   dq the same way; dk and dv a program per schedule item and head, accumulated in float32

The reference is `tree_attention_plain`.

Shapes: N tokens, P tokens with the last tile padded, H query heads, G key/value heads, K head dimension. Within a
kernel: M queries and N keys of a tile.
"""

from dataclasses import fields
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from m2forge.kernels.tree_schedule import TILE, Schedule

LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-1.0e30)
"""Replaces minus infinity where differences of it are taken."""


# -- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _attend(sum_MK, total_M, top_M, q_MK, k_NK, v_NK, scale, keep_MN, MASKED: tl.constexpr):
    """One key tile: updates the running sum of values, sum of weights, and highest score, in powers of two."""
    score_MN = tl.dot(q_MK, tl.trans(k_NK))
    if MASKED:
        score_MN = tl.where(keep_MN, score_MN * scale, LOWEST)
        higher_M = tl.maximum(top_M, tl.max(score_MN, 1))
        # A row without a visible key so far has its top at LOWEST, where exp2 of the difference is 1.
        weight_MN = tl.where(keep_MN, tl.math.exp2(score_MN - higher_M[:, None]), 0.0)
    else:
        higher_M = tl.maximum(top_M, tl.max(score_MN, 1) * scale)
        weight_MN = tl.math.exp2(score_MN * scale - higher_M[:, None])
    shrink_M = tl.math.exp2(top_M - higher_M)
    sum_MK = tl.dot(weight_MN.to(v_NK.dtype), v_NK, sum_MK * shrink_M[:, None])
    return sum_MK, total_M * shrink_M + tl.sum(weight_MN, 1), higher_M


@triton.jit
def _forward_kernel(
    q, k, v, out, lse, exit_N, order, full_start, full_tile, part_start, part_tile, N, P, scale,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tile, head = tl.load(order + program // H), program % H
    row = tile * TILE + tl.arange(0, TILE)
    column = head // GROUP * K
    q_MK = q.load([tile * TILE, head * K])
    sum_MK = tl.zeros((TILE, K), tl.float32)
    total_M, top_M = tl.zeros((TILE,), tl.float32), tl.full((TILE,), LOWEST, tl.float32)
    for index in range(tl.load(full_start + tile), tl.load(full_start + tile + 1)):
        start = tl.load(full_tile + index) * TILE
        k_NK, v_NK = k.load([start, column]), v.load([start, column])
        sum_MK, total_M, top_M = _attend(sum_MK, total_M, top_M, q_MK, k_NK, v_NK, scale, True, False)
    for index in range(tl.load(part_start + tile), tl.load(part_start + tile + 1)):
        start = tl.load(part_tile + index) * TILE
        k_NK, v_NK = k.load([start, column]), v.load([start, column])
        key = start + tl.arange(0, TILE)
        seen_until = tl.load(exit_N + key, mask=key < N, other=0)
        keep_MN = (key[None, :] <= row[:, None]) & (row[:, None] < seen_until[None, :])
        sum_MK, total_M, top_M = _attend(sum_MK, total_M, top_M, q_MK, k_NK, v_NK, scale, keep_MN, True)
    # Padding rows behind the last token attend to nothing.
    total_M = tl.where(total_M == 0.0, 1.0, total_M)
    out.store([tile * TILE, head * K], (sum_MK / total_M[:, None]).to(out.dtype))
    tl.store(lse + head * P + row, top_M + tl.math.log2(total_M))


@triton.jit
def _delta_kernel(
    out, grad, delta, N, P, out_stride, grad_stride, H: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """delta = Σ_K out · grad, which the softmax's backward subtracts from every gradient of a row."""
    row, head = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1)
    column = head * K + tl.arange(0, K)[None, :]
    inside, at = (row < N)[:, None], row[:, None].to(tl.int64)
    out_MK = tl.load(out + at * out_stride + column, mask=inside, other=0.0).to(tl.float32)
    grad_MK = tl.load(grad + at * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta + head * P + row, tl.sum(out_MK * grad_MK, 1))


@triton.jit
def _query_step(dq_MK, q_MK, k_NK, v_NK, grad_MK, lse_M, delta_M, scale, keep_MN, MASKED: tl.constexpr):
    weight_MN = tl.math.exp2(tl.dot(q_MK, tl.trans(k_NK)) * scale - lse_M[:, None])
    if MASKED:
        weight_MN = tl.where(keep_MN, weight_MN, 0.0)
    change_MN = weight_MN * (tl.dot(grad_MK, tl.trans(v_NK)) - delta_M[:, None])
    return tl.dot(change_MN.to(k_NK.dtype), k_NK, dq_MK)


@triton.jit
def _query_kernel(
    q, k, v, grad, lse, delta, dq, exit_N, order, full_start, full_tile, part_start, part_tile, N, P, scale, root,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tile, head = tl.load(order + program // H), program % H
    row = tile * TILE + tl.arange(0, TILE)
    column = head // GROUP * K
    q_MK, grad_MK = q.load([tile * TILE, head * K]), grad.load([tile * TILE, head * K])
    lse_M, delta_M = tl.load(lse + head * P + row), tl.load(delta + head * P + row)
    dq_MK = tl.zeros((TILE, K), tl.float32)
    for index in range(tl.load(full_start + tile), tl.load(full_start + tile + 1)):
        start = tl.load(full_tile + index) * TILE
        k_NK, v_NK = k.load([start, column]), v.load([start, column])
        dq_MK = _query_step(dq_MK, q_MK, k_NK, v_NK, grad_MK, lse_M, delta_M, scale, True, False)
    for index in range(tl.load(part_start + tile), tl.load(part_start + tile + 1)):
        start = tl.load(part_tile + index) * TILE
        k_NK, v_NK = k.load([start, column]), v.load([start, column])
        key = start + tl.arange(0, TILE)
        seen_until = tl.load(exit_N + key, mask=key < N, other=0)
        keep_MN = (key[None, :] <= row[:, None]) & (row[:, None] < seen_until[None, :])
        dq_MK = _query_step(dq_MK, q_MK, k_NK, v_NK, grad_MK, lse_M, delta_M, scale, keep_MN, True)
    dq.store([tile * TILE, head * K], (dq_MK * root).to(dq.dtype))


@triton.jit
def _key_step(
    dk_NK, dv_NK, k_NK, v_NK, q, grad, lse, delta, seen_until, key, tile, column, scale,
    TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    row = tile * TILE + tl.arange(0, TILE)
    q_MK, grad_MK = q.load([tile * TILE, column]), grad.load([tile * TILE, column])
    weight_NM = tl.math.exp2(tl.dot(k_NK, tl.trans(q_MK)) * scale - tl.load(lse + row)[None, :])
    if MASKED:
        keep_NM = (key[:, None] <= row[None, :]) & (row[None, :] < seen_until[:, None])
        weight_NM = tl.where(keep_NM, weight_NM, 0.0)
    dv_NK = tl.dot(weight_NM.to(grad_MK.dtype), grad_MK, dv_NK)
    change_NM = weight_NM * (tl.dot(v_NK, tl.trans(grad_MK)) - tl.load(delta + row)[None, :])
    return tl.dot(change_NM.to(q_MK.dtype), q_MK, dk_NK), dv_NK


@triton.jit
def _key_kernel(
    q, k, v, grad, lse, delta, dk, dv, exit_N, item, N, P, scale, root,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    item += program // H * 5
    head = program % H
    tile, begin, end = tl.load(item), tl.load(item + 1), tl.load(item + 4)
    full_begin, full_end = tl.load(item + 2), tl.load(item + 3)
    column = head // GROUP * K
    key = tile * TILE + tl.arange(0, TILE)
    k_NK, v_NK = k.load([tile * TILE, column]), v.load([tile * TILE, column])
    seen_until = tl.load(exit_N + key, mask=key < N, other=0)
    lse += head * P
    delta += head * P
    dk_NK, dv_NK = tl.zeros((TILE, K), tl.float32), tl.zeros((TILE, K), tl.float32)
    for full in range(full_begin, full_end):
        dk_NK, dv_NK = _key_step(
            dk_NK, dv_NK, k_NK, v_NK, q, grad, lse, delta, seen_until, key, full, head * K, scale, TILE, False
        )
    front = full_begin - begin
    for index in range(front + end - full_end):
        part = tl.where(index < front, begin + index, full_end + index - front)
        dk_NK, dv_NK = _key_step(
            dk_NK, dv_NK, k_NK, v_NK, q, grad, lse, delta, seen_until, key, part, head * K, scale, TILE, True
        )
    at = key[:, None].to(tl.int64) * (H // GROUP * K) + column + tl.arange(0, K)[None, :]
    tl.atomic_add(dk + at, dk_NK * root, mask=(key < N)[:, None], sem="relaxed")
    tl.atomic_add(dv + at, dv_NK, mask=(key < N)[:, None], sem="relaxed")


# -- the operator -----------------------------------------------------------------------------------------------------


def tree_attention_cuda(q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, schedule: Schedule) -> Tensor:
    where = (getattr(schedule, field.name) for field in fields(schedule))
    out_NHK: Tensor = _tree_attention(q_NHK, k_NGK, v_NGK, *where)[0]
    return out_NHK


@torch.library.custom_op("m2forge::tree_attention", mutates_args=())
def _tree_attention(
    q_NHK: Tensor,
    k_NGK: Tensor,
    v_NGK: Tensor,
    exit_N: Tensor,
    order_T: Tensor,
    full_start: Tensor,
    full_tile: Tensor,
    part_start: Tensor,
    part_tile: Tensor,
    item_I5: Tensor,
) -> tuple[Tensor, Tensor]:
    """(out, log2 of the sum of weights, padded to whole tiles of tokens)."""
    q, k, v = (_head_contiguous(x) for x in (q_NHK, k_NGK, v_NGK))
    num_tokens, num_heads, head_dim = q.shape
    num_tiles = order_T.shape[0]
    out_NHK = q.new_empty(q.shape)
    lse_HP = q.new_empty(num_heads, num_tiles * TILE, dtype=torch.float32)
    _forward_kernel[(num_tiles * num_heads,)](
        *(_rows(x) for x in (q, k, v, out_NHK)),
        lse_HP,
        *(exit_N, order_T, full_start, full_tile, part_start, part_tile),
        *(num_tokens, num_tiles * TILE, head_dim**-0.5 * LOG2_E),
        *(num_heads, num_heads // k.shape[1], head_dim, TILE),
        num_warps=4,
        num_stages=3,
    )
    return out_NHK, lse_HP


@_tree_attention.register_fake
def _(
    q_NHK: Tensor,
    k_NGK: Tensor,
    v_NGK: Tensor,
    exit_N: Tensor,
    order_T: Tensor,
    full_start: Tensor,
    full_tile: Tensor,
    part_start: Tensor,
    part_tile: Tensor,
    item_I5: Tensor,
) -> tuple[Tensor, Tensor]:
    lse_HP = q_NHK.new_empty(q_NHK.shape[1], order_T.shape[0] * TILE, dtype=torch.float32)
    return q_NHK.new_empty(q_NHK.shape), lse_HP


@torch.library.custom_op("m2forge::tree_attention_backward", mutates_args=())
def _tree_attention_backward(
    grad_NHK: Tensor,
    q_NHK: Tensor,
    k_NGK: Tensor,
    v_NGK: Tensor,
    out_NHK: Tensor,
    lse_HP: Tensor,
    exit_N: Tensor,
    order_T: Tensor,
    full_start: Tensor,
    full_tile: Tensor,
    part_start: Tensor,
    part_tile: Tensor,
    item_I5: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v = (_head_contiguous(x) for x in (grad_NHK, q_NHK, k_NGK, v_NGK))
    num_tokens, num_heads, head_dim = q.shape
    num_tiles = order_T.shape[0]
    root = head_dim**-0.5
    sizes = (num_tokens, num_tiles * TILE, root * LOG2_E, root)
    shape = (num_heads, num_heads // k.shape[1], head_dim, TILE)
    delta_HP = torch.empty_like(lse_HP)
    strides = (out_NHK.stride(0), grad.stride(0))
    _delta_kernel[(num_tiles, num_heads)](out_NHK, grad, delta_HP, *sizes[:2], *strides, num_heads, head_dim, TILE)
    dq = q.new_empty(q.shape)
    inputs = (*(_rows(x) for x in (q, k, v, grad)), lse_HP, delta_HP)
    where = (exit_N, order_T, full_start, full_tile, part_start, part_tile)
    _query_kernel[(num_tiles * num_heads,)](*inputs, _rows(dq), *where, *sizes, *shape, num_warps=4, num_stages=2)
    dk, dv = (x.new_zeros(x.shape, dtype=torch.float32) for x in (k, v))
    num_stages = 3 if head_dim <= 64 else 2
    _key_kernel[(item_I5.shape[0] * num_heads,)](
        *inputs, dk, dv, exit_N, item_I5, *sizes, *shape, num_warps=4, num_stages=num_stages
    )
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@_tree_attention_backward.register_fake
def _(
    grad_NHK: Tensor,
    q_NHK: Tensor,
    k_NGK: Tensor,
    v_NGK: Tensor,
    out_NHK: Tensor,
    lse_HP: Tensor,
    exit_N: Tensor,
    order_T: Tensor,
    full_start: Tensor,
    full_tile: Tensor,
    part_start: Tensor,
    part_tile: Tensor,
    item_I5: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q_NHK, k_NGK, v_NGK))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_NHK: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = _tree_attention_backward(grad_NHK, *ctx.saved_tensors)
    return *grads, *(None for _ in fields(Schedule))


_tree_attention.register_autograd(_backward, setup_context=_save)


def _head_contiguous(x_NHK: Tensor) -> Tensor:
    """Each token's heads contiguous, with any token stride that a tensor descriptor supports."""
    num_heads, head_dim = x_NHK.shape[1:]
    is_so = x_NHK.stride(2) == 1 and x_NHK.stride(1) == head_dim and x_NHK.stride(0) >= num_heads * head_dim
    is_aligned = x_NHK.data_ptr() % 16 == 0 and x_NHK.stride(0) * x_NHK.element_size() % 16 == 0
    return x_NHK if is_so and is_aligned else x_NHK.contiguous()


def _rows(x_NHK: Tensor) -> TensorDescriptor:
    """Descriptor of one head's tiles; rows after the last token read as 0 and are not written."""
    num_tokens, num_heads, head_dim = x_NHK.shape
    return TensorDescriptor(x_NHK, [num_tokens, num_heads * head_dim], [x_NHK.stride(0), 1], [TILE, head_dim])
