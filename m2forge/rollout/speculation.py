"""Drafts of the prediction modules and their verification: tokens come out as if there had been no drafts.

Draft k of a sequence was drawn from q_k. If the drafts before it stand, the sampler would draw the token at its place
from p_k; one pass of the main model over all drafts gives every p. With a number u in [0, 1):

    draft d stands if                                u · q_k(d) < p_k(d)
    the first that does not is replaced by a draw of max(p_k − q_k, 0) / Σ max(p_k − q_k, 0)
    behind drafts that all stand comes a draw of     p

so that every token has the distribution p, whatever q was (Leviathan et al., 2023). A good q saves steps, no more.

Where a seed was given, token t is promised to be a function of the seed: it is drawn from p by the seed's number, as
without drafts, and a draft stands if it is that token. For greedy sampling the two ways are the same. Drafts are then
the module's likeliest tokens.

Shapes: B sequences, K drafts of each at most, J = K + 1 rows of logits, R = B·J, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from m2forge.kernels.precision import raised
from m2forge.rollout.sampler import Row, at, distribution, numbers, penalised, pick


class Drafts(NamedTuple):
    token_BK: Tensor
    num_B: Tensor
    """How many of each sequence there are."""
    logprob_BKV: Tensor | None
    """log q; None where all drafts are likeliest tokens."""

    @property
    def is_there_BK(self) -> Tensor:
        return torch.arange(self.token_BK.shape[1], device=self.token_BK.device) < self.num_B[:, None]


class Numbers(NamedTuple):
    """In [0, 1), by what they decide."""

    token_BJ: Tensor
    verdict_BJ: Tensor
    draft_BX: Tensor
    """By the place of the draft behind the tokens there are, however many of the drafts before it stand."""


class Verified(NamedTuple):
    token_BJ: Tensor
    logprob_BJ: Tensor
    """Under p."""
    raw_logprob_BJ: Tensor
    num_B: Tensor
    """How many of each sequence's tokens count: the drafts that stand, and one."""


def is_free(row: Row) -> bool:
    """Whether a draft may decide which token is drawn."""
    return not row.is_seeded and row.sampling.temperature > 0


@torch.no_grad()
def draft(logits_BV: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor | None]:
    """A draft of each row, and log q. Penalties, which depend on drafts before it, are left to verification."""
    free = [is_free(row) for row in rows]
    if not any(free):
        return logits_BV.argmax(-1), None
    logq_BV, number_B = distribution(raised(logits_BV), rows), numbers(rows, "draft", logits_BV.device)
    return drafted(logits_BV, logq_BV, number_B, torch.tensor(free, device=logits_BV.device)), logq_BV


def drafted(logits_BV: Tensor, logq_BV: Tensor, number_B: Tensor, is_free_B: Tensor) -> Tensor:
    return torch.where(is_free_B, pick(logq_BV, number_B), logits_BV.argmax(-1))


@torch.no_grad()
def verify(logits_BJV: Tensor, rows: Sequence[Row], drafts: Drafts) -> Verified:
    """`rows`: of each sequence J, with the drafts before each counted as sampled. A sequence with fewer drafts than
    others has its last row several times."""
    raw_BJV, shape = raised(logits_BJV), logits_BJV.shape[:2]
    x_RV = penalised(raw_BJV.flatten(0, 1), rows)
    if all(row.sampling.temperature == 0 for row in rows):
        return judged_greedy(raw_BJV, x_RV.view_as(raw_BJV), drafts)
    logp_BJV, device = distribution(x_RV, rows).unflatten(0, shape), logits_BJV.device
    token_BJ, verdict_BJ = (numbers(rows, stream, device).view(shape) for stream in ("token", "verdict"))
    is_free_BJ = torch.tensor([is_free(row) for row in rows], device=device).view(shape)
    return judged(raw_BJV, logp_BJV, token_BJ, verdict_BJ, drafts, is_free_BJ[:, 0])


def judged_greedy(raw_BJV: Tensor, x_BJV: Tensor, drafts: Drafts) -> Verified:
    """A draft stands if it is the likeliest token."""
    token_BJ = x_BJV.argmax(-1)
    logprob_BJ = torch.zeros_like(raw_BJV[..., 0])
    return _verified(raw_BJV, token_BJ, logprob_BJ, drafts, token_BJ[:, :-1] == drafts.token_BK)


def judged(
    raw_BJV: Tensor, logp_BJV: Tensor, number_BJ: Tensor, verdict_BJ: Tensor, drafts: Drafts, is_free_B: Tensor
) -> Verified:
    """`logp_BJV`: log p. `number_BJ` draws tokens, `verdict_BJ` accepts drafts where they are free to decide."""
    logq_BKV, draft_BK, shape = drafts.logprob_BKV, drafts.token_BK, logp_BJV.shape[:2]
    if logq_BKV is None:
        token_BJ = pick(logp_BJV.flatten(0, 1), number_BJ.flatten()).view(shape)
        stands_BK = token_BJ[:, :-1] == draft_BK
    else:
        is_free_BK = is_free_B[:, None] & drafts.is_there_BK
        left_BKV = torch.where(is_free_BK[..., None], residual(logp_BJV[:, :-1], logq_BKV), logp_BJV[:, :-1])
        left_BJV = torch.cat((left_BKV, logp_BJV[:, -1:]), 1)
        token_BJ = pick(left_BJV.flatten(0, 1), number_BJ.flatten()).view(shape)
        p_BK, q_BK = at(logp_BJV[:, :-1], draft_BK).double().exp(), at(logq_BKV, draft_BK).double().exp()
        stands_BK = torch.where(is_free_BK, verdict_BJ[:, :-1] * q_BK < p_BK, token_BJ[:, :-1] == draft_BK)
        token_BJ = torch.cat((torch.where(stands_BK, draft_BK, token_BJ[:, :-1]), token_BJ[:, -1:]), 1)
    return _verified(raw_BJV, token_BJ, at(logp_BJV, token_BJ), drafts, stands_BK)


def _verified(raw_BJV: Tensor, token_BJ: Tensor, logprob_BJ: Tensor, drafts: Drafts, stands_BK: Tensor) -> Verified:
    num_B = 1 + (stands_BK & drafts.is_there_BK).long().cumprod(1).sum(1)
    return Verified(token_BJ, logprob_BJ, at(raw_BJV, token_BJ) - raw_BJV.logsumexp(-1), num_B)


def residual(logp_BKV: Tensor, logq_BKV: Tensor) -> Tensor:
    """The logarithm of what a rejected draft is replaced from; p itself where rounding leaves nothing of it, and where
    q is no number, because then no draft stands."""
    gain_BKV = (logp_BKV.exp() - logq_BKV.exp()).clamp(min=0)
    total_BK1 = gain_BKV.sum(-1, keepdim=True)
    return torch.where(total_BK1 > 0, (gain_BKV / total_BK1).log(), logp_BKV)
