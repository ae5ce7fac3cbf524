"""Muon: momentum with an orthogonalized update, for the hidden matrices of the model.

    buf ← μ buf + (1 − μ) g               u = (1 − μ) g + μ buf            (Nesterov)
    O = NewtonSchulz(u) ≈ U Vᵀ, where u = U Σ Vᵀ
    w ← (1 − rate·decay) w − rate · 0.2 √max(a, b) · O                     for w of shape (a, b)

The factor gives the update the same RMS as AdamW's, so both share one learning rate. A matrix stored stacked in another
tensor (q, k and v; the two halves of an expert; the experts of a layer) is orthogonalized on its own.

Newton–Schulz, X ← aX + (bA + cA²)X with A = XXᵀ, needs only matrix products and runs over whole stacks at once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
RMS_FACTOR = 0.2


def muon_(
    masters: Sequence[Tensor],
    buffers: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    rate: float,
    decay: float,
    momentum: float,
    iterations: int,
) -> None:
    """Update matrices, or stacks of them, in place; each item may be a view into a larger weight."""
    for master, buffer, grad in zip(masters, buffers, grads, strict=True):
        buffer.lerp_(grad, 1 - momentum)
        update = orthogonalize(grad.lerp(buffer, momentum), iterations)
        size = max(master.shape[-2:]) ** 0.5
        master.mul_(1 - rate * decay).add_(update.to(master.dtype), alpha=-rate * RMS_FACTOR * size)


def orthogonalize(matrices: Tensor, iterations: int) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly: singular values end between about 0.7 and 1.2."""
    precision = torch.bfloat16 if matrices.is_cuda else matrices.dtype
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.mT if tall else matrices
    x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)).to(precision)
    a, b, c = COEFFICIENTS
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
