"""Chunked log-probabilities equal the plain ones with all logits: values, gradients, entropies, likeliest tokens."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from m2forge.kernels.head_loss import (
    LogProbs,
    linear_logprob,
    linear_logprob_plain,
    log_sum_exp,
    row_statistics,
    softmax_grad_,
)


def cube(logp: torch.Tensor, _: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """A term whose slope changes with the log-probability."""
    return logp**3, 3 * logp**2


def draw(seed: int, num_tokens: int, num_losses: int, vocab_size: int) -> tuple[torch.Tensor, ...]:
    """(hidden, head, position with repeats, target, temperature), float64."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, 6, generator=generator, dtype=torch.float64)
    head = torch.randn(vocab_size, 6, generator=generator, dtype=torch.float64)
    position = torch.randint(0, num_tokens, (num_losses,), generator=generator)
    target = torch.randint(0, vocab_size, (num_losses,), generator=generator)
    temperature = torch.rand(num_losses, generator=generator, dtype=torch.float64) * 2 + 0.3
    return hidden, head, position, target, temperature


@given(
    num_tokens=st.integers(1, 20),
    num_losses=st.integers(1, 30),
    vocab_size=st.integers(2, 40),
    rows=st.integers(1, 32),
    top_k=st.integers(0, 44),
    hot=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_chunks_equal_the_plain_log_probabilities(
    num_tokens: int, num_losses: int, vocab_size: int, rows: int, top_k: int, hot: bool, seed: int
) -> None:
    hidden, head, position, target, temperature = draw(seed, num_tokens, num_losses, vocab_size)
    if not hot:
        temperature = torch.ones_like(temperature)
    ours, plain = ([x.clone().requires_grad_() for x in (hidden, head)] for _ in range(2))
    found = linear_logprob(
        ours[0],
        ours[1],
        target,
        position_M=position,
        term=cube,
        inverse_temperature_M=1 / temperature if hot else None,
        top_k=top_k,
        chunk_bytes=rows * vocab_size * 8,
    )
    logp = linear_logprob_plain(plain[0][position], plain[1], target, temperature)
    (2 * found.loss).backward()
    (2 * (logp**3).sum()).backward()
    torch.testing.assert_close(found.loss, (logp**3).sum())
    torch.testing.assert_close(found.logp_M, logp.detach())
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-10)
    all_logp = F.log_softmax(hidden[position] @ head.t() / temperature[:, None], -1)
    torch.testing.assert_close(found.entropy_M, -(all_logp.exp() * all_logp).sum(-1), rtol=1e-9, atol=1e-10)
    check_top(found, all_logp, top_k)


def check_top(found: LogProbs, all_logp: torch.Tensor, top_k: int) -> None:
    if not top_k:
        assert found.top is None
        return
    assert found.top is not None
    k = min(top_k, all_logp.shape[1])
    expected = all_logp.topk(k).values
    torch.testing.assert_close(found.top.logp_MK.sort(descending=True).values, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(all_logp.gather(1, found.top.id_MK.long()), found.top.logp_MK, rtol=1e-9, atol=1e-10)
    rest = all_logp.scatter(1, found.top.id_MK.long(), -torch.inf).logsumexp(-1)
    torch.testing.assert_close(found.top.rest_M, rest, rtol=1e-9, atol=1e-10)


def test_a_slope_may_differ_from_the_derivative() -> None:
    """As where no gradient flows through a factor of the value."""
    hidden, head, position, target, temperature = draw(0, 5, 7, 9)
    hidden.requires_grad_()
    slope = torch.linspace(-1, 1, 7, dtype=torch.float64)
    found = linear_logprob(
        hidden, head, target, position_M=position, term=lambda logp, chunk: (logp.exp(), slope[chunk])
    )
    (grad,) = torch.autograd.grad(found.loss, hidden)
    logp = linear_logprob_plain(hidden[position], head, target, torch.ones_like(temperature))
    (expected,) = torch.autograd.grad((slope * logp).sum(), hidden)
    torch.testing.assert_close(grad, expected)
    torch.testing.assert_close(found.loss, logp.exp().sum())


@pytest.mark.parametrize("float32_head", [False, True])
def test_bfloat16_stays_near_float32(float32_head: bool) -> None:
    torch.manual_seed(0)
    hidden, head, target = torch.randn(50, 32), torch.randn(200, 32) / 6, torch.randint(0, 200, (50,))
    ones, position = torch.ones(50).double(), torch.arange(50)
    exact = linear_logprob_plain(hidden.bfloat16().double(), head.bfloat16().double(), target, ones)
    found = linear_logprob(
        hidden.bfloat16(), head.bfloat16(), target, position_M=position, term=cube, float32_head=float32_head
    )
    assert found.logp_M.dtype == torch.float32
    # With a float32 head only float32 rounding is left; without, each logit carries 8 bits.
    assert (found.logp_M - exact).abs().max() < (1e-5 if float32_head else 3e-2)


def test_no_positions_give_zero_loss_and_zero_gradients() -> None:
    hidden = torch.randn(4, 2, requires_grad=True)
    nothing = torch.empty(0, dtype=torch.long)
    found = linear_logprob(hidden, torch.randn(3, 2), nothing, position_M=nothing, term=cube, top_k=2)
    found.loss.backward()
    assert found.loss.item() == 0
    assert found.logp_M.shape == found.entropy_M.shape == (0,)
    assert hidden.grad is not None
    assert hidden.grad.eq(0).all()


def test_mismatched_positions_and_foreign_targets_are_refused() -> None:
    hidden, head = torch.randn(4, 2), torch.randn(3, 2)
    with pytest.raises(ValueError, match="differ in shape"):
        linear_logprob(hidden, head, torch.zeros(4).long(), position_M=torch.arange(3), term=cube)
    with pytest.raises(ValueError, match="leave the vocabulary of 3"):
        linear_logprob(hidden, head, torch.tensor([3]), position_M=torch.tensor([0]), term=cube)


@pytest.mark.parametrize("vocab_size", [2, 5, 17, 64, 1001])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_float32_passes_stay_near_those_of_float64(vocab_size: int, is_scaled: bool) -> None:
    torch.manual_seed(0)
    logits, scale, factor = 9 * torch.randn(7, vocab_size), torch.rand(7) + 0.5, torch.randn(7)
    target = torch.randint(0, vocab_size, (7,))
    # A token left out, as those of the top are; in every row another one stays.
    logits[:3, 0] = -torch.inf
    given = (logits.clone(), scale if is_scaled else None)
    exact = (logits.double(), scale.double() if is_scaled else None)
    found, expected = log_sum_exp(*given), log_sum_exp(*exact)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(
        row_statistics(logits[3:], scale[3:] if is_scaled else None),
        row_statistics(logits[3:].double(), scale[3:].double() if is_scaled else None),
        strict=True,
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=3e-6)
    for goal in (None, target):
        ours = softmax_grad_(given[0].clone(), given[1], found, factor, goal)
        theirs = softmax_grad_(exact[0].clone(), exact[1], expected, factor.double(), goal)
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=3e-6)


def test_a_nan_among_logits_is_not_lost() -> None:
    logits = torch.randn(2, 50)
    logits[1, 30] = torch.nan
    lse, mean = row_statistics(logits, None)
    assert lse.isnan().tolist() == mean.isnan().tolist() == [False, True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6), (torch.bfloat16, 2e-2)]
)
def test_cuda_equals_the_plain_log_probabilities(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(500, 256, device="cuda"), torch.randn(33_333, 256, device="cuda") / 16
    target = torch.randint(0, 33_333, (500,), device="cuda")
    temperature = torch.rand(500, dtype=torch.float64, device="cuda") + 0.5
    ours, twin = ([x.to(kind).clone().requires_grad_() for x in (hidden, head)] for kind in (dtype, torch.float64))
    found = linear_logprob(
        ours[0],
        ours[1],
        target,
        position_M=torch.arange(500, device="cuda"),
        term=lambda logp, _: (logp**2, 2 * logp),
        inverse_temperature_M=1 / temperature,
        top_k=8,
        chunk_bytes=1 << 22,
    )
    logp = linear_logprob_plain(twin[0], twin[1], target, temperature)
    grads = (torch.autograd.grad(x, leaves) for x, leaves in ((found.loss, ours), ((logp**2).sum(), twin)))
    pairs = [(found.logp_M, logp.detach()), *zip(*grads, strict=True)]
    for mine, theirs in pairs:
        assert float((mine.double() - theirs).norm() / theirs.norm()) < tolerance
    all_logp = F.log_softmax(hidden.double() @ head.double().t() / temperature[:, None], -1)
    entropy = -(all_logp.exp() * all_logp).sum(-1)
    assert float((found.entropy_M - entropy).norm() / entropy.norm()) < tolerance
    assert found.top is not None
    sums = found.top.logp_MK.double().exp().sum(-1) + found.top.rest_M.double().exp()
    assert (sums - 1).abs().max() < 1e-5
