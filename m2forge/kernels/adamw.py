"""One AdamW step on one or many tensors, with float32 master weights for weights in lower precision.

    g  = scale · gradient
    m ← β1 m + (1 − β1) g              v ← β2 v + (1 − β2) g²
    w ← (1 − lr·decay) w − lr · ( m / (1 − β1^t) ) / ( √( v / (1 − β2^t) ) + ε )
    weight ← w, rounded to its own precision

`lr` is the learning rate. A scale that is not finite changes nothing: a step whose gradients overflowed is skipped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw


@dataclass(frozen=True)
class AdamWRule:
    lr: float
    decay: float
    betas: tuple[float, float]
    eps: float


@dataclass(frozen=True)
class AdamWState:
    """Optimizer state of one weight."""

    weight: Tensor
    master: Tensor | None
    """The float32 master of a weight in lower precision; None if the weight needs none."""
    mean: Tensor
    """m"""
    square: Tensor
    """v"""

    @property
    def exact(self) -> Tensor:
        """w"""
        return self.weight if self.master is None else self.master


def adamw_(
    states: Sequence[AdamWState], grads: Sequence[Tensor], times: Sequence[int], scale: Tensor, rule: AdamWRule
) -> None:
    """Step every state in place; `times[i]`, t of the formula, counts from 1."""
    if not states:
        return
    if states[0].weight.is_cuda:
        from m2forge.kernels.adamw_triton import adamw_one_

        for state, grad, time in zip(states, grads, times, strict=True):
            adamw_one_(
                state.weight,
                state.master,
                state.mean,
                state.square,
                grad,
                time,
                scale,
                lr=rule.lr,
                decay=rule.decay,
                betas=rule.betas,
                eps=rule.eps,
            )
        return
    factor = float(scale)
    if not math.isfinite(factor):
        return
    torch_adamw(
        [state.exact for state in states],
        [(grad.to(state.exact.dtype) * factor) for state, grad in zip(states, grads, strict=True)],
        [state.mean for state in states],
        [state.square for state in states],
        [],
        # The function increments the step count before using it.
        [torch.tensor(float(time - 1)) for time in times],
        fused=True,
        amsgrad=False,
        beta1=rule.betas[0],
        beta2=rule.betas[1],
        lr=rule.lr,
        weight_decay=rule.decay,
        eps=rule.eps,
        maximize=False,
    )
    for state in states:
        if state.master is not None:
            state.weight.copy_(state.master)


def adamw_plain_(state: AdamWState, grad: Tensor, time: int, scale: float, rule: AdamWRule) -> None:
    """The formula, line by line: the reference that the fast paths must equal."""
    (beta1, beta2), g = rule.betas, grad.to(state.exact.dtype) * scale
    state.mean.mul_(beta1).add_(g, alpha=1 - beta1)
    state.square.mul_(beta2).add_(g * g, alpha=1 - beta2)
    mean, square = state.mean / (1 - beta1**time), state.square / (1 - beta2**time)
    state.exact.mul_(1 - rule.lr * rule.decay).sub_(rule.lr * mean / (square.sqrt() + rule.eps))
    if state.master is not None:
        state.weight.copy_(state.master)
