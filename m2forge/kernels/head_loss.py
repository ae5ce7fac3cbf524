"""Losses from hidden states through the LM head, one chunk of logits at a time.

    loss = Σ over chunks of score(z),    z[m] = head · hidden[position[m]]

Only positions that carry a loss are multiplied with the head, and about `CHUNK_BYTES` (logit_chunk.py) of logits exist
at once. `score` also returns the gradient of its loss with respect to the logits, so the forward pass computes the
gradients of hidden states and head while a chunk's logits exist, and nothing is recomputed.

Shapes: N tokens, M loss positions, C positions of a chunk, D hidden size, V vocabulary, K top tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from m2forge.kernels import arithmetic as native
from m2forge.kernels.arithmetic import at_least_float32, raised
from m2forge.kernels.linear import linear_float32
from m2forge.logit_chunk import chunk_rows

Score: TypeAlias = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""(logits_CV, slice of the M positions) → (loss summed over them, its gradient with respect to the logits). `score` may
reuse the logits' memory for the gradient."""
Term: TypeAlias = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""(logp_C, slice of the M positions) → (value_C, slope_C), where slope is the derivative of value by logp."""


# -- any loss ----------------------------------------------------------------------------------------------------------


def linear_loss(
    hidden_ND: Tensor,
    head_VD: Tensor,
    position_M: Tensor,
    score: Score,
    *,
    float32_head: bool = False,
    chunk_bytes: int | None = None,
) -> Tensor:
    """A position may occur several times. Call it outside compiled regions."""
    rows = chunk_rows(head_VD.shape[0], hidden_ND.element_size(), hidden_ND.device.type, chunk_bytes)
    if not torch.is_grad_enabled():
        hidden_ND, head_VD = hidden_ND.detach(), head_VD.detach()
    inputs = (hidden_ND, head_VD, position_M, score, float32_head, rows)
    loss: Tensor = _LinearLoss.apply(*inputs)  # type: ignore[no-untyped-call]
    return loss


def check_targets(target_M: Tensor, vocab_size: int) -> None:
    if target_M.dtype != torch.int64:
        raise ValueError(f"targets are {target_M.dtype}; give token ids as torch.int64")
    if target_M.is_cuda:
        torch._assert_async(((target_M >= 0) & (target_M < vocab_size)).all())
    elif target_M.numel() and not 0 <= int(target_M.min()) <= int(target_M.max()) < vocab_size:
        lowest, highest = int(target_M.min()), int(target_M.max())
        raise ValueError(
            f"targets from {lowest} to {highest} leave the vocabulary of {vocab_size}; "
            "leave positions without a loss out of position_M"
        )


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head_VD: Tensor,
        position_M: Tensor,
        score: Score,
        float32_head: bool,
        rows: int,
    ) -> Tensor:
        needs_hidden, needs_head, *_ = ctx.needs_input_grad
        loss = hidden_ND.new_zeros((), dtype=at_least_float32(hidden_ND.dtype))
        # In at least float32: positions repeat where trees branch, and CUDA would round after every addition.
        grad_hidden = torch.zeros_like(hidden_ND, dtype=at_least_float32(hidden_ND.dtype)) if needs_hidden else None
        grad_head = torch.zeros_like(head_VD, dtype=at_least_float32(head_VD.dtype)) if needs_head else None
        for start in range(0, position_M.shape[0], rows):
            chunk = slice(start, start + rows)
            hidden_CD = hidden_ND.index_select(0, position_M[chunk])
            logits_CV = linear_float32(hidden_CD, head_VD) if float32_head else hidden_CD @ head_VD.t()
            value, grad_CV = score(logits_CV, chunk)
            loss += value
            grad_CV = grad_CV.to(hidden_ND.dtype)
            if grad_hidden is not None:
                grad_hidden.index_add_(0, position_M[chunk], (grad_CV @ head_VD).to(grad_hidden.dtype))
            if grad_head is not None:
                grad_head += grad_CV.t() @ hidden_CD
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden_ND.dtype)
        grad_head = None if grad_head is None else grad_head.to(head_VD.dtype)
        ctx.save_for_backward(grad_hidden, grad_head)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if g is None else _scaled(g, grad) for g in ctx.saved_tensors)
        return *grads, None, None, None, None


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """Rounds the product once: rounding the factor to bfloat16 first would bias all gradients in the same direction."""
    out = torch.empty_like(gradient)
    for part, to in zip(gradient.split(1 << 14), out.split(1 << 14), strict=True):
        to.copy_(raised(part) * factor)
    return out


# -- logprobs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TopTokens:
    """The most likely tokens at each position, and the total of all others."""

    id_MK: Tensor
    """int32."""
    logp_MK: Tensor
    rest_M: Tensor
    """Log of the total probability of all other tokens; −∞ where there are none."""


@dataclass(frozen=True)
class LogProbs:
    loss: Tensor
    logp_M: Tensor
    entropy_M: Tensor
    top: TopTokens | None


def linear_logprob(
    hidden_ND: Tensor,
    head_VD: Tensor,
    target_M: Tensor,
    *,
    position_M: Tensor,
    term: Term,
    inverse_temperature_M: Tensor | None = None,
    top_k: int = 0,
    float32_head: bool = False,
    chunk_bytes: int | None = None,
) -> LogProbs:
    """Logprobs, and any loss that is a function of them.

        z[m] = head · hidden[position[m]] / temperature[m]
        logp[m] = z[m, target[m]] − logsumexp_v z[m,v]
        loss = Σ_m value(logp[m]),    ∂loss/∂z[m,v] = slope(logp[m]) · ( [v = target[m]] − p[m,v] )

    `term` returns value and slope for a chunk's logprobs. Returned beside the loss, without gradient: logp, the entropy
    of p and, on request, the top tokens. `row_statistics` and `softmax_grad_` are the two passes over a chunk of
    logits, each one kernel; on CUDA they make no copy of the logits in higher precision. Without
    `inverse_temperature_M` every temperature is 1. `top_k`: number of top tokens to return.
    """
    columns = [x for x in (position_M, target_M, inverse_temperature_M) if x is not None]
    if any(x.shape != target_M.shape for x in columns):
        shapes = [tuple(x.shape) for x in columns]
        raise ValueError(f"positions, targets and temperatures differ in shape: {shapes}; give one of each per loss")
    check_targets(target_M, head_VD.shape[0])
    precision, num_losses = at_least_float32(hidden_ND.dtype), target_M.shape[0]
    scale_M = None if inverse_temperature_M is None else inverse_temperature_M.to(precision)
    logp_M = hidden_ND.new_empty(num_losses, dtype=precision)
    entropy_M = torch.empty_like(logp_M)
    top = _empty_top(logp_M, min(top_k, head_VD.shape[0])) if top_k else None

    def score(logits_CV: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        logits_CV = computable(logits_CV)
        target_C, scale_C = target_M[chunk], None if scale_M is None else scale_M[chunk]
        lse_C, mean_C = row_statistics(logits_CV, scale_C)
        logp_C = scaled_at(logits_CV, scale_C, target_C[:, None])[:, 0] - lse_C
        logp_M[chunk], entropy_M[chunk] = logp_C, lse_C - mean_C
        if top is not None:
            _find_top(logits_CV, scale_C, lse_C, top, chunk)
        value_C, slope_C = term(logp_C, chunk)
        factor_C = -slope_C if scale_C is None else -slope_C * scale_C
        return value_C.sum(), softmax_grad_(logits_CV, scale_C, lse_C, factor_C, target_C)

    loss = linear_loss(hidden_ND, head_VD, position_M, score, float32_head=float32_head, chunk_bytes=chunk_bytes)
    return LogProbs(loss, logp_M, entropy_M, top)


def linear_logprob_plain(hidden_ND: Tensor, head_VD: Tensor, target_N: Tensor, temperature_N: Tensor) -> Tensor:
    """logp of every token with all logits at once: the reference that the chunked form must equal."""
    logits_NV = raised(hidden_ND @ head_VD.t()) / temperature_N[:, None]
    return F.log_softmax(logits_NV, -1).gather(1, target_N[:, None])[:, 0]


def computable(logits_CV: Tensor) -> Tensor:
    """The dtype that the functions below need: at least float32 on a CPU; CUDA kernels upcast as they read."""
    return logits_CV if logits_CV.is_cuda else raised(logits_CV)


def row_statistics(logits_CV: Tensor, scale_C: Tensor | None) -> tuple[Tensor, Tensor]:
    """(logsumexp_v z, Σ_v p·z) of each row, z = scale · logits."""
    if logits_CV.is_cuda:
        from m2forge.kernels.head_loss_triton import row_statistics as statistics

        return statistics(logits_CV, scale_C)
    if _is_native(logits_CV, scale_C):
        lse_C, mean_C = logits_CV.new_empty(2, logits_CV.shape[0])
        native.call("row_statistics", logits_CV, scale_C, *logits_CV.shape, lse_C, mean_C)
        return lse_C, mean_C
    z_CV = logits_CV if scale_C is None else logits_CV * scale_C[:, None]
    lse_C = z_CV.logsumexp(-1)
    p_CV = (z_CV - lse_C[:, None]).exp_()
    return lse_C, p_CV.mul_(z_CV).sum(-1)


def log_sum_exp(logits_CV: Tensor, scale_C: Tensor | None) -> Tensor:
    """Logits of −∞ are ignored; at least one must be finite."""
    if logits_CV.is_cuda or _is_native(logits_CV, scale_C):
        return row_statistics(logits_CV, scale_C)[0]
    return (logits_CV if scale_C is None else logits_CV * scale_C[:, None]).logsumexp(-1)


def softmax_grad_(
    logits_CV: Tensor, scale_C: Tensor | None, lse_C: Tensor, factor_C: Tensor, target_C: Tensor | None = None
) -> Tensor:
    """factor · ( exp(scale · logits − lse) − [v = target] ), in place of the logits."""
    if logits_CV.is_cuda:
        from m2forge.kernels.head_loss_triton import softmax_grad_ as grad_

        return grad_(logits_CV, scale_C, lse_C, factor_C, target_C)
    if _is_native(logits_CV, scale_C):
        lse_C, factor_C = lse_C.contiguous(), factor_C.float().contiguous()
        goal_C = None if target_C is None else target_C.contiguous()
        native.call("softmax_grad", logits_CV, scale_C, lse_C, factor_C, goal_C, *logits_CV.shape)
        return logits_CV
    if scale_C is not None:
        logits_CV.mul_(scale_C[:, None])
    grad_CV = logits_CV.sub_(lse_C[:, None]).exp_()
    if target_C is not None:
        grad_CV.scatter_add_(1, target_C[:, None], grad_CV.new_full((target_C.shape[0], 1), -1.0))
    return grad_CV.mul_(factor_C[:, None])


def rest_log_sum_exp_(logits_CV: Tensor, scale_C: Tensor | None, id_CK: Tensor) -> Tensor:
    """logsumexp over all tokens except `id_CK`, whose logits become −∞; −∞ where no other token is left."""
    logits_CV.scatter_(1, id_CK, -torch.inf)
    if id_CK.shape[1] == logits_CV.shape[1]:
        return logits_CV.new_full((logits_CV.shape[0],), -torch.inf, dtype=at_least_float32(logits_CV.dtype))
    return log_sum_exp(logits_CV, scale_C)


def scaled_at(logits_CV: Tensor, scale_C: Tensor | None, id_CK: Tensor) -> Tensor:
    """z of the given tokens."""
    z_CK = raised(logits_CV.gather(1, id_CK))
    return z_CK if scale_C is None else z_CK * scale_C[:, None]


def _is_native(logits_CV: Tensor, scale_C: Tensor | None) -> bool:
    return logits_CV.is_contiguous() and (scale_C is None or scale_C.is_contiguous()) and native.serves(logits_CV)


def _empty_top(logp_M: Tensor, top_k: int) -> TopTokens:
    shape = (logp_M.shape[0], top_k)
    return TopTokens(logp_M.new_empty(shape, dtype=torch.int32), logp_M.new_empty(shape), torch.empty_like(logp_M))


def _find_top(logits_CV: Tensor, scale_C: Tensor | None, lse_C: Tensor, top: TopTokens, chunk: slice) -> None:
    """Leaves the logits unchanged."""
    found_CK, id_CK = logits_CV.topk(top.id_MK.shape[1], dim=-1, sorted=False)
    top.id_MK[chunk] = id_CK.int()
    top.logp_MK[chunk] = scaled_at(logits_CV, scale_C, id_CK) - lse_C[:, None]
    # Summed over the other tokens: 1 − Σ p would be mostly rounding error where the rest is near 0.
    top.rest_M[chunk] = rest_log_sum_exp_(logits_CV, scale_C, id_CK) - lse_C
    logits_CV.scatter_(1, id_CK, found_CK)


# -- cross-entropy -----------------------------------------------------------------------------------------------------


def linear_cross_entropy(
    hidden_ND: Tensor,
    head_VD: Tensor,
    target_M: Tensor,
    *,
    position_M: Tensor | None = None,
    weight_M: Tensor | None = None,
    float32_head: bool = False,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(loss, the unweighted loss of each position, without gradient).

        loss = Σ_m  weight[m] · ( logsumexp_v z[m,v] − z[m, target[m]] ),    z[m] = head · hidden[position[m]]

    Without `position_M` every token carries a loss; without `weight_M` the loss is their mean.
    """
    precision = at_least_float32(hidden_ND.dtype)
    if position_M is None:
        position_M = torch.arange(hidden_ND.shape[0], device=hidden_ND.device)
    if weight_M is None:
        weight_M = torch.full_like(target_M, 1.0 / max(1, target_M.shape[0]), dtype=precision)
    if not position_M.shape == target_M.shape == weight_M.shape:
        shapes = [tuple(x.shape) for x in (position_M, target_M, weight_M)]
        raise ValueError(f"positions, targets and weights differ in shape: {shapes}; give one of each per loss")
    check_targets(target_M, head_VD.shape[0])
    weight_M = weight_M.to(precision)
    nll_M = torch.empty_like(weight_M)

    def score(logits_CV: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        nll_M[chunk], grad_CV = _nll_and_grad(logits_CV, target_M[chunk], weight_M[chunk])
        return torch.dot(nll_M[chunk], weight_M[chunk]), grad_CV

    loss = linear_loss(hidden_ND, head_VD, position_M, score, float32_head=float32_head, chunk_bytes=chunk_bytes)
    return loss, nll_M


def linear_cross_entropy_plain(hidden_ND: Tensor, head_VD: Tensor, target_N: Tensor) -> Tensor:
    """The mean over all tokens with all logits at once: the reference that the chunked form must equal."""
    return F.cross_entropy(raised(hidden_ND @ head_VD.t()), target_N)


def _nll_and_grad(logits_CV: Tensor, target_C: Tensor, weight_C: Tensor) -> tuple[Tensor, Tensor]:
    """(loss per row, weight · (softmax − one-hot)); the logits' memory is reused for the gradient."""
    if logits_CV.is_cuda:
        from m2forge.kernels.head_loss_triton import nll_and_grad_

        return nll_and_grad_(logits_CV, target_C, weight_C), logits_CV
    logits_CV = raised(logits_CV)
    if native.serves(logits_CV, weight_C):
        nll_C = torch.empty_like(weight_C)
        native.call("nll_and_grad", logits_CV, target_C.contiguous(), weight_C.contiguous(), *logits_CV.shape, nll_C)
        return nll_C, logits_CV
    lse_C1 = logits_CV.logsumexp(-1, keepdim=True)
    target_C1 = target_C[:, None]
    nll_C1 = lse_C1 - logits_CV.gather(1, target_C1)
    grad_CV = logits_CV.sub_(lse_C1).exp_()
    grad_CV.scatter_add_(1, target_C1, torch.full_like(nll_C1, -1.0))
    return nll_C1[:, 0], grad_CV.mul_(weight_C[:, None].to(grad_CV.dtype))
