"""The native norm equals the plain one, values and gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2forge.kernels.pointwise import rms_norm, rms_norm_plain


@given(
    rows=st.integers(1, 600),
    dim=st.integers(4, 70),
    offset=st.integers(0, 5),
    heads=st.booleans(),
    seed=st.integers(0, 99),
)
def test_norm_equals_its_plain_twin(rows: int, dim: int, offset: int, heads: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, dim + offset, generator=generator)
    weight = torch.randn(dim, generator=generator)
    grad = torch.randn(rows, dim, generator=generator)

    def run(function: object, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).clone().requires_grad_() for x in (wide, weight)]
        x = leaves[0][:, offset:]
        x = x[:, None] if heads else x
        out = function(x, leaves[1], 1e-6)  # type: ignore[operator]
        out.backward(grad.to(dtype).view(out.shape))
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    exact = run(rms_norm_plain, torch.float64)
    for ours, plain in zip(run(rms_norm, torch.float32), exact, strict=True):
        # float32 sums over up to 600 rows, relative to the largest entry.
        assert (ours.double() - plain).abs().max() <= 1e-5 * plain.abs().max() + 1e-6


def test_bfloat16_and_float64_keep_their_type() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        assert rms_norm(torch.randn(3, 8, dtype=dtype), torch.ones(8, dtype=dtype), 1e-6).dtype == dtype


@given(rows=st.integers(1, 80), dim=st.integers(4, 700), offset=st.integers(0, 5), seed=st.integers(0, 99))
def test_norm_in_bfloat16_is_rounded_once(rows: int, dim: int, offset: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, dim + offset, generator=generator).bfloat16()[:, offset:]
    weight = torch.randn(dim, generator=generator).bfloat16()
    exact = rms_norm_plain(x.double(), weight.double(), 1e-6)
    # Half a unit in the last of 8 bits, which is 2^-8 at most of the number, and float32's own error.
    assert ((rms_norm(x, weight, 1e-6).double() - exact).abs() <= (2.0**-8 + 1e-5) * exact.abs()).all()


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_torch_defaults_do_not_matter(default: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(700, 64, requires_grad=True), torch.randn(128)[::2]
    expected = rms_norm_plain(x, weight, 1e-6)
    torch.set_default_dtype(default)
    try:
        y = rms_norm(x, weight, 1e-6)
        y.sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(y, expected)
