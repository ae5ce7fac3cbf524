"""Losses from hidden states through the LM head, one chunk of logits at a time.

    loss = Σ over chunks of score(z),    z[m] = head · hidden[position[m]]

Only positions that carry a loss are multiplied with the head, and about `CHUNK_BYTES` of logits exist at once. `score`
also returns the gradient of its loss with respect to the logits, so the forward pass computes the gradients of hidden
states and head while a chunk's logits exist, and nothing is recomputed.

Shapes: N tokens, M loss positions, C positions of a chunk, D hidden size, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from m2forge.kernels.linear import linear_float32
from m2forge.kernels.precision import at_least_float32, raised

CHUNK_BYTES = {"cuda": 1 << 30, "cpu": 1 << 25}

Score: TypeAlias = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""(logits_CV, slice of the M positions) → (loss summed over them, its gradient with respect to the logits). `score` may
reuse the logits' memory for the gradient."""


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
    rows = chunk_rows(hidden_ND, head_VD, chunk_bytes)
    if not torch.is_grad_enabled():
        hidden_ND, head_VD = hidden_ND.detach(), head_VD.detach()
    inputs = (hidden_ND, head_VD, position_M, score, float32_head, rows)
    loss: Tensor = _LinearLoss.apply(*inputs)  # type: ignore[no-untyped-call]
    return loss


def chunk_rows(hidden_ND: Tensor, head_VD: Tensor, chunk_bytes: int | None) -> int:
    """Rows per chunk, counted in the network's dtype; logits raised to float32 take twice the bytes of bfloat16
    ones."""
    budget = chunk_bytes or CHUNK_BYTES.get(hidden_ND.device.type, CHUNK_BYTES["cpu"])
    return max(1, budget // (head_VD.shape[0] * hidden_ND.element_size()))


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
