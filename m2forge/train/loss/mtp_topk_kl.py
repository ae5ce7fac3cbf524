"""Drafts that follow the policy: KL divergence over the policy's K likeliest tokens and one bucket for all others.

    L_k = Σ_m weight[m] · KL_m,    KL = Σ_{i ∈ top} p_i · log(p_i / q_i) + p_R · log(p_R / q_R)

p is the policy, detached, q module k, both at the temperature that the token was sampled at, because that is where
drafts are accepted or refused; R is the rest, p_R = Σ_{v ∉ top} p_v. With z the module's logits over the temperature:

    ∂KL/∂z_v = q_v − p_v                    for v ∈ top
    ∂KL/∂z_v = (q_R − p_R) · q_v / q_R      else

Either rest is summed over its own tokens in the logarithm, and q_v / q_R = exp(z_v − logsumexp of the rest) is at most
1, so nothing overflows and nothing cancels where the rest is near 0.

Shapes: M loss edges, C edges of a chunk, K likeliest tokens.
"""

import torch
from torch import Tensor

from m2forge.kernels.linear_loss import linear_loss
from m2forge.kernels.logprob import (
    TopTokens,
    computable,
    log_sum_exp,
    rest_log_sum_exp_,
    scaled_at,
    softmax_grad_,
)


def mtp_topk_kl(
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
    """(L_k of one module, KL of each edge without gradient). `top`: of the policy, at the same edges."""
    kl_M = torch.empty_like(top.rest_M)
    weight_M = weight_M.to(kl_M.dtype)
    scale_M = None if inverse_temperature_M is None else inverse_temperature_M.to(kl_M.dtype)

    def score(logits_CV: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        logits_CV = computable(logits_CV)
        scale_C, id_CK = None if scale_M is None else scale_M[chunk], top.id_MK[chunk].long()
        p_CK, p_rest_C = top.logp_MK[chunk].exp(), top.rest_M[chunk].exp()
        lse_C = log_sum_exp(logits_CV, scale_C)
        logq_CK = scaled_at(logits_CV, scale_C, id_CK) - lse_C[:, None]
        lse_rest_C = rest_log_sum_exp_(logits_CV, scale_C, id_CK)
        logq_rest_C = lse_rest_C - lse_C
        kl_M[chunk] = (p_CK * (top.logp_MK[chunk] - logq_CK)).sum(-1)
        kl_M[chunk] += torch.where(p_rest_C > 0, p_rest_C * (top.rest_M[chunk] - logq_rest_C), 0.0)
        factor_C = weight_M[chunk] if scale_C is None else weight_M[chunk] * scale_C
        # The logits of the top are −∞ by here, and a rest of nothing is no divisor.
        lse_rest_C = torch.where(lse_rest_C.isinf(), 0.0, lse_rest_C)
        grad_CV = softmax_grad_(logits_CV, scale_C, lse_rest_C, factor_C * (logq_rest_C.exp() - p_rest_C))
        grad_CK = factor_C[:, None] * (logq_CK.exp() - p_CK)
        grad_CV.scatter_(1, id_CK, grad_CK.to(grad_CV.dtype))
        return torch.dot(kl_M[chunk], weight_M[chunk]), grad_CV

    loss = linear_loss(hidden_ND, head_VD, position_M, score, float32_head=float32_head, chunk_bytes=chunk_bytes)
    return loss, kl_M
