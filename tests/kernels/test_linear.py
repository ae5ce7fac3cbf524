"""The native product of bfloat16 stays within what rounding to bfloat16 costs anyway, packed or not."""

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m2forge.kernels import arithmetic as native
from m2forge.kernels import linear as module
from m2forge.kernels.linear import KERNELS, linear, native_linear, pack, serves
from m2forge.kernels.pointwise import Norm, gated_plain, rms_norm

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here")


KINDS = [
    kind for kind in range(len(KERNELS)) if native.library() is not None and native.ask("linear_kinds") >> kind & 1
]


@pytest.fixture(autouse=True, params=KINDS, scope="module")
def kernel(request: pytest.FixtureRequest) -> Iterator[int]:
    """Every kernel that this machine can run, whichever is fastest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "fastest_kernel", lambda: request.param)
        yield request.param


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.double(), weight.double())


def wide(x: Tensor, weight: Tensor) -> Tensor:
    """Before it is rounded."""
    return native_linear(x, weight, torch.float32) if serves(x, weight) else F.linear(x.float(), weight.float())


def operands(num_rows: int, num_out: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, width, generator=generator).bfloat16()
    return x, torch.randn(num_out, width, generator=generator).bfloat16()


@given(
    num_rows=st.integers(1, 40),
    num_out=st.integers(1, 70),
    width=st.integers(1, 400),
    x_exponent=st.integers(-60, 60),
    weight_exponent=st.integers(-60, 60),
    seed=st.integers(0, 2**20),
)
def test_product_equals_the_exact_one(
    num_rows: int, num_out: int, width: int, x_exponent: int, weight_exponent: int, seed: int
) -> None:
    x, weight = operands(num_rows, num_out, width, seed)
    x, weight = x * 2.0**x_exponent, weight * 2.0**weight_exponent
    expected, out = exact(x, weight), wide(x, weight)
    assert out.dtype == torch.float32
    # Of each output against its own terms: float16 keeps 11 bits, sums of 24 terms a lane lose two of them, at worst
    # all in one direction.
    size = exact(x.abs(), weight.abs())
    assert ((out - expected).abs() <= 2.0**-8 * size).all()
    narrow = linear(x, weight)
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow, out.bfloat16())
    pack([weight])
    assert torch.equal(wide(x, weight), out)


@given(
    num_rows=st.integers(1, 9),
    half=st.integers(1, 40),
    width=st.integers(1, 100),
    is_packed=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_what_is_joined_to_the_product_equals_its_parts(
    num_rows: int, half: int, width: int, is_packed: bool, seed: int
) -> None:
    x, weight = operands(num_rows, 2 * half, width, seed)
    onto = torch.randn(num_rows, 2 * half, generator=torch.Generator().manual_seed(seed)).bfloat16()
    norm = Norm(torch.rand(width, generator=torch.Generator().manual_seed(seed)).bfloat16(), 1e-5)
    if is_packed:
        pack([weight])
    normed = wide(rms_norm(x, *norm), weight)
    assert torch.equal(native_linear(x, weight, torch.float32, norm), normed)
    # The sum and the gate are rounded once.
    assert torch.equal(native_linear(x, weight, torch.bfloat16, norm, onto), (onto.float() + normed).bfloat16())
    gated = native_linear(x, weight, torch.float32, norm, is_gated=True)
    torch.testing.assert_close(gated, gated_plain(normed), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("width", [64, 576, 1536, 4096])
def test_error_is_below_that_of_rounding(width: int) -> None:
    x, weight = operands(33, 129, width, seed=width)
    expected = exact(x, weight)
    assert rms(wide(x, weight) - expected) < 0.6 * rms(expected.bfloat16() - expected)


def test_outliers_leave_the_rest_as_it_is() -> None:
    """Numbers that differ by 2^16 within a row meet in one product."""
    x, weight = operands(8, 32, 256, seed=0)
    x[:, 5], weight[:, 5] = 2.0**16, 2.0**-16
    weight[7] *= 2.0**-16
    expected = exact(x, weight)
    assert ((wide(x, weight) - expected).abs() <= 2.0**-8 * exact(x.abs(), weight.abs())).all()


def test_equal_terms_of_the_largest_size_stay_finite() -> None:
    x = torch.full((4, 1536), 1.9921875).bfloat16()
    torch.testing.assert_close(wide(x, x), exact(x, x).float(), rtol=2.0**-8, atol=0)


def test_what_is_no_number_gives_none_in_its_row_alone() -> None:
    x, weight = operands(6, 8, 40, seed=0)
    x[2, 3], x[4, 1] = torch.nan, torch.inf
    is_number = linear(x, weight).isfinite().all(1)
    assert is_number.tolist() == [True, True, False, True, False, True]


def test_zeros_give_zeros() -> None:
    x, weight = operands(3, 5, 17, seed=0)
    assert not linear(torch.zeros_like(x), weight).any()
    assert not linear(x, torch.zeros_like(weight)).any()


def test_rows_may_lie_apart_and_shapes_are_kept() -> None:
    x, weight = operands(6, 9, 48, seed=1)
    assert torch.equal(linear(x[:, 16:], weight[:, 16:]), linear(x[:, 16:].clone(), weight[:, 16:].clone()))
    assert torch.equal(linear(x.view(2, 3, 48), weight), linear(x, weight).view(2, 3, 9))


def test_number_of_threads_changes_nothing() -> None:
    x, weight = operands(13, 200, 100, seed=2)
    one = linear(x, weight)
    torch.set_num_threads(2)
    try:
        assert torch.equal(linear(x, weight), one)
    finally:
        torch.set_num_threads(1)


def test_gradients_are_torchs() -> None:
    x, weight = (leaf.requires_grad_() for leaf in operands(3, 5, 17, seed=0))
    linear(x, weight).sum().backward()
    other_x, other_weight = (leaf.requires_grad_() for leaf in operands(3, 5, 17, seed=0))
    F.linear(other_x, other_weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(x.grad, other_x.grad)
    torch.testing.assert_close(weight.grad, other_weight.grad)


def test_changed_weights_are_not_served_from_the_copy() -> None:
    x, weight = operands(3, 5, 17, seed=0)
    pack([weight])
    weight.mul_(2)
    changed = linear(x, weight)
    assert torch.equal(changed, linear(x, weight.clone()))
    pack([weight])
    assert torch.equal(linear(x, weight), changed)


def test_copy_ends_with_its_weight() -> None:
    _, weight = operands(3, 5, 17, seed=0)
    before = len(module._packed)
    pack([weight])
    assert len(module._packed) == before + 1
    del weight
    gc.collect()
    assert len(module._packed) == before


def test_probe_takes_the_fastest_product(monkeypatch: pytest.MonkeyPatch, kernel: int) -> None:
    monkeypatch.undo()
    probe = module.__dict__["_probe"]
    times_s = iter((3.0, 0.1, 1.0, 0.05))
    monkeypatch.setattr(module, "_best_s", lambda run, x: next(times_s))
    monkeypatch.setattr(module, "_multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(native, "ask", lambda function, *sizes: 1 if function == "linear_kinds" else 1 << 22)
    assert probe() is None  # torch's took 1 + 32 x 0.05 s, the native kernel 3 + 32 x 0.1 s
