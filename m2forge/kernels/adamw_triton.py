"""The AdamW step on CUDA: reads and writes every element of gradient, moments and master weights once.

The reference is `adamw.adamw_plain_`.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _adamw_kernel(
    weight,
    master,
    mean,
    square,
    grad,
    scale,
    num_elements,
    keep,
    lr,
    beta1,
    beta2,
    eps,
    unbias1,
    unbias2,
    HAS_MASTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    factor = tl.load(scale)
    # Not finite: NaN fails both comparisons, infinity the second.
    if (factor == factor) & (tl.abs(factor) < float("inf")):
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = index < num_elements
        g = tl.load(grad + index, mask=mask, other=0.0).to(tl.float32) * factor
        # Explicit, because the compiler's choice of fused multiply-adds varies with the number of elements: a chunk's
        # result would differ in bits from the whole tensor's.
        m = tl.fma(beta1, tl.load(mean + index, mask=mask, other=0.0), (1 - beta1) * g)
        v = tl.fma(beta2, tl.load(square + index, mask=mask, other=0.0), (1 - beta2) * g * g)
        w = tl.load(master + index, mask=mask, other=0.0)
        w = tl.fma(keep, w, -lr * (m * unbias1) / (tl.sqrt(v * unbias2) + eps))
        tl.store(mean + index, m, mask=mask)
        tl.store(square + index, v, mask=mask)
        tl.store(master + index, w, mask=mask)
        if HAS_MASTER:
            tl.store(weight + index, w.to(weight.dtype.element_ty), mask=mask)


def adamw_one_(
    weight: Tensor,
    master: Tensor | None,
    mean: Tensor,
    square: Tensor,
    grad: Tensor,
    time: int,
    scale: Tensor,
    *,
    lr: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Steps one weight in place; the arguments are the fields of `adamw.AdamWState` and `adamw.AdamWRule`."""
    exact = weight if master is None else master
    if not all(x.is_contiguous() for x in (weight, exact, mean, square)):
        raise ValueError("weights and their moments must be contiguous")
    num_elements = weight.numel()
    _adamw_kernel[(triton.cdiv(num_elements, BLOCK),)](
        weight,
        exact,
        mean,
        square,
        grad.contiguous(),
        scale,
        num_elements,
        1 - lr * decay,
        lr,
        *betas,
        eps,
        1 / (1 - betas[0] ** time),
        1 / (1 - betas[1] ** time),
        master is not None,
        BLOCK,
        num_warps=8,
    )
