"""The native attention equals the plain form, document by document, values and gradients."""

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2forge.kernels.attention import document_attention, document_attention_plain

needs_native = pytest.mark.skipif(
    shutil.which("cc") is None, reason="no C compiler here: the plain form is all there is"
)


@needs_native
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    dim=st.sampled_from((2, 7, 16, 33)),
    seed=st.integers(0, 2**20),
)
def test_native_attention_equals_its_plain_twin(
    lengths: list[int], kv_heads: int, groups: int, dim: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_tokens, q_width, kv_width = sum(lengths), kv_heads * groups * dim, kv_heads * dim
    # One joint tensor, as the projection makes it: k and v arrive strided.
    joint = torch.randn(num_tokens, q_width + 2 * kv_width, generator=generator) * 2
    grad = torch.randn(num_tokens, kv_heads * groups, dim, generator=generator)

    def run(function: object, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = joint.to(dtype).requires_grad_(True)
        parts = (x.unflatten(-1, (-1, dim)) for x in leaf.split((q_width, kv_width, kv_width), dim=-1))
        out = function(*parts, lengths, [None] * len(lengths))  # type: ignore[operator]
        out.backward(grad.to(dtype))
        assert leaf.grad is not None
        return out, leaf.grad

    exact_out, exact_grad = run(document_attention_plain, torch.float64)
    joint = joint.clone()
    out, leaf_grad = run(document_attention, torch.float32)
    # float32 sums over at most 200 keys.
    torch.testing.assert_close(out.double(), exact_out, atol=1e-5, rtol=1e-5)
    assert (leaf_grad.double() - exact_grad).abs().max() <= 1e-5 * exact_grad.abs().max() + 1e-6


@needs_native
def test_large_scores_neither_overflow_nor_lose_the_winner() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(90, 2, 8) * scale for scale in (60.0, 60.0, 1.0))
    out = document_attention(q, k, v, [90], [None])
    expected = document_attention_plain(q.double(), k.double(), v.double(), [90], [None])
    # Scores of up to 30,000 carry an error of 30,000 · 2⁻²⁴ into the exponent.
    torch.testing.assert_close(out.double(), expected, atol=5e-3, rtol=5e-3)


@needs_native
def test_result_does_not_depend_on_the_number_of_threads() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(300, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        out = document_attention(q, k, v, [100, 200], [None, None])
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))))
    torch.set_num_threads(threads)
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_lengths_that_do_not_add_up_are_refused() -> None:
    q, k, v = (torch.randn(10, 2, 4) for _ in range(3))
    with pytest.raises(ValueError, match="documents of 48 tokens cannot explain 10 queries"):
        document_attention(q, k, v, [4, 44], [None, None])
