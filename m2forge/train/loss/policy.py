"""The loss of a step over token trees: one policy term per loss edge, plus the loss of the MTP modules.

    L = Σ_m w_m · term(logp_m) + (λ / K) · Σ_{k=1..K} L_k,    w_m = weight of m's sample / Σ over the step of all edges'

logp is under softmax(z / temperature), the distribution the token was sampled from. Dividing by the sum over the whole
step makes the sum over packs and ranks the weighted mean over the step, however edges are split over them.

Shapes: M loss edges.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from m2forge.kernels.logprob import LogProbs, TopTokens, linear_logprob
from m2forge.model.transformer import Output, Transformer
from m2forge.train.batch import TreeBatch
from m2forge.train.config import MTPLoss, PolicyConfig
from m2forge.train.loss.cispo import cispo
from m2forge.train.loss.mtp_ce import mtp_ce
from m2forge.train.loss.mtp_topk import mtp_topk
from m2forge.train.loss.ppo_clip import ppo_clip
from m2forge.train.loss.sft import sft


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


def policy_term(config: PolicyConfig, logp_M: Tensor, old_M: Tensor, advantage_M: Tensor) -> tuple[Tensor, Tensor]:
    """(value, slope) of each edge, unweighted."""
    match config.loss:
        case "cispo":
            return cispo(logp_M, old_M, advantage_M, config.max_ratio)
        case "ppo_clip":
            return ppo_clip(logp_M, old_M, advantage_M, config.ppo_low, config.ppo_high)
        case "sft":
            return sft(logp_M)


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
