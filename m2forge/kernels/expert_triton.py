"""Row permutation and activation of the experts on CUDA: each kernel reads and writes every row once.

One program handles one token, so a token's row is read once however many experts it goes to. The references are the
torch branches in `expert.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _spread_kernel(x, slot, out, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < D
    row = tl.load(x + token * D + column, mask=mask)
    for k in tl.static_range(K):
        target = tl.load(slot + token * K + k)
        tl.store(out + target * D + column, row, mask=mask)


def spread(x_ND: Tensor, slot_NK: Tensor) -> Tensor:
    (num_tokens, dim), num_chosen = x_ND.shape, slot_NK.shape[1]
    out_SD = x_ND.new_empty(num_tokens * num_chosen, dim)
    block = triton.next_power_of_2(dim)
    _spread_kernel[(num_tokens,)](x_ND.contiguous(), slot_NK, out_SD, dim, num_chosen, block, num_warps=_warps(block))
    return out_SD


@triton.jit
def _collect_kernel(y, slot, out, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, SUM: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < D
    total = tl.zeros((BLOCK,), SUM)
    for k in tl.static_range(K):
        source = tl.load(slot + token * K + k)
        total += tl.load(y + source * D + column, mask=mask, other=0.0).to(SUM)
    tl.store(out + token * D + column, total.to(out.dtype.element_ty), mask=mask)


def collect(y_SD: Tensor, slot_NK: Tensor) -> Tensor:
    (num_tokens, num_chosen), dim = slot_NK.shape, y_SD.shape[1]
    out_ND = y_SD.new_empty(num_tokens, dim)
    block = triton.next_power_of_2(dim)
    _collect_kernel[(num_tokens,)](
        y_SD, slot_NK, out_ND, dim, num_chosen, block, _sum_type(y_SD), num_warps=_warps(block)
    )
    return out_ND


@triton.jit
def _activate_kernel(h, weight, out, S, F: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SUM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < S) & (column < F)
    gate = tl.load(h + row * (2 * F) + column, mask=mask, other=0.0).to(SUM)
    up = tl.load(h + row * (2 * F) + F + column, mask=mask, other=0.0).to(SUM)
    scale = tl.load(weight + row, mask=row < S, other=0.0).to(SUM)
    a = gate / (1.0 + tl.exp(-gate)) * up * scale
    tl.store(out + row * F + column, a.to(out.dtype.element_ty), mask=mask)


def activate(h_SG: Tensor, weight_S: Tensor) -> Tensor:
    num_rows, width = h_SG.shape[0], h_SG.shape[1] // 2
    out_SF = h_SG.new_empty(num_rows, width)
    block = min(512, triton.next_power_of_2(width))
    grid = (triton.cdiv(num_rows, 4), triton.cdiv(width, block))
    _activate_kernel[grid](h_SG, weight_S, out_SF, num_rows, width, 4, block, _sum_type(h_SG), num_warps=4)
    return out_SF


@triton.jit
def _activate_backward_kernel(
    grad, h, weight, grad_h, grad_weight, out, S, F: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SUM: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    live = row < S
    scale = tl.load(weight + row, mask=live, other=0.0).to(SUM)
    total = tl.zeros((ROWS,), SUM)
    for start in tl.static_range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        mask = live & (column < F)
        gate = tl.load(h + row * (2 * F) + column, mask=mask, other=0.0).to(SUM)
        up = tl.load(h + row * (2 * F) + F + column, mask=mask, other=0.0).to(SUM)
        g = tl.load(grad + row * F + column, mask=mask, other=0.0).to(SUM)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        silu = gate * sigmoid
        total += tl.sum(g * silu * up, axis=1)
        g = g * scale
        grad_gate = g * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(out + row * F + column, (silu * up * scale).to(out.dtype.element_ty), mask=mask)
        tl.store(grad_h + row * (2 * F) + column, grad_gate.to(grad_h.dtype.element_ty), mask=mask)
        tl.store(grad_h + row * (2 * F) + F + column, (g * silu).to(grad_h.dtype.element_ty), mask=mask)
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(grad_weight + line, total.to(grad_weight.dtype.element_ty), mask=line < S)


def activate_backward(grad_SF: Tensor, h_SG: Tensor, weight_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, width = grad_SF.shape
    grad_h_SG, grad_weight_S, out_SF = torch.empty_like(h_SG), torch.empty_like(weight_S), torch.empty_like(grad_SF)
    block = min(512, triton.next_power_of_2(width))
    _activate_backward_kernel[(triton.cdiv(num_rows, 4),)](
        grad_SF, h_SG, weight_S, grad_h_SG, grad_weight_S, out_SF, num_rows, width, 4, block, _sum_type(h_SG),
        num_warps=4,
    )  # fmt: skip
    return grad_h_SG, grad_weight_S, out_SF


def _sum_type(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))
