"""The losses per edge against closed forms, autograd over all logits, and TRL."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from m2forge.kernels.head_loss import linear_logprob
from m2forge.train.config import PolicyConfig
from m2forge.train.loss.mtp import TopLoss, mtp_topk
from m2forge.train.loss.policy import MAX_LOG_RATIO, cispo, importance_ratio, is_clipped, policy_term, ppo_clip, sft
from tests.train.naive import plain_topk


def draw_edges(seed: int, num_edges: int = 40, spread: float = 1.5) -> tuple[torch.Tensor, ...]:
    """(logp, old, advantage), float64, with ratios on both sides of every clip."""
    generator = torch.Generator().manual_seed(seed)
    logp, noise, advantage = torch.randn(3, num_edges, generator=generator, dtype=torch.float64)
    logp = -logp.abs()
    return logp, logp + spread * noise, advantage


def test_cispo_by_hand() -> None:
    logp = torch.tensor([0.5, 0.2, 0.9], dtype=torch.float64).log()
    old = torch.tensor([0.25, 0.4, 0.1], dtype=torch.float64).log()
    advantage = torch.tensor([1.0, -3.0, 2.0], dtype=torch.float64)
    value, slope = cispo(logp, old, advantage, max_ratio=5.0)
    # Ratios 2, 1/2 and 9, of which the last is clipped to 5; there is no lower clip.
    assert slope.tolist() == pytest.approx([-2.0, 1.5, -10.0], rel=1e-12)
    expected = [-2 * math.log(0.5), 1.5 * math.log(0.2), -10 * math.log(0.9)]
    assert value.tolist() == pytest.approx(expected, rel=1e-12)


def test_no_gradient_flows_through_the_ratio_of_cispo() -> None:
    logp, old, advantage = draw_edges(0)
    logp.requires_grad_()
    frozen = (logp - old).exp().clamp(max=2.0).detach()
    (expected,) = torch.autograd.grad((-frozen * advantage * logp).sum(), logp)
    value, slope = cispo(logp.detach(), old, advantage, max_ratio=2.0)
    torch.testing.assert_close(slope, expected, rtol=1e-12, atol=0)
    # With the ratio differentiated it would be another number.
    (through,) = torch.autograd.grad((-(logp - old).exp().clamp(max=2.0) * advantage * logp).sum(), logp)
    assert (through - slope).abs().max() > 0.1
    torch.testing.assert_close(value, (-frozen * advantage * logp).detach(), rtol=1e-12, atol=0)


def test_ppo_is_the_derivative_of_its_value() -> None:
    logp, old, advantage = draw_edges(1)
    logp.requires_grad_()
    ratio = (logp - old).exp()
    plain = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
    value, slope = ppo_clip(logp.detach(), old, advantage, low=0.2, high=0.3)
    torch.testing.assert_close(value, plain.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(slope, torch.autograd.grad(plain.sum(), logp)[0], rtol=1e-12, atol=1e-15)
    clipped = is_clipped(PolicyConfig(loss="ppo_clip", ppo_low=0.2, ppo_high=0.3), ratio, advantage)
    assert torch.equal(clipped, slope == 0)
    assert 0 < clipped.sum() < clipped.numel()


def test_sft_is_the_negative_log_probability() -> None:
    logp, _, _ = draw_edges(2)
    value, slope = sft(logp)
    assert torch.equal(value, -logp)
    assert slope.eq(-1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss", ["cispo", "ppo_clip", "sft"])
@pytest.mark.parametrize(("old", "logp"), [(-50.0, -0.1), (-1e30, -0.1), (-0.1, -1e30), (-0.1, -200.0), (0.0, 0.0)])
def test_ratios_far_off_make_no_nan(loss: str, dtype: torch.dtype, old: float, logp: float) -> None:
    config = PolicyConfig.model_validate({"loss": loss})
    for advantage in (-1.0, 0.0, 1.0):
        edge = (torch.tensor([number], dtype=dtype) for number in (logp, old, advantage))
        value, slope = policy_term(config, *edge)
        assert slope.isfinite().all()
        assert value.isfinite().all()
    ratio = importance_ratio(torch.tensor([logp], dtype=dtype), torch.tensor([old], dtype=dtype))
    assert 0 <= ratio.item() <= math.exp(MAX_LOG_RATIO) * 1.001


# -- drafts that follow the policy ------------------------------------------------------------------------------------

KINDS: tuple[TopLoss, ...] = ("topk_kl", "topk_acceptance")


@given(
    kind=st.sampled_from(KINDS),
    vocab_size=st.integers(2, 30),
    top_k=st.integers(1, 33),
    num_edges=st.integers(1, 20),
    rows=st.integers(1, 9),
    hot=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_the_loss_of_drafts_equals_that_of_all_logits(
    kind: TopLoss, vocab_size: int, top_k: int, num_edges: int, rows: int, hot: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    policy, draft, head = draw(7, 5), draw(7, 5).requires_grad_(), draw(vocab_size, 5).requires_grad_()
    position = torch.randint(0, 7, (num_edges,), generator=generator)
    target = torch.zeros_like(position)
    weight, temperature = draw(num_edges).abs(), draw(num_edges).abs() + 0.4 if hot else torch.ones(num_edges)
    inverse = 1 / temperature if hot else None
    found = linear_logprob(
        policy,
        head.detach(),
        target,
        position_M=position,
        term=lambda logp, _: sft(logp),
        inverse_temperature_M=inverse,
        top_k=top_k,
    )
    assert found.top is not None
    loss, found_M = mtp_topk(
        kind,
        draft,
        head,
        found.top,
        position_M=position,
        weight_M=weight,
        inverse_temperature_M=inverse,
        float32_head=False,
        chunk_bytes=rows * vocab_size * 8,
    )
    policy_logits = (policy[position] @ head.detach().t()) / temperature[:, None]
    draft_logits = (draft[position] @ head.t()) / temperature[:, None]
    expected = plain_topk(kind, policy_logits, draft_logits, top_k)
    torch.testing.assert_close(found_M, expected.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(loss, (weight * expected).sum(), rtol=1e-9, atol=1e-12)
    grads = torch.autograd.grad(3 * loss, (draft, head))
    for ours, theirs in zip(grads, torch.autograd.grad(3 * (weight * expected).sum(), (draft, head)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharpness", [1.0, 60.0, 300.0])
def test_a_rest_of_nearly_nothing_is_safe_in_float32(sharpness: float, kind: TopLoss) -> None:
    """The policy is sure of two tokens, of which the draft is sure of one; the rest's probability underflows."""
    head = torch.eye(6)
    policy = (sharpness * torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0, 0.0]])).requires_grad_()
    draft = (sharpness * torch.tensor([[1.0, 0.9, 0.0, 0.1, 0.0, 0.0]])).requires_grad_()
    position = torch.tensor([0])
    found = linear_logprob(
        policy,
        head,
        torch.tensor([0]),
        position_M=position,
        term=lambda logp, _: sft(logp),
        top_k=2,
    )
    assert found.top is not None
    loss, _ = mtp_topk(
        kind,
        draft,
        head,
        found.top,
        position_M=position,
        weight_M=torch.ones(1),
        inverse_temperature_M=None,
        float32_head=False,
    )
    (grad,) = torch.autograd.grad(loss, draft)
    exact = draft.detach().double().requires_grad_()
    logq = F.log_softmax(exact, -1)
    logp = F.log_softmax(policy.detach().double(), -1)
    buckets = [torch.cat((x[:, :2], x[:, 2:].logsumexp(-1, keepdim=True)), -1) for x in (logp, logq)]
    if kind == "topk_kl":
        expected = (buckets[0].exp() * (buckets[0] - buckets[1])).sum()
    else:
        expected = -torch.minimum(*buckets).exp().sum().log()
    # Logits of 300 are known to 3e-5 in float32, and so are their differences.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    assert grad.isfinite().all()
    torch.testing.assert_close(grad.double(), torch.autograd.grad(expected, exact)[0], rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-5)])
def test_the_loss_of_drafts_on_cuda_equals_that_of_all_logits(
    dtype: torch.dtype, tolerance: float, kind: TopLoss
) -> None:
    torch.manual_seed(0)
    policy, draft, head = (torch.randn(shape, device="cuda") for shape in ((300, 256), (300, 256), (5001, 256)))
    temperature = torch.rand(300, dtype=torch.float64, device="cuda") + 0.5
    position = torch.arange(300, device="cuda")
    weight = torch.rand(300, device="cuda")
    leaves = [x.to(dtype).clone().requires_grad_() for x in (draft, head / 16)]
    found = linear_logprob(
        policy.to(dtype),
        leaves[1].detach(),
        torch.zeros_like(position),
        position_M=position,
        term=lambda logp, _: sft(logp),
        inverse_temperature_M=1 / temperature,
        top_k=20,
    )
    assert found.top is not None
    loss, _ = mtp_topk(
        kind,
        leaves[0],
        leaves[1],
        found.top,
        position_M=position,
        weight_M=weight,
        inverse_temperature_M=1 / temperature,
        float32_head=False,
        chunk_bytes=1 << 20,
    )
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    scaled = [
        x @ head.t() / temperature[:, None] for x, head in ((policy.to(dtype).double(), exact[1].detach()), exact)
    ]
    expected = (weight * plain_topk(kind, scaled[0], scaled[1], 20)).sum()
    pairs = zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, exact), strict=True)
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    assert all(float((ours - theirs).norm() / theirs.norm()) < tolerance for ours, theirs in pairs)


# -- the peer ---------------------------------------------------------------------------------------------------------


class Accelerator:
    """One process, as far as TRL's loss asks."""

    num_processes = 1

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def test_cispo_equals_trl() -> None:
    """TRL's own loss method on the same log-probabilities: there `epsilon_high` is the largest ratio."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    generator = torch.Generator().manual_seed(3)
    logp, noise = torch.randn(2, 4, 9, generator=generator, dtype=torch.float64)
    logp = (-logp.abs()).requires_grad_()
    old = (logp + noise).detach()
    advantage = torch.tensor([1.0, -0.5, 2.0, -1.5], dtype=torch.float64)
    mask = (torch.arange(9) < torch.tensor([9, 3, 6, 1])[:, None]).long()
    max_ratio = 2.0
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp.detach()), None),
        loss_type="cispo",
        importance_sampling_level="token",
        epsilon_high=max_ratio,
        epsilon_low=0.2,
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        args=SimpleNamespace(steps_per_generation=1, delta=None),
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    ids = torch.zeros_like(mask)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": mask,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantage,
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }
    theirs = trainer.GRPOTrainer._compute_loss(stub, None, inputs)
    (expected,) = torch.autograd.grad(theirs, logp)
    value, slope = cispo(logp.detach(), old, advantage[:, None].expand(4, 9), max_ratio)
    torch.testing.assert_close((value * mask).sum() / mask.sum(), theirs.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(slope * mask / mask.sum(), expected, rtol=1e-12, atol=0)
    assert ((logp - old).exp() > max_ratio)[mask.bool()].any()
