"""The native gate equals the plain one."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from m2forge.kernels.pointwise import gated, gated_plain


@given(num_rows=st.integers(1, 40), width=st.integers(1, 300), scale=st.integers(-8, 8), seed=st.integers(0, 99))
def test_gate_equals_its_plain_twin(num_rows: int, width: int, scale: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    h = (torch.randn(num_rows, 2 * width, generator=generator) * 2.0**scale).bfloat16()
    expected = gated_plain(h.double())
    # Rounded to bfloat16 once, from float32.
    assert ((gated(h).double() - expected).abs() <= 2.0**-8 * expected.abs() + 1e-30).all()


def test_gradients_flow_in_bfloat16() -> None:
    h = torch.randn(3, 8).bfloat16().requires_grad_()
    gated(h).sum().backward()
    assert h.grad is not None
    assert h.grad.any()
