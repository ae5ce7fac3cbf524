"""Softmax, loss and gradient of a chunk of logits on CUDA, in place: two reads and one write of each row.

The reference is the torch branch of `cross_entropy._nll_and_grad`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _nll_and_grad_kernel(logits, target, weight, nll, V, BLOCK: tl.constexpr, SUM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    # The running maximum and sum are kept per lane and merged once at the end of the row.
    top = tl.full((BLOCK,), -float("inf"), SUM)
    total = tl.zeros((BLOCK,), SUM)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(logits + column, mask=column < V, other=-float("inf")).to(SUM)
        higher = tl.maximum(top, z)
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.exp(z - shift)
        top = higher
    peak = tl.max(top, axis=0)
    lse = peak + tl.log(tl.sum(total * tl.exp(top - peak), axis=0))
    goal = tl.load(target + row)
    scale = tl.load(weight + row).to(SUM)
    tl.store(nll + row, lse - tl.load(logits + goal).to(SUM))
    tl.debug_barrier()
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(logits + column, mask=column < V, other=-float("inf")).to(SUM)
        grad = (tl.exp(z - lse) - tl.where(column == goal, 1.0, 0.0)) * scale
        tl.store(logits + column, grad.to(logits.dtype.element_ty), mask=column < V)


def nll_and_grad_(logits_CV: Tensor, target_C: Tensor, weight_C: Tensor) -> Tensor:
    sum_type, precision = (
        (tl.float64, torch.float64) if logits_CV.dtype == torch.float64 else (tl.float32, torch.float32)
    )
    nll_C = torch.empty(logits_CV.shape[0], dtype=precision, device=logits_CV.device)
    block = min(4096, triton.next_power_of_2(logits_CV.shape[1]))
    _nll_and_grad_kernel[(logits_CV.shape[0],)](
        logits_CV, target_C, weight_C, nll_C, logits_CV.shape[1], block, sum_type, num_warps=8
    )
    return nll_C
