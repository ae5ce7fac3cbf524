"""Speculative decoding: verifies the drafts of the MTP modules without changing the distribution of the output.

Draft k of a sequence was sampled from q_k. If the drafts before it are accepted, the sampler would sample its position
from p_k; one pass of the main model over all drafts gives every p. With a random number u in [0, 1):

    draft d is accepted if                           u · q_k(d) < p_k(d)
    the first rejected one is replaced by a sample of max(p_k − q_k, 0) / Σ max(p_k − q_k, 0)
    if all are accepted, one more token is sampled from p

so that every token has the distribution p, whatever q was (Leviathan et al., 2023). A good q only saves steps.

With a seed, token t must be a function of the seed: it is sampled from p by the seed's random number, as without
drafts, and a draft is accepted if it equals that token. For greedy sampling both rules are the same. Drafts are then
the module's argmax tokens.

Shapes: B sequences, K drafts of each at most, J = K + 1 rows of logits, R = B·J, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from m2forge.kernels.arithmetic import raised
from m2forge.rollout.execution.sampler import Row, at, distribution, numbers, penalised, pick


class Drafts(NamedTuple):
    token_BK: Tensor
    num_B: Tensor
    """Number of drafts of each sequence."""
    logprob_BKV: Tensor | None
    """log q; None where all drafts are argmax tokens."""

    @property
    def is_there_BK(self) -> Tensor:
        return torch.arange(self.token_BK.shape[1], device=self.token_BK.device) < self.num_B[:, None]


class Verified(NamedTuple):
    token_BJ: Tensor
    logprob_BJ: Tensor
    """Log-probability under p."""
    raw_logprob_BJ: Tensor
    num_B: Tensor
    """Number of tokens that count in each sequence: the accepted drafts, and one."""


def is_free(row: Row) -> bool:
    """Whether acceptance by u · q < p applies: unseeded, at a temperature above 0."""
    return not row.is_seeded and row.sampling.temperature > 0


@torch.no_grad()
def draft(logits_BV: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor | None]:
    """Samples a draft for each row; returns it and log q. Penalties, which depend on earlier drafts, are left to
    verification."""
    free = [is_free(row) for row in rows]
    if not any(free):
        return logits_BV.argmax(-1), None
    logq_BV, number_B = distribution(raised(logits_BV), rows), numbers(rows, "draft", logits_BV.device)
    return drafted(logits_BV, logq_BV, number_B, torch.tensor(free, device=logits_BV.device)), logq_BV


def drafted(logits_BV: Tensor, logq_BV: Tensor, number_B: Tensor, is_free_B: Tensor) -> Tensor:
    return torch.where(is_free_B, pick(logq_BV, number_B), logits_BV.argmax(-1))


@torch.no_grad()
def verify(logits_BJV: Tensor, rows: Sequence[Row], drafts: Drafts) -> Verified:
    """`rows`: J for each sequence, counting the drafts before each row as sampled. A sequence with fewer drafts than
    others repeats its last row."""
    raw_BJV, shape = raised(logits_BJV), logits_BJV.shape[:2]
    x_RV = penalised(raw_BJV.flatten(0, 1), rows)
    if all(row.sampling.temperature == 0 for row in rows):
        return judged_greedy(raw_BJV, x_RV.view_as(raw_BJV), drafts)
    logp_BJV, device = distribution(x_RV, rows).unflatten(0, shape), logits_BJV.device
    token_BJ, verdict_BJ = (numbers(rows, stream, device).view(shape) for stream in ("token", "verdict"))
    is_free_BJ = torch.tensor([is_free(row) for row in rows], device=device).view(shape)
    return judged(raw_BJV, logp_BJV, token_BJ, verdict_BJ, drafts, is_free_BJ[:, 0])


def judged_greedy(raw_BJV: Tensor, x_BJV: Tensor, drafts: Drafts) -> Verified:
    """Accepts a draft if it is the argmax token."""
    token_BJ = x_BJV.argmax(-1)
    logprob_BJ = torch.zeros_like(raw_BJV[..., 0])
    return _verified(raw_BJV, token_BJ, logprob_BJ, drafts, token_BJ[:, :-1] == drafts.token_BK)


def judged(
    raw_BJV: Tensor, logp_BJV: Tensor, number_BJ: Tensor, verdict_BJ: Tensor, drafts: Drafts, is_free_B: Tensor
) -> Verified:
    """`logp_BJV`: log p. `number_BJ` samples tokens; `verdict_BJ` accepts drafts of sequences where `is_free_B`."""
    logq_BKV, draft_BK, shape = drafts.logprob_BKV, drafts.token_BK, logp_BJV.shape[:2]
    if logq_BKV is None:
        token_BJ = pick(logp_BJV.flatten(0, 1), number_BJ.flatten()).view(shape)
        is_accepted_BK = token_BJ[:, :-1] == draft_BK
    else:
        is_free_BK = is_free_B[:, None] & drafts.is_there_BK
        left_BKV = torch.where(is_free_BK[..., None], residual(logp_BJV[:, :-1], logq_BKV), logp_BJV[:, :-1])
        left_BJV = torch.cat((left_BKV, logp_BJV[:, -1:]), 1)
        token_BJ = pick(left_BJV.flatten(0, 1), number_BJ.flatten()).view(shape)
        p_BK, q_BK = at(logp_BJV[:, :-1], draft_BK).double().exp(), at(logq_BKV, draft_BK).double().exp()
        is_accepted_BK = torch.where(is_free_BK, verdict_BJ[:, :-1] * q_BK < p_BK, token_BJ[:, :-1] == draft_BK)
        token_BJ = torch.cat((torch.where(is_accepted_BK, draft_BK, token_BJ[:, :-1]), token_BJ[:, -1:]), 1)
    return _verified(raw_BJV, token_BJ, at(logp_BJV, token_BJ), drafts, is_accepted_BK)


def _verified(
    raw_BJV: Tensor, token_BJ: Tensor, logprob_BJ: Tensor, drafts: Drafts, is_accepted_BK: Tensor
) -> Verified:
    num_B = 1 + (is_accepted_BK & drafts.is_there_BK).long().cumprod(1).sum(1)
    return Verified(token_BJ, logprob_BJ, at(raw_BJV, token_BJ) - raw_BJV.logsumexp(-1), num_B)


def residual(logp_BKV: Tensor, logq_BKV: Tensor) -> Tensor:
    """Log of the distribution that replaces a rejected draft; log p where rounding leaves no mass, and where q is NaN,
    because then every draft is rejected."""
    gain_BKV = (logp_BKV.exp() - logq_BKV.exp()).clamp(min=0)
    total_BK1 = gain_BKV.sum(-1, keepdim=True)
    return torch.where(total_BK1 > 0, (gain_BKV / total_BK1).log(), logp_BKV)
