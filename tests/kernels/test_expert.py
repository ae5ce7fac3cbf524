"""The grouped experts equal the formula read off expert by expert, values and gradients, in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2forge.kernels.expert import dispatch, dispatch_some, expert_ffn, expert_ffn_plain, grouped_rows, grouped_weights

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}
"""Relative to the norm plus 1 per entry, the size of what is summed: an entry may cancel to nothing, its error not."""


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    expected = expected.to(torch.float64)
    error = (actual.to(torch.float64) - expected).norm()
    assert error <= TOLERANCE[dtype] * (expected.norm() + expected.numel() ** 0.5)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@given(data=st.data())
def test_expert_ffn_equals_its_plain_twin(dtype: torch.dtype, data: st.DataObject) -> None:
    num_tokens, dim = data.draw(st.integers(1, 40)), data.draw(st.sampled_from((8, 16, 18)))
    num_experts, width = data.draw(st.integers(1, 12)), data.draw(st.sampled_from((5, 8, 16)))
    top_k = data.draw(st.integers(1, min(4, num_experts)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # A few favoured experts leave others empty.
    favour = normal(num_experts) * 3
    expert_NK = (normal(num_tokens, num_experts) + favour).topk(top_k).indices
    # As on a rank that holds some of the experts; sometimes none of those that were chosen.
    num_here = data.draw(st.integers(0, num_experts))
    expert_NK = torch.where(expert_NK < num_here, expert_NK, -1)
    sort = dispatch if bool((expert_NK >= 0).all()) else dispatch_some
    inputs = [
        normal(num_tokens, dim),
        normal(num_experts, 2 * width, dim) / dim**0.5,
        normal(num_experts, dim, width) / width**0.5,
    ]
    weight_NK, grad_ND = (
        torch.rand(num_tokens, top_k, generator=generator, dtype=torch.float64),
        normal(num_tokens, dim),
    )

    def run(function: object, precision: torch.dtype, where: object) -> list[torch.Tensor]:
        leaves = [x.to(precision).requires_grad_() for x in inputs]
        weight = weight_NK.to(torch.promote_types(precision, torch.float32)).clone().requires_grad_()
        out = function(*leaves, weight, where)  # type: ignore[operator]
        out.backward(grad_ND.to(precision))
        return [out, *(leaf.grad for leaf in (*leaves, weight))]

    actual = run(expert_ffn, dtype, sort(expert_NK, num_experts))
    expected = run(expert_ffn_plain, torch.float64, expert_NK)
    for ours, plain in zip(actual, expected, strict=True):
        close(ours, plain, dtype)


def test_backward_leaves_frozen_matrices_alone() -> None:
    x = torch.randn(6, 8, requires_grad=True)
    w13, w2 = torch.randn(4, 16, 8), torch.randn(4, 8, 8)
    expert_NK = torch.randint(0, 4, (6, 2))
    expert_ffn(x, w13, w2, torch.rand(6, 2), dispatch(expert_NK, 4)).sum().backward()
    assert x.grad is not None
    assert w13.grad is None
    assert w2.grad is None


def test_expanded_gradients_are_accepted() -> None:
    x = torch.randn(6, 8, requires_grad=True)
    w13, w2 = torch.randn(4, 16, 8, requires_grad=True), torch.randn(4, 8, 8, requires_grad=True)
    where = dispatch(torch.randint(0, 4, (6, 2)), 4)
    expert_ffn(x, w13, w2, torch.rand(6, 2), where).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_dispatch_counts_every_expert_and_inverts_the_order() -> None:
    expert_NK = torch.tensor([[3, 0], [3, 1], [0, 3]])
    where = dispatch(expert_NK, 5)
    assert where.load_E.tolist() == [2, 1, 0, 3, 0]
    assert where.order_S[where.slot_NK.flatten()].tolist() == list(range(6))
    assert expert_NK.flatten()[where.order_S].tolist() == [0, 0, 1, 3, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weight_product_of_an_empty_group_is_zero(dtype: torch.dtype) -> None:
    ends = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    a, b = torch.randn(8, 16).to(dtype), torch.randn(8, 32).to(dtype)
    products = grouped_weights(a, b, ends)
    assert products[0].eq(0).all()
    assert products[2].eq(0).all()
    close(products[1], a[:3].double().t() @ b[:3].double(), dtype)


def test_grouped_rows_take_odd_widths() -> None:
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    a, b = torch.randn(5, 7), torch.randn(3, 7, 3)
    expected = torch.cat((a[:2] @ b[0], a[2:] @ b[2]))
    torch.testing.assert_close(grouped_rows(a, b, ends), expected)


def test_backward_is_the_same_on_every_run() -> None:
    torch.manual_seed(0)
    x, w13, w2 = torch.randn(500, 32), torch.randn(8, 32, 32), torch.randn(8, 32, 16)
    where, weight = dispatch(torch.rand(500, 8).topk(4).indices, 8), torch.rand(500, 4)

    def gradient() -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        expert_ffn(leaf, w13, w2, weight, where).square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    assert torch.equal(gradient(), gradient())


def test_weights_in_float64_and_strided_matrices_are_taken() -> None:
    torch.manual_seed(0)
    x, weight, expert_NK = torch.randn(6, 8), torch.rand(6, 2, dtype=torch.float64), torch.randint(0, 4, (6, 2))
    w13, w2 = torch.randn(8, 16, 4).permute(2, 1, 0), torch.randn(8, 8, 4).permute(2, 0, 1)
    out = expert_ffn(x, w13, w2, weight, dispatch(expert_NK, 4))
    expected = expert_ffn_plain(x.double(), w13.double(), w2.double(), weight, expert_NK)
    close(out, expected, torch.float32)
    close(expert_ffn(x, w13, w2, weight.float(), dispatch(expert_NK, 4)), expected, torch.float32)
