"""The loss of a step over token trees: one policy term per loss edge, plus the loss of the MTP modules.

    L = Σ_m w_m · term(logp_m) + (λ / K) · Σ_{k=1..K} L_k,    w_m = weight of m's sample / Σ over the step of all edges'

logp is under softmax(z / temperature), the distribution the token was sampled from. Dividing by the sum over the whole
step makes the sum over packs and ranks the weighted mean over the step, however edges are split over them.

A term is a function that returns its value and its slope, the derivative by logp: `cispo`, `ppo_clip` or `sft`.

Shapes: M loss edges.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from m2forge.kernels.head_loss import LogProbs, TopTokens, linear_logprob
from m2forge.model.transformer import Output, Transformer
from m2forge.train.batch import TreeBatch
from m2forge.train.config import MTPLoss, PolicyConfig
from m2forge.train.loss.mtp import mtp_ce, mtp_topk

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyLoss:
    total: Tensor
    """The tensor to differentiate: this pack's share of the step's loss."""
    main: Tensor
    """The policy's part of `total`, without gradient."""
    logp_M: Tensor
    entropy_M: Tensor
    mtp: tuple[Tensor, ...]
    """L_k of each module, without gradient."""


def policy_loss(model: Transformer, output: Output, batch: TreeBatch, config: PolicyConfig) -> PolicyLoss:
    def term(logp_C: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        value_C, slope_C = policy_term(config, logp_C, batch.old_M[chunk], batch.advantage_M[chunk])
        return value_C * batch.weight_M[chunk], slope_C * batch.weight_M[chunk]

    learns = bool(config.mtp_weight and output.mtp_hidden_ND)
    found: LogProbs = linear_logprob(
        output.hidden_ND,
        model.head_weight,
        batch.target_M,
        position_M=batch.position_M,
        term=term,
        inverse_temperature_M=batch.inverse_temperature_M,
        top_k=config.mtp_top_k if learns and config.mtp_loss != "ce" else 0,
        float32_head=model.config.float32_head,
    )
    head_VD = model.head_weight if config.mtp_gradient == "all" else model.head_weight.detach()
    drafts = [
        _draft_loss(config.mtp_loss, hidden_ND, head_VD, batch, found.top, model.config.float32_head)
        for hidden_ND in (output.mtp_hidden_ND if learns else ())
    ]
    total = found.loss
    for loss in drafts:
        total = total + config.mtp_weight / len(drafts) * loss
    mtp = tuple(loss.detach() for loss in drafts)
    return PolicyLoss(total, found.loss.detach(), found.logp_M, found.entropy_M, mtp)


def policy_term(config: PolicyConfig, logp_M: Tensor, old_M: Tensor, advantage_M: Tensor) -> tuple[Tensor, Tensor]:
    """(value, slope) of each edge, unweighted."""
    match config.loss:
        case "cispo":
            return cispo(logp_M, old_M, advantage_M, config.max_ratio)
        case "ppo_clip":
            return ppo_clip(logp_M, old_M, advantage_M, config.ppo_low, config.ppo_high)
        case "sft":
            return sft(logp_M)


def cispo(logp_M: Tensor, old_M: Tensor, advantage_M: Tensor, max_ratio: float) -> tuple[Tensor, Tensor]:
    """CISPO: every token keeps its gradient; only the weight of that gradient is clipped.

        term = − sg( min(r, max_ratio) ) · A · logp,    r = π / π_old of the token

        value = − min(r, max_ratio) · A · logp
        slope = − min(r, max_ratio) · A

    sg: no gradient flows through the ratio. There is no lower bound and no KL term. The loss of a step is the mean of
    the terms over all its sampled tokens, unless samples are weighted otherwise.
    """
    slope_M = -importance_ratio(logp_M, old_M).clamp(max=max_ratio) * advantage_M
    return slope_M * logp_M, slope_M


def ppo_clip(logp_M: Tensor, old_M: Tensor, advantage_M: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate, for comparison: a token whose ratio leaves the interval in the direction of its
    advantage gets no gradient.

        term = − min( r · A, clip(r, 1 − low, 1 + high) · A ),    r = π / π_old of the token

        value = term
        slope = − r · A  where r · A is the lesser,  else 0
    """
    ratio_M = importance_ratio(logp_M, old_M)
    unclipped_M = ratio_M * advantage_M
    bound_M = ratio_M.clamp(1 - low, 1 + high) * advantage_M
    return -torch.minimum(unclipped_M, bound_M), torch.where(unclipped_M <= bound_M, -unclipped_M, 0.0)


def sft(logp_M: Tensor) -> tuple[Tensor, Tensor]:
    """Imitation of the sampled tokens, whatever model sampled them and whatever reward they earned.

        value = − logp
        slope = − 1

    logp is under the softmax at temperature 1, whatever the sampling temperature: there is no old policy to match.
    """
    return -logp_M, -torch.ones_like(logp_M)


def importance_ratio(logp_M: Tensor, old_M: Tensor) -> Tensor:
    """A token's probability under the current policy over that when it was sampled.

        r = π(token) / π_old(token) = exp( min(logp − old, MAX_LOG_RATIO) )

    A ratio that far from 1 means that the old logprob belongs to another policy. The bound prevents an infinity that,
    times 0, becomes NaN; it is not a clip: cispo clips far below it, ppo_clip only where A > 0.
    """
    return (logp_M - old_M).clamp(max=MAX_LOG_RATIO).exp()


def _draft_loss(
    kind: MTPLoss, hidden_ND: Tensor, head_VD: Tensor, batch: TreeBatch, top: TopTokens | None, float32_head: bool
) -> Tensor:
    if kind == "ce" or top is None:
        loss, _ = mtp_ce(
            hidden_ND,
            head_VD,
            batch.target_M,
            position_M=batch.position_M,
            weight_M=batch.weight_M,
            float32_head=float32_head,
        )
    else:
        loss, _ = mtp_topk(
            kind,
            hidden_ND,
            head_VD,
            top,
            position_M=batch.position_M,
            weight_M=batch.weight_M,
            inverse_temperature_M=batch.inverse_temperature_M,
            float32_head=float32_head,
        )
    return loss


@torch.no_grad()
def is_clipped(config: PolicyConfig, ratio_M: Tensor, advantage_M: Tensor) -> Tensor:
    """Edges whose gradient the clip changes."""
    match config.loss:
        case "cispo":
            return ratio_M > config.max_ratio
        case "ppo_clip":
            too_high_M = (ratio_M > 1 + config.ppo_high) & (advantage_M > 0)
            return too_high_M | ((ratio_M < 1 - config.ppo_low) & (advantage_M < 0))
        case "sft":
            return torch.zeros_like(ratio_M, dtype=torch.bool)
