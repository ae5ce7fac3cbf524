"""Rows of logits decide on CUDA what their twins decide, over vocabularies of one tile and of many."""

import numpy as np
import pytest
import torch
from torch import Tensor

from m2forge.kernels.arithmetic import raised
from m2forge.rollout.execution.decode import NUM_FIELDS
from m2forge.rollout.execution.sampler import tempered
from m2forge.rollout.speculation.verify import Drafts, Verified, drafted, judged, judged_greedy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

DEVICE = "cuda"
NUM_SEQUENCES, NUM_ROWS, NUM_PLACES = 64, 3, 6
NUM_DRAFTS = NUM_ROWS - 1
VOCABULARIES = [331, 16_384, 50_001]


class Case:
    """Sequences with drafts that are likely, and the numbers that decide."""

    def __init__(self, vocab_size: int, dtype: torch.dtype) -> None:
        torch.manual_seed(vocab_size)
        rng = np.random.default_rng(vocab_size)
        shape = (NUM_SEQUENCES, NUM_ROWS, vocab_size)
        self.logits_BJV = (3 * torch.randn(shape, device=DEVICE)).to(dtype)
        self.logits_BJV[..., vocab_size // 2 :: 7] = -torch.inf
        near = raised(self.logits_BJV[:, :NUM_DRAFTS])
        self.logq_BKV = (near + 0.5 * torch.randn_like(near)).log_softmax(-1)
        self.draft_BK = self.logq_BKV.exp().flatten(0, 1).multinomial(1).view(NUM_SEQUENCES, NUM_DRAFTS)
        slot_B = torch.from_numpy(rng.permutation(NUM_SEQUENCES)).to(DEVICE)
        self.logq_SKV = torch.empty_like(self.logq_BKV)
        self.logq_SKV[slot_B] = self.logq_BKV
        self.reals = torch.from_numpy(rng.random((NUM_SEQUENCES, 1 + 3 * NUM_PLACES + NUM_DRAFTS))).to(DEVICE)
        self.reals[:, 0] = torch.from_numpy(rng.choice([1.0, 0.7, 1.5], NUM_SEQUENCES)).to(DEVICE)
        self.integers = torch.zeros(NUM_SEQUENCES, NUM_FIELDS + NUM_DRAFTS + 1, dtype=torch.int64, device=DEVICE)
        self.integers[:, 1] = 5  # two behind its first place
        self.integers[:, 2] = torch.from_numpy(rng.integers(0, NUM_ROWS, NUM_SEQUENCES)).to(DEVICE)
        self.integers[:, 4], self.integers[:, 6] = slot_B, 3
        self.integers[:, 5] = torch.arange(NUM_SEQUENCES, device=DEVICE) % 4 == 0
        self.integers[:, NUM_FIELDS : NUM_FIELDS + NUM_DRAFTS] = self.draft_BK

    @property
    def drafts(self) -> Drafts:
        return Drafts(self.draft_BK, self.integers[:, 2], self.logq_BKV)

    def plain(self) -> Verified:
        raw_BJV = raised(self.logits_BJV)
        logp_RV = tempered(raw_BJV.flatten(0, 1), self.reals[:, 0].repeat_interleave(NUM_ROWS)).log_softmax(-1)
        number_BJ, verdict_BJ = (self.reals[:, 1 + first + 2 :][:, :NUM_ROWS] for first in (0, NUM_PLACES))
        is_free_B = self.integers[:, 5] == 0
        return judged(raw_BJV, logp_RV.view_as(raw_BJV), number_BJ, verdict_BJ, self.drafts, is_free_B)


def share_of_equals(ours: Tensor, plain: Tensor) -> float:
    return float((ours == plain).double().mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_sampled_rows(vocab_size: int, dtype: torch.dtype) -> None:
    from m2forge.kernels.verdict_triton import judge

    case = Case(vocab_size, dtype)
    found = judge(
        case.logits_BJV.flatten(0, 1), case.integers, case.reals, case.logq_SKV, NUM_ROWS, NUM_FIELDS, NUM_PLACES
    )
    plain = case.plain()
    # Rounding tips a draw now and then.
    assert share_of_equals(found.token_BJ, plain.token_BJ) > 0.98
    is_accepted_BK = (found.stands_BJ[:, :-1] != 0) & case.drafts.is_there_BK
    num_B = 1 + is_accepted_BK.long().cumprod(1).sum(1)
    assert share_of_equals(num_B, plain.num_B) > 0.98
    assert num_B.unique().numel() == NUM_ROWS
    same = found.token_BJ == plain.token_BJ
    for ours, theirs in ((found.logprob_BJ, plain.logprob_BJ), (found.raw_logprob_BJ, plain.raw_logprob_BJ)):
        torch.testing.assert_close(ours[same], theirs[same], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_greedy_rows(vocab_size: int) -> None:
    from m2forge.kernels.verdict_triton import judge_greedy

    case = Case(vocab_size, torch.bfloat16)
    case.draft_BK[::2] = case.logits_BJV[::2, :-1].argmax(-1)
    case.integers[:, NUM_FIELDS : NUM_FIELDS + NUM_DRAFTS] = case.draft_BK
    found = judge_greedy(case.logits_BJV.flatten(0, 1), case.integers, NUM_ROWS, NUM_FIELDS)
    raw_BJV = raised(case.logits_BJV)
    plain = judged_greedy(raw_BJV, raw_BJV, case.drafts)
    chosen = raw_BJV.gather(-1, found.token_BJ[..., None])[..., 0]
    assert torch.equal(chosen, raw_BJV.amax(-1))
    lower = torch.arange(vocab_size, device=DEVICE) < found.token_BJ[..., None]
    assert not ((raw_BJV == chosen[..., None]) & lower).any()
    assert torch.equal(found.stands_BJ[:, :-1] != 0, found.token_BJ[:, :-1] == case.draft_BK)
    torch.testing.assert_close(found.raw_logprob_BJ, plain.raw_logprob_BJ, rtol=1e-5, atol=2e-5)
    assert not found.logprob_BJ.any()


@pytest.mark.parametrize("is_greedy", [True, False])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_drafts(vocab_size: int, is_greedy: bool) -> None:
    from m2forge.kernels.decode_rows_triton import NUM_COURSE
    from m2forge.kernels.verdict_triton import draft

    case, module, depth = Case(vocab_size, torch.bfloat16), 1, 2
    logits_BV = case.logits_BJV[:, 0].contiguous()
    course = torch.zeros(NUM_SEQUENCES, NUM_COURSE + 1 + NUM_ROWS + depth, dtype=torch.int64, device=DEVICE)
    course[:, 0], course[:, 2] = 5, 2
    out = torch.zeros(NUM_SEQUENCES, 3 * NUM_ROWS + 2 + depth, dtype=torch.float64, device=DEVICE)
    slots, before = case.integers[:, 4].clone(), case.logq_SKV.clone()
    draft(
        *(module, logits_BV, case.integers, case.reals, course, case.logq_SKV, out),
        *(NUM_ROWS, NUM_FIELDS, NUM_PLACES, depth, is_greedy),
    )
    token_B = course[:, NUM_COURSE + 1 + NUM_ROWS + module]
    assert torch.equal(token_B, case.integers[:, NUM_FIELDS + module])
    assert torch.equal(token_B.double(), out[:, NUM_ROWS + 2 + module])
    if is_greedy:
        assert torch.equal(logits_BV.gather(1, token_B[:, None])[:, 0], logits_BV.amax(-1))
        assert torch.equal(case.logq_SKV, before)
        return
    logq_BV = tempered(raised(logits_BV), case.reals[:, 0]).log_softmax(-1)
    number_B = case.reals[:, 1 + 2 * NUM_PLACES + 5 - 3 + 2 + module]
    # Of seeded ones the likeliest, of which several may be equal.
    is_free_B = case.integers[:, 5] == 0
    plain_B = drafted(logits_BV, logq_BV, number_B, is_free_B)
    assert share_of_equals(token_B[is_free_B], plain_B[is_free_B]) > 0.98
    assert torch.equal(logits_BV.gather(1, token_B[:, None])[~is_free_B][:, 0], logits_BV[~is_free_B].amax(-1))
    torch.testing.assert_close(case.logq_SKV[slots, module], logq_BV, rtol=1e-5, atol=2e-5)
    assert torch.equal(case.logq_SKV[:, 0], before[:, 0])
