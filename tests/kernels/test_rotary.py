"""The native rotation equals the plain one and turns back exactly in the backward pass."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from m2forge.kernels.rotary import rotate, rotate_plain

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
