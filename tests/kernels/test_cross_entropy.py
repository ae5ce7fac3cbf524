"""The chunked loss equals the plain one with all logits, values and gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2forge.kernels import head_loss as cross_entropy
from m2forge.kernels.head_loss import linear_cross_entropy, linear_cross_entropy_plain


@given(
    num_tokens=st.integers(1, 20),
    num_losses=st.integers(1, 30),
    vocab_size=st.integers(2, 40),
    rows=st.integers(1, 32),
    seed=st.integers(0, 2**20),
)
def test_chunks_equal_the_plain_loss(num_tokens: int, num_losses: int, vocab_size: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, 6, generator=generator, dtype=torch.float64)
    head = torch.randn(vocab_size, 6, generator=generator, dtype=torch.float64)
    position = torch.randint(0, num_tokens, (num_losses,), generator=generator)  # repeats included
    target = torch.randint(0, vocab_size, (num_losses,), generator=generator)

    ours, plain = ([x.clone().requires_grad_() for x in (hidden, head)] for _ in range(2))
    loss, nll = linear_cross_entropy(ours[0], ours[1], target, position_M=position, chunk_bytes=rows * vocab_size * 8)
    expected = linear_cross_entropy_plain(plain[0][position], plain[1], target)
    (3 * loss).backward()
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(nll.mean(), expected.detach())
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_weights_scale_each_position() -> None:
    hidden = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    head, target = torch.randn(9, 6, dtype=torch.float64), torch.randint(0, 9, (4,))
    weight = torch.tensor([0.5, 0.0, -2.0, 1.0], dtype=torch.float64)
    loss, nll = linear_cross_entropy(hidden, head, target, weight_M=weight)
    loss.backward()
    torch.testing.assert_close(loss.detach(), (weight * nll).sum())
    assert hidden.grad is not None
    assert hidden.grad[1].eq(0).all()
    assert hidden.grad[0].ne(0).any()


def test_only_a_chunk_of_logits_exists_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plain = cross_entropy._nll_and_grad

    def watch(logits: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(tuple(logits.shape))
        return plain(logits, *rest)

    monkeypatch.setattr(cross_entropy, "_nll_and_grad", watch)
    hidden, head = torch.randn(100, 4, requires_grad=True), torch.randn(1000, 4)
    position = torch.arange(0, 100, 3)
    linear_cross_entropy(hidden, head, position, position_M=position, chunk_bytes=8 * 1000 * 4)
    assert seen == [(8, 1000)] * 4 + [(2, 1000)]


@pytest.mark.parametrize("float32_head", [False, True])
def test_bfloat16_stays_near_float32(float32_head: bool) -> None:
    torch.manual_seed(0)
    hidden, head, target = torch.randn(50, 32), torch.randn(200, 32) / 6, torch.randint(0, 200, (50,))
    exact = linear_cross_entropy_plain(hidden.bfloat16().double(), head.bfloat16().double(), target).item()
    loss, nll = linear_cross_entropy(hidden.bfloat16(), head.bfloat16(), target, float32_head=float32_head)
    assert nll.dtype == torch.float32
    # With a float32 head only float32 rounding is left; without, each logit carries 8 bits.
    assert abs(loss.item() - exact) < (1e-5 if float32_head else 1e-2)


def test_mismatched_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        linear_cross_entropy(torch.randn(4, 2), torch.randn(3, 2), torch.zeros(4).long(), position_M=torch.arange(3))


def test_no_positions_give_zero_loss_and_zero_gradients() -> None:
    hidden = torch.randn(4, 2, requires_grad=True)
    nothing = torch.empty(0, dtype=torch.long)
    loss, nll = linear_cross_entropy(hidden, torch.randn(3, 2), nothing, position_M=nothing)
    loss.backward()
    assert loss.item() == 0
    assert nll.shape == (0,)
    assert hidden.grad is not None
    assert hidden.grad.eq(0).all()


@pytest.mark.parametrize("target", [-100, 3])
def test_targets_outside_the_vocabulary_are_refused(target: int) -> None:
    with pytest.raises(ValueError, match="leave the vocabulary of 3; leave positions without a loss out of position_M"):
        linear_cross_entropy(torch.randn(2, 2), torch.randn(3, 2), torch.tensor([0, target]))


def test_targets_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="give token ids as"):
        linear_cross_entropy(torch.randn(2, 2), torch.randn(3, 2), torch.zeros(2, dtype=torch.int32))


def test_gradient_is_scaled_without_rounding_the_factor() -> None:
    torch.manual_seed(0)
    hidden, head, target = torch.randn(64, 16).bfloat16(), torch.randn(50, 16).bfloat16(), torch.randint(0, 50, (64,))
    grads = []
    for factor in (1.0, 0.3):
        leaf = hidden.clone().requires_grad_()
        (factor * linear_cross_entropy(leaf, head, target)[0]).backward()
        assert leaf.grad is not None
        grads.append(leaf.grad.double())
    # 0.3 in bfloat16 is 0.30078; each product is rounded by itself, without a common bias.
    assert (grads[1].norm() / grads[0].norm()).item() == pytest.approx(0.3, rel=5e-4)


def test_evaluation_makes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    head = torch.randn(9, 4, requires_grad=True)
    products = []
    monkeypatch.setattr(torch, "zeros_like", lambda *args, **kwargs: products.append(args))
    with torch.no_grad():
        loss, _ = linear_cross_entropy(torch.randn(3, 4), head, torch.tensor([1, 2, 3]))
    assert not loss.requires_grad
    assert products == []
