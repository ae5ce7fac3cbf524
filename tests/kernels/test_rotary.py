"""The native rotation equals the plain one and turns back exactly in the backward pass."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2forge.kernels import arithmetic as native
from m2forge.kernels.pointwise import Norm, rms_norm, rotate, rotate_into_cache, rotate_plain

SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 4), st.integers(1, 9), st.integers(0, 9))
"""Tokens, heads, rotating pairs, dimensions at rest."""


@given(shape=SHAPES, seed=st.integers(0, 99))
def test_rotation_equals_its_plain_twin(shape: tuple[int, int, int, int], seed: int) -> None:
    num_tokens, heads, half, rest = shape
    generator = torch.Generator().manual_seed(seed)
    dim = 2 * half + rest
    joint = torch.randn(num_tokens, heads * dim + 3, generator=generator)
    grad = torch.randn(num_tokens, heads, dim, generator=generator)
    angle = torch.randn(num_tokens, half, generator=generator) * 10
    results = []
    for function in (rotate, rotate_plain):
        leaf = joint.clone().requires_grad_()
        out = function(leaf[:, 3:].unflatten(-1, (heads, dim)), angle.cos(), angle.sin())
        out.backward(grad)
        results.append((out.detach(), leaf.grad))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain)


@given(shape=SHAPES, seed=st.integers(0, 99))
def test_rotation_in_bfloat16_is_rounded_once(shape: tuple[int, int, int, int], seed: int) -> None:
    num_tokens, heads, half, rest = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, heads, 2 * half + rest, generator=generator).bfloat16()
    angle = torch.randn(num_tokens, half, generator=generator) * 10
    exact = rotate_plain(x.double(), angle.cos().double(), angle.sin().double())
    out = rotate(x, angle.cos(), angle.sin()).double()
    # 2^-9 of the number is half a unit of bfloat16; float32's error is of the terms, which may cancel.
    assert ((out - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()


def test_bfloat16_is_rotated_in_float32() -> None:
    x, angle = torch.randn(5, 2, 8).bfloat16(), torch.randn(5, 2)
    exact = rotate_plain(x.double(), angle.double().cos(), angle.double().sin())
    rotated = rotate(x, angle.cos(), angle.sin())
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, exact.bfloat16())


@pytest.mark.skipif(native.library() is None, reason="no C compiler here")
@given(
    shape=SHAPES, num_repeats=st.integers(1, 3), kind=st.sampled_from(["none", "head", "flat"]), seed=st.integers(0, 99)
)
def test_the_way_into_the_cache_equals_its_parts(
    shape: tuple[int, int, int, int], num_repeats: int, kind: str, seed: int
) -> None:
    num_tokens, num_kv_heads, half, rest = shape
    dim, num_heads = 2 * half + rest, num_kv_heads * num_repeats
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * dim, generator=generator).bfloat16()
    angle = torch.randn(num_tokens, half, generator=generator)
    q, k, v = qkv.split((num_heads * dim, num_kv_heads * dim, num_kv_heads * dim), -1)
    norms: tuple[Norm, ...] = ()
    if kind != "none":
        sizes = (dim, dim) if kind == "head" else (q.shape[1], k.shape[1])
        q_norm, k_norm = norms = tuple(Norm(torch.rand(size, generator=generator).bfloat16(), 1e-5) for size in sizes)
        groups = (num_heads, num_kv_heads) if kind == "head" else (1, 1)
        q, k = (
            rms_norm(x.unflatten(1, (num, -1)), *norm).flatten(1)
            for x, num, norm in ((q, groups[0], q_norm), (k, groups[1], k_norm))
        )
    cache_k, cache_v = torch.zeros(2, 9, 5, num_kv_heads, dim).bfloat16()
    slot = torch.randperm(45, generator=generator)[:num_tokens]
    turned = rotate_into_cache(qkv, cache_k, cache_v, slot, (angle.cos(), angle.sin()), *norms)
    assert torch.equal(turned, rotate(q.unflatten(1, (num_heads, dim)), angle.cos(), angle.sin()))
    expected_k, expected_v = torch.zeros(2, 45, num_kv_heads, dim).bfloat16()
    expected_k[slot] = rotate(k.unflatten(1, (num_kv_heads, dim)), angle.cos(), angle.sin())
    expected_v[slot] = v.unflatten(1, (num_kv_heads, dim))
    assert torch.equal(cache_k.flatten(0, 1), expected_k)
    assert torch.equal(cache_v.flatten(0, 1), expected_v)
