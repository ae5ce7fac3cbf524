"""The language-model loss with multi-token prediction.

    L = L_0 + (λ / K) · Σ_{k=1..K} L_k
    L_k = (1 / T) · Σ over loss edges of  −log p_k(target)          T: edges of the whole optimizer step

p_0 is the main model, p_k the prediction of MTP module k for the same token. Dividing by the step's T, not the pack's,
makes the sum over packs the mean over the step, however edges are split over packs. Modules may learn from the main
model instead of the text: L_k, k ≥ 1, is then one of the losses of `mtp_topk`.

Shapes: M loss edges.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from m2forge.kernels.arithmetic import at_least_float32
from m2forge.kernels.head_loss import TopTokens, linear_cross_entropy, linear_logprob
from m2forge.model.transformer import Output, Transformer
from m2forge.train.batch import Batch
from m2forge.train.config import MTPLoss
from m2forge.train.loss.mtp import TopLoss, mtp_topk


@dataclass(frozen=True)
class NextTokenLoss:
    total: Tensor
    """The tensor to differentiate: this pack's share of the step's loss."""
    nll_M: Tensor
    """Negative logprob of each edge's target under the main model, without gradient."""
    mtp_sums: tuple[Tensor, ...]
    """Loss of each module, summed over this pack's edges, without gradient."""


def next_token_loss(
    model: Transformer,
    output: Output,
    batch: Batch,
    *,
    num_edges: float,
    mtp_weight: float,
    mtp_loss: MTPLoss = "ce",
    mtp_top_k: int = 32,
) -> NextTokenLoss:
    """`num_edges`: loss edges of the whole step."""
    precision = at_least_float32(output.hidden_ND.dtype)
    weight_M = torch.full_like(batch.target_M, 1.0 / max(1, num_edges), dtype=precision)
    head_VD, position_M, float32_head = model.head_weight, batch.position_M, model.config.float32_head

    def cross_entropy(hidden_ND: Tensor) -> tuple[Tensor, Tensor]:
        return linear_cross_entropy(
            hidden_ND,
            head_VD,
            batch.target_M,
            position_M=position_M,
            weight_M=weight_M,
            float32_head=float32_head,
        )

    def divergence(kind: TopLoss, hidden_ND: Tensor, top: TopTokens) -> tuple[Tensor, Tensor]:
        return mtp_topk(
            kind,
            hidden_ND,
            head_VD,
            top,
            position_M=position_M,
            weight_M=weight_M,
            inverse_temperature_M=None,
            float32_head=float32_head,
        )

    def term(logp_C: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        return -logp_C * weight_M[chunk], -weight_M[chunk]

    top = None
    if mtp_loss != "ce" and output.mtp_hidden_ND:
        found = linear_logprob(
            output.hidden_ND,
            head_VD,
            batch.target_M,
            position_M=position_M,
            term=term,
            top_k=mtp_top_k,
            float32_head=float32_head,
        )
        total, nll_M, top = found.loss, -found.logp_M, found.top
    else:
        total, nll_M = cross_entropy(output.hidden_ND)
    mtp_sums = []
    for hidden_ND in output.mtp_hidden_ND:
        if mtp_loss == "ce" or top is None:
            loss, draft_M = cross_entropy(hidden_ND)
        else:
            loss, draft_M = divergence(mtp_loss, hidden_ND, top)
        mtp_sums.append(draft_M.sum())
        if mtp_weight:
            total = total + mtp_weight / len(output.mtp_hidden_ND) * loss
    return NextTokenLoss(total, nll_M, tuple(mtp_sums))


@torch.no_grad()
def draft_agreement(model: Transformer, output: Output, batch: Batch, max_edges: int = 256) -> list[Tensor]:
    """For each MTP module, the share of evenly spaced edges where its argmax token equals the main model's."""
    stride = max(1, batch.position_M.shape[0] // max_edges)
    position_S = batch.position_M[::stride]
    choice_S = model.logits(output.hidden_ND[position_S]).argmax(-1)
    drafts = (model.logits(hidden_ND[position_S]).argmax(-1) for hidden_ND in output.mtp_hidden_ND)
    return [(draft_S == choice_S).float().mean() for draft_S in drafts]
