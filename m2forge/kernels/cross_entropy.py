"""Cross-entropy straight from hidden states, a chunk of logits at a time.

    loss = Σ_m  weight[m] · ( logsumexp_v z[m,v] − z[m, target[m]] ),    z[m] = head · hidden[position[m]]

Only the positions that carry a loss are multiplied with the head, and at most `CHUNK_BYTES` of logits exist at once.
The gradients are made in the forward pass, while a chunk's logits are at hand, so nothing is computed twice.

Shapes: N tokens, M loss positions, D hidden size, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from m2forge.kernels import native
from m2forge.kernels.linear import linear_float32
from m2forge.kernels.precision import at_least_float32, raised

CHUNK_BYTES = {"cuda": 1 << 30, "cpu": 1 << 25}


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

    Without `position_M` every token carries a loss; without `weight_M` the loss is their mean. A position may occur
    several times. Call it outside compiled regions.
    """
    if position_M is None:
        position_M = torch.arange(hidden_ND.shape[0], device=hidden_ND.device)
    if weight_M is None:
        precision = at_least_float32(hidden_ND.dtype)
        weight_M = torch.full_like(target_M, 1.0 / max(1, target_M.shape[0]), dtype=precision)
    if not position_M.shape == target_M.shape == weight_M.shape:
        shapes = [tuple(x.shape) for x in (position_M, target_M, weight_M)]
        raise ValueError(f"positions, targets and weights differ in shape: {shapes}; give one of each per loss")
    _check_targets(target_M, head_VD.shape[0])
    rows = chunk_rows(hidden_ND, head_VD, chunk_bytes)
    if not torch.is_grad_enabled():
        hidden_ND, head_VD = hidden_ND.detach(), head_VD.detach()
    inputs = (hidden_ND, head_VD, position_M, target_M, weight_M, float32_head, rows)
    loss, nll_M = _LinearCrossEntropy.apply(*inputs)  # type: ignore[no-untyped-call]
    return loss, nll_M


def linear_cross_entropy_plain(hidden_ND: Tensor, head_VD: Tensor, target_N: Tensor) -> Tensor:
    """The mean over every token with all logits at once: the twin that the chunked form must equal."""
    return F.cross_entropy(raised(hidden_ND @ head_VD.t()), target_N)


def _check_targets(target_M: Tensor, vocab_size: int) -> None:
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


def chunk_rows(hidden_ND: Tensor, head_VD: Tensor, chunk_bytes: int | None) -> int:
    budget = chunk_bytes or CHUNK_BYTES.get(hidden_ND.device.type, CHUNK_BYTES["cpu"])
    return max(1, budget // (head_VD.shape[0] * hidden_ND.element_size()))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head_VD: Tensor,
        position_M: Tensor,
        target_M: Tensor,
        weight_M: Tensor,
        float32_head: bool,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_head, *_ = ctx.needs_input_grad
        precision = at_least_float32(hidden_ND.dtype)
        nll_M = torch.empty_like(weight_M, dtype=precision)
        grad_hidden = torch.zeros_like(hidden_ND) if needs_hidden else None
        grad_head = torch.zeros_like(head_VD, dtype=at_least_float32(head_VD.dtype)) if needs_head else None
        for start in range(0, target_M.shape[0], rows):
            chunk = slice(start, start + rows)
            hidden_CD = hidden_ND.index_select(0, position_M[chunk])
            logits_CV = linear_float32(hidden_CD, head_VD) if float32_head else hidden_CD @ head_VD.t()
            nll_M[chunk], grad_CV = _nll_and_grad(logits_CV, target_M[chunk], weight_M[chunk])
            grad_CV = grad_CV.to(hidden_ND.dtype)
            if grad_hidden is not None:
                grad_hidden.index_add_(0, position_M[chunk], grad_CV @ head_VD)
            if grad_head is not None:
                grad_head += grad_CV.t() @ hidden_CD
        if grad_head is not None:
            grad_head = grad_head.to(head_VD.dtype)
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(nll_M)
        return torch.dot(nll_M, weight_M.to(precision)), nll_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if g is None else _scaled(g, grad) for g in ctx.saved_tensors)
        return *grads, None, None, None, None, None


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """The product rounded once: a factor rounded to bfloat16 first would bias every gradient alike."""
    out = torch.empty_like(gradient)
    for part, to in zip(gradient.split(1 << 14), out.split(1 << 14), strict=True):
        to.copy_(raised(part) * factor)
    return out


def _nll_and_grad(logits_CV: Tensor, target_C: Tensor, weight_C: Tensor) -> tuple[Tensor, Tensor]:
    """(loss per row, weight · (softmax − one-hot)); the logits' memory is reused for the gradient."""
    if logits_CV.is_cuda:
        from m2forge.kernels.cross_entropy_triton import nll_and_grad_

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
