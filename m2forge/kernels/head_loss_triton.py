"""Loss and gradient of a chunk of logits on CUDA, in place: two reads and one write of each row.

For cross-entropy one kernel computes both. For log-probabilities the first kernel computes each row's statistics, the
caller chooses each row's gradient factor, and the second writes the softmax gradient. The references are the torch
branches of `_nll_and_grad`, `row_statistics` and `softmax_grad_` in head_loss.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _nll_and_grad_kernel(logits, target, weight, nll, V, BLOCK: tl.constexpr, SUM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    # The running maximum and sum are per lane and merged once at the end of the row.
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


@triton.jit
def _statistics_kernel(logits, scale, lse, mean, V, BLOCK: tl.constexpr, SUM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    factor = tl.load(scale + row).to(SUM)
    # The running maximum and sums are per lane and merged once at the end of the row.
    top = tl.full((BLOCK,), -float("inf"), SUM)
    total = tl.zeros((BLOCK,), SUM)
    weighted = tl.zeros((BLOCK,), SUM)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(logits + column, mask=column < V, other=-float("inf")).to(SUM) * factor
        higher = tl.maximum(top, z)
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        fading = tl.exp(top - shift)
        e = tl.exp(z - shift)
        total = total * fading + e
        weighted = weighted * fading + e * tl.where(z == -float("inf"), 0.0, z)
        top = higher
    peak = tl.max(top, axis=0)
    share = tl.exp(top - peak)
    sum_all = tl.sum(total * share, axis=0)
    tl.store(lse + row, peak + tl.log(sum_all))
    tl.store(mean + row, tl.sum(weighted * share, axis=0) / sum_all)


@triton.jit
def _gradient_kernel(logits, scale, lse, factor, target, V, BLOCK: tl.constexpr, SUM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    start = tl.program_id(1) * BLOCK
    column = start + tl.arange(0, BLOCK)
    z = tl.load(logits + column, mask=column < V, other=-float("inf")).to(SUM) * tl.load(scale + row).to(SUM)
    goal = tl.load(target + row)
    grad = tl.exp(z - tl.load(lse + row)) - tl.where(column == goal, 1.0, 0.0)
    grad *= tl.load(factor + row).to(SUM)
    tl.store(logits + column, grad.to(logits.dtype.element_ty), mask=column < V)


def row_statistics(logits_CV: Tensor, scale_C: Tensor | None) -> tuple[Tensor, Tensor]:
    sum_type, precision = _types(logits_CV)
    num_rows, vocab_size = logits_CV.shape
    lse_C = torch.empty(num_rows, dtype=precision, device=logits_CV.device)
    mean_C = torch.empty_like(lse_C)
    scale_C = torch.ones_like(lse_C) if scale_C is None else scale_C.contiguous()
    block = min(4096, triton.next_power_of_2(vocab_size))
    if num_rows:
        _statistics_kernel[(num_rows,)](logits_CV, scale_C, lse_C, mean_C, vocab_size, block, sum_type, num_warps=8)
    return lse_C, mean_C


def softmax_grad_(
    logits_CV: Tensor, scale_C: Tensor | None, lse_C: Tensor, factor_C: Tensor, target_C: Tensor | None
) -> Tensor:
    sum_type, _ = _types(logits_CV)
    num_rows, vocab_size = logits_CV.shape
    scale_C = torch.ones_like(lse_C) if scale_C is None else scale_C.contiguous()
    goal_C = torch.full_like(lse_C, -1, dtype=torch.int64) if target_C is None else target_C.contiguous()
    block = min(4096, triton.next_power_of_2(vocab_size))
    if num_rows:
        _gradient_kernel[(num_rows, triton.cdiv(vocab_size, block))](
            logits_CV, scale_C, lse_C, factor_C.contiguous(), goal_C, vocab_size, block, sum_type, num_warps=8
        )
    return logits_CV


def _types(logits_CV: Tensor) -> tuple[tl.dtype, torch.dtype]:
    return (tl.float64, torch.float64) if logits_CV.dtype == torch.float64 else (tl.float32, torch.float32)
