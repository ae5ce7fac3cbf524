"""RMSNorm on CUDA without gradients, after the addition that a residual stream begins with.

    s = x + y,   out = s / sqrt(mean(s²) + eps) · weight

Rounded where the separate operations round: the sum, the scaled row, and its product with the weight. The twin is
`norm.rms_norm_plain`.

Shapes: N rows, D columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_norm_kernel(
    x, y, weight, total, out, x_stride, D: tl.constexpr, LANES: tl.constexpr, EPS: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    inside = column < D
    kind = out.dtype.element_ty
    s = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        s = (s + tl.load(y + row * D + column, mask=inside, other=0.0).to(tl.float32)).to(kind)
        tl.store(total + row * D + column, s, mask=inside)
        s = s.to(tl.float32)
    scaled = (s * tl.rsqrt(tl.sum(s * s, 0) / D + EPS)).to(kind).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * D + column, (scaled * w).to(kind), mask=inside)


def rms_norm_cuda(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Rows of a slice may lie at any distance."""
    return _run(x_ND, None, weight_D, eps)[1]


def add_rms_norm(x_ND: Tensor, y_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + y, its norm)."""
    return _run(x_ND, y_ND.contiguous(), weight_D, eps)


def _run(x_ND: Tensor, y_ND: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x_ND = x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()
    num_rows, dim = x_ND.shape
    out_ND = x_ND.new_empty(num_rows, dim)
    total_ND = out_ND if y_ND is None else torch.empty_like(out_ND)
    lanes = triton.next_power_of_2(dim)
    if num_rows:
        _add_norm_kernel[(num_rows,)](
            *(x_ND, out_ND if y_ND is None else y_ND, weight_D, total_ND, out_ND, x_ND.stride(0)),
            *(dim, lanes, eps, y_ND is not None),
            num_warps=max(1, min(8, lanes // 512)),
        )
    return total_ND, out_ND
