"""RMSNorm on CUDA without gradients, fused with the residual addition before it.

    s = x + y,   out = s / sqrt(mean(s²) + eps) · weight

y may be a token's expert outputs, which the kernel sums. It can also store s in a cache, and write the norm of selected
rows only. Results are rounded where the separate operations round: y, the sum, the scaled row, and its product with the
weight. The reference is `norm.rms_norm_plain`.

Shapes: N rows, D columns, K experts of a token, P slots of a cache.
"""

import triton
import triton.language as tl
from torch import Tensor

from m2forge.kernels.pointwise import Norm
from m2forge.kernels.residual import Ending, Pairs


@triton.jit
def _add_norm_kernel(
    x, y, expert, weight, total, out, keep, slot, target, x_stride,
    D: tl.constexpr, LANES: tl.constexpr, EPS: tl.constexpr, ADD: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    KEEP: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    inside = column < D
    kind = out.dtype.element_ty
    s = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if K > 0:
        added = tl.zeros((LANES,), tl.float32)
        for k in tl.static_range(K):
            there = tl.load(expert + row * K + k) < E
            added += tl.load(y + (row * K + k) * D + column, mask=inside & there, other=0.0).to(tl.float32)
        s = (s + added.to(kind).to(tl.float32)).to(kind)
    elif ADD:
        s = (s + tl.load(y + row * D + column, mask=inside, other=0.0).to(tl.float32)).to(kind)
    if ADD:
        tl.store(total + row * D + column, s, mask=inside)
        if KEEP:
            tl.store(keep + tl.load(slot + row) * D + column, s, mask=inside)
        s = s.to(tl.float32)
    scaled = (s * tl.rsqrt(tl.sum(s * s, 0) / D + EPS)).to(kind).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if CHOSEN:
        row = tl.load(target + row)
        inside = inside & (row >= 0)
    tl.store(out + row * D + column, (scaled * w).to(kind), mask=inside)


def rms_norm_cuda(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Supports any row stride."""
    return _run(x_ND, None, Norm(weight_D, eps))[1]


def add_rms_norm(x_ND: Tensor, y: Tensor | Pairs, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + y, its norm)."""
    return _run(x_ND, y, Norm(weight_D, eps))


def end_rms_norm(x_ND: Tensor, y: Tensor | Pairs, weight_D: Tensor, eps: float, ending: Ending) -> Tensor:
    """The norm of x + y, for all rows or those with a target; stores the sum in the cache of `ending`, if it has
    one."""
    return _run(x_ND, y, Norm(weight_D, eps), ending)[1]


def _run(x_ND: Tensor, y: Tensor | Pairs | None, norm: Norm, ending: Ending | None = None) -> tuple[Tensor, Tensor]:
    x_ND = x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()
    num_rows, dim = x_ND.shape
    is_chosen = ending is not None and ending.target_N is not None
    out_ND = x_ND.new_empty(ending.num_targets if ending is not None and is_chosen else num_rows, dim)
    # Placeholder pointers for absent arguments, which the kernel does not read.
    total_ND, added, expert, num_chosen, num_experts = out_ND, out_ND, out_ND, 0, 0
    if y is not None:
        total_ND = x_ND.new_empty(num_rows, dim)
        if isinstance(y, Pairs):
            added, expert, num_chosen, num_experts = y.y_NKD, y.expert_NK, y.expert_NK.shape[1], y.num_experts
        else:
            added = y.contiguous()
    keep = slot = target = out_ND
    if ending is not None:
        slot = ending.slot_N
        keep = out_ND if ending.keep_PD is None else ending.keep_PD
        target = out_ND if ending.target_N is None else ending.target_N
    lanes = triton.next_power_of_2(dim)
    if num_rows:
        _add_norm_kernel[(num_rows,)](
            *(x_ND, added, expert, norm.weight, total_ND, out_ND, keep, slot, target, x_ND.stride(0)),
            *(dim, lanes, norm.eps, y is not None, num_chosen, num_experts),
            *(ending is not None and ending.keep_PD is not None, is_chosen),
            num_warps=max(1, min(8, lanes // 512)),
        )
    return total_ND, out_ND
