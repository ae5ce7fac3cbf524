"""Losses of the multi-token prediction (MTP) modules at the loss edges of the main model.

`mtp_ce` learns the sampled tokens. `mtp_topk` distills the policy into the modules, over its K likeliest tokens and one
bucket for the rest:

    L_k = Σ_m weight[m] · D_m
    topk_kl            D = Σ_i p_i · log(p_i / q_i)
    topk_acceptance    D = − log A,    A = Σ_i min(p_i, q_i)         i: the top's tokens, and R, the rest

p is the policy, detached, q module k, both at the sampling temperature, because that is where drafts are accepted or
rejected; p_R = Σ_{v ∉ top} p_v. A is the acceptance rate of a draft, up to what the bucket of the rest hides. Where a
module cannot know which token the policy will be sure of, the first loss spreads its probability, the second puts it on
one token.

With z the module's logits over the temperature, s_i = [q_i < p_i]:

    g_i = q_i − p_i    or    − q_i · (s_i − Σ_j s_j · q_j) / A
    ∂D/∂z_v = g_v                     for v ∈ top
    ∂D/∂z_v = g_R · q_v / q_R         else

Both rests are summed over their own tokens in log space, and q_v / q_R = exp(z_v − logsumexp of the rest) is at most 1,
so nothing overflows and nothing cancels where the rest is near 0.

Shapes: M loss edges, C edges of a chunk, K likeliest tokens, I = K + 1 buckets.
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from m2forge.kernels.head_loss import (
    TopTokens,
    computable,
    linear_cross_entropy,
    linear_loss,
    log_sum_exp,
    rest_log_sum_exp_,
    scaled_at,
    softmax_grad_,
)

TopLoss: TypeAlias = Literal["topk_kl", "topk_acceptance"]


def mtp_ce(
    hidden_ND: Tensor, head_VD: Tensor, target_M: Tensor, *, position_M: Tensor, weight_M: Tensor, float32_head: bool
) -> tuple[Tensor, Tensor]:
    """(L_k of one module, − log p_k of each edge without gradient).

        L_k = Σ_m  weight[m] · ( − log p_k(target[m]) )        module k, edge m

    p_k is the softmax of module k at temperature 1, whatever temperature the token was sampled at.
    """
    return linear_cross_entropy(
        hidden_ND, head_VD, target_M, position_M=position_M, weight_M=weight_M, float32_head=float32_head
    )


def mtp_topk(
    kind: TopLoss,
    hidden_ND: Tensor,
    head_VD: Tensor,
    top: TopTokens,
    *,
    position_M: Tensor,
    weight_M: Tensor,
    inverse_temperature_M: Tensor | None,
    float32_head: bool,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(L_k of one module, D of each edge without gradient). `top`: the policy's top tokens at the same edges."""
    measure = {"topk_kl": _kl, "topk_acceptance": _acceptance}[kind]
    loss_M = torch.empty_like(top.rest_M)
    weight_M = weight_M.to(loss_M.dtype)
    scale_M = None if inverse_temperature_M is None else inverse_temperature_M.to(loss_M.dtype)
    logp_MI = torch.cat((top.logp_MK, top.rest_M[:, None]), 1)

    def score(logits_CV: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        logits_CV = computable(logits_CV)
        scale_C, id_CK = None if scale_M is None else scale_M[chunk], top.id_MK[chunk].long()
        lse_C = log_sum_exp(logits_CV, scale_C)
        logit_CK = scaled_at(logits_CV, scale_C, id_CK)
        lse_rest_C = rest_log_sum_exp_(logits_CV, scale_C, id_CK)
        logq_CI = torch.cat((logit_CK, lse_rest_C[:, None]), 1) - lse_C[:, None]
        loss_M[chunk], grad_CI = measure(logp_MI[chunk], logq_CI)
        factor_C = weight_M[chunk] if scale_C is None else weight_M[chunk] * scale_C
        grad_CI = factor_C[:, None] * grad_CI
        # The logits of the top tokens are −∞ here, and an empty rest must not be a divisor.
        lse_rest_C = torch.where(lse_rest_C.isinf(), 0.0, lse_rest_C)
        grad_CV = softmax_grad_(logits_CV, scale_C, lse_rest_C, grad_CI[:, -1])
        grad_CV.scatter_(1, id_CK, grad_CI[:, :-1].to(grad_CV.dtype))
        return torch.dot(loss_M[chunk], weight_M[chunk]), grad_CV

    loss = linear_loss(hidden_ND, head_VD, position_M, score, float32_head=float32_head, chunk_bytes=chunk_bytes)
    return loss, loss_M


def _kl(logp_CI: Tensor, logq_CI: Tensor) -> tuple[Tensor, Tensor]:
    """(D, g)."""
    p_CI = logp_CI.exp()
    return torch.where(p_CI > 0, p_CI * (logp_CI - logq_CI), 0.0).sum(-1), logq_CI.exp() - p_CI


def _acceptance(logp_CI: Tensor, logq_CI: Tensor) -> tuple[Tensor, Tensor]:
    """(D, g)."""
    q_CI, is_less_CI = logq_CI.exp(), logq_CI < logp_CI
    log_accepted_C = torch.minimum(logp_CI, logq_CI).logsumexp(-1)
    spared_C1 = torch.where(is_less_CI, q_CI, 0.0).sum(-1, keepdim=True)
    share_CI = (logq_CI - log_accepted_C[:, None]).exp()
    return -log_accepted_C, share_CI * (spared_C1 - is_less_CI.to(q_CI.dtype))
