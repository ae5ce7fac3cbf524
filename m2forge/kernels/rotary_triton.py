"""QK norm, rotary embedding and KV cache write after the QKV projection, in one CUDA launch, without gradients.

    q, k normed over each head or over all of them, or not at all
    q, k rotated:  (a, b) → (a·cos − b·sin, b·cos + a·sin)   with a, b the two halves of the rotating dimensions
    k, v written to the cache:  cache[slot[n]] = k[n], v[n]

A program handles q, k or v of one token. A token at slot −1 is not written. Results are rounded where the separate
operations round. The references are `norm.rms_norm_plain` and `rotary.rotate_plain`.

Shapes: N tokens, W = (H + 2·G)·K width of the projection, H query heads, G key/value heads, K head dimension, R =
rotating dimensions / 2, P blocks of the cache, T tokens per block.
"""

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

QkNorm = Literal["none", "head", "flat"]


@triton.jit
def _normed(x_HK, weight, at, inside, scale, PER_HEAD: tl.constexpr, kind: tl.constexpr, K: tl.constexpr):
    w = tl.load(weight + (at % K if PER_HEAD else at), mask=inside, other=0.0).to(tl.float32)
    return ((x_HK * scale).to(kind).to(tl.float32) * w).to(kind).to(tl.float32)


@triton.jit
def _rotate(
    x, weight, cos, sin, target, keep, HEADS: tl.constexpr, LANES: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    EPS: tl.constexpr, NORM: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Writes the heads of one token, normed and rotated."""
    head, d = tl.arange(0, LANES)[:, None], tl.arange(0, K)[None, :]
    inside = (head < HEADS) & (d < K)
    at = head * K + d
    # The other half of the pair; dimensions that do not rotate pair with themselves.
    other = head * K + tl.where(d < R, d + R, tl.where(d < 2 * R, d - R, d))
    kind: tl.constexpr = x.dtype.element_ty
    a_HK = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    b_HK = tl.load(x + other, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(a_HK * a_HK, 1)
        mean = square[:, None] / K if PER_HEAD else tl.sum(square, 0) / (HEADS * K)
        scale = tl.rsqrt(mean + EPS)
        a_HK = _normed(a_HK, weight, at, inside, scale, PER_HEAD, kind, K)
        b_HK = _normed(b_HK, weight, other, inside, scale, PER_HEAD, kind, K)
    turning = d < 2 * R
    angle = tl.where(turning, d % R, 0)
    cos_K = tl.load(cos + angle, mask=turning, other=1.0)
    sin_K = tl.load(sin + angle, mask=turning, other=0.0)
    turned_HK = a_HK * cos_K + b_HK * tl.where(d < R, -sin_K, sin_K)
    tl.store(target + at, turned_HK.to(target.dtype.element_ty), mask=inside & keep)


@triton.jit
def _copy(x, target, keep, HEADS: tl.constexpr, LANES: tl.constexpr, K: tl.constexpr):
    head, d = tl.arange(0, LANES)[:, None], tl.arange(0, K)[None, :]
    inside = (head < HEADS) & keep
    x_HK = tl.load(x + head * K + d, mask=inside, other=0.0)
    tl.store(target + head * K + d, x_HK.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _prepare_kernel(
    qkv, q_weight, k_weight, cos, sin, slot, q, k_cache, v_cache, qkv_stride, slot_stride,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, R: tl.constexpr, H_LANES: tl.constexpr, G_LANES: tl.constexpr,
    EPS: tl.constexpr, NORM: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    token, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    qkv += token * qkv_stride
    cos += token * R
    sin += token * R
    cache_slot = tl.load(slot + token).to(tl.int64)
    k_cache += cache_slot * slot_stride
    v_cache += cache_slot * slot_stride
    if which == 0:
        _rotate(qkv, q_weight, cos, sin, q + token * (H * K), True, H, H_LANES, K, R, EPS, NORM, PER_HEAD)
    elif which == 1:
        _rotate(qkv + H * K, k_weight, cos, sin, k_cache, cache_slot >= 0, G, G_LANES, K, R, EPS, NORM, PER_HEAD)
    else:
        _copy(qkv + (H + G) * K, v_cache, cache_slot >= 0, G, G_LANES, K)


def rotate_into_cache(
    qkv_NW: Tensor,
    k_PTGK: Tensor,
    v_PTGK: Tensor,
    slot_N: Tensor,
    cos_NR: Tensor,
    sin_NR: Tensor,
    qk_norm: QkNorm,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Returns q (N, H, K); k and v go to the caches, whose layout is contiguous. Head dimensions are powers of two."""
    (num_tokens, width), (_, _, num_kv_heads, head_dim) = qkv_NW.shape, k_PTGK.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    q_NHK = qkv_NW.new_empty(num_tokens, num_heads, head_dim)
    if num_tokens == 0:
        return q_NHK
    lanes = triton.next_power_of_2(num_heads), triton.next_power_of_2(num_kv_heads)
    _prepare_kernel[(num_tokens, 3)](
        *(qkv_NW, qkv_NW if q_weight is None else q_weight, qkv_NW if k_weight is None else k_weight),
        *(cos_NR.contiguous(), sin_NR.contiguous(), slot_N, q_NHK, k_PTGK, v_PTGK),
        *(qkv_NW.stride(0), num_kv_heads * head_dim),
        *(num_heads, num_kv_heads, head_dim, cos_NR.shape[1], *lanes, eps, qk_norm != "none", qk_norm == "head"),
        num_warps=max(1, min(8, lanes[0] * head_dim // 256)),
    )
    return q_NHK
