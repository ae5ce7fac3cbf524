"""Times a candidate for the experts' products on one GPU: Triton kernels that gather their rows themselves.

    python dev/grouped_product.py            both shapes, every tiling; needs a Hopper GPU
    TRITON_INTERPRET=1 python dev/grouped_product.py      only checks that the products are right, on a CPU

Today a token's row is first copied to each of its experts (`expert_triton.spread`), and CUTLASS multiplies the copies
(`grouped_mm`). A kernel that reads the rows where they are saves the copies, and pays if it multiplies as fast.
"""

import os
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.testing import do_bench
from triton.tools.tensor_descriptor import TensorDescriptor

from m2forge.kernels.expert import Dispatch, dispatch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Tiling(NamedTuple):
    rows: int
    columns: int
    step: int
    num_warps: int
    num_stages: int


@triton.jit
def _tile_of(ends, index, E: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """(expert, first row, end of the expert's rows, whether there is such a tile) of a tile of rows; an expert's last
    one is partly empty."""
    expert = tl.arange(0, EXPERTS)
    end = tl.load(ends + expert, mask=expert < E, other=0)
    begin = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < E), other=0)
    num_tiles = tl.where(expert < E, (end - begin + ROWS - 1) // ROWS, 0)
    until = tl.cumsum(num_tiles, 0)
    own = tl.sum((until <= index).to(tl.int32), 0)
    is_own = expert == own
    own_begin = tl.sum(tl.where(is_own, begin, 0), 0)
    tile = index - tl.sum(tl.where(is_own, until - num_tiles, 0), 0)
    return own, own_begin + tile * ROWS, tl.sum(tl.where(is_own, end, 0), 0), own < E


@triton.jit
def _rows_kernel(
    x, w, order, ends, out,
    E: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, D: tl.constexpr, G: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """out[s] = x[token of s] · w[expert of s]ᵀ"""
    NUM_COLUMNS: tl.constexpr = (G + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    own, first, end, exists = _tile_of(ends, program // NUM_COLUMNS, E, EXPERTS, ROWS)
    if exists:
        column = program % NUM_COLUMNS * COLUMNS
        row = first + tl.arange(0, ROWS)
        # A row after the last reads the last one again, and is not written.
        token = tl.load(order + tl.minimum(row, end - 1)) // K
        source = x + token[:, None] * D + tl.arange(0, STEP)[None, :]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, D, STEP):
            a = tl.load(source + start)
            b = w.load([own * G + column, start])
            total = tl.dot(a, tl.trans(b), total)
        at = column + tl.arange(0, COLUMNS)
        target = out + row.to(tl.int64)[:, None] * G + at[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=(row < end)[:, None] & (at < G)[None, :])


@triton.jit
def _weights_kernel(
    grad, x, order, ends, out,
    K: tl.constexpr, D: tl.constexpr, G: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """out[e] = Σ over the rows s of e of grad[s]ᵀ · x[token of s]"""
    own = tl.program_id(0) // (G // ROWS * (D // COLUMNS))
    tile = tl.program_id(0) % (G // ROWS * (D // COLUMNS))
    first, column = tile // (D // COLUMNS) * ROWS, tile % (D // COLUMNS) * COLUMNS
    begin, end = tl.load(ends + own - 1, mask=own > 0, other=0), tl.load(ends + own)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(begin, end, STEP):
        row = start + tl.arange(0, STEP)
        token = tl.load(order + tl.minimum(row, end - 1)) // K
        at = grad + row.to(tl.int64)[:, None] * G + first + tl.arange(0, ROWS)[None, :]
        a = tl.load(at, mask=(row < end)[:, None], other=0.0)
        b = tl.load(x + token[:, None] * D + column + tl.arange(0, COLUMNS)[None, :])
        total = tl.dot(tl.trans(a), b, total)
    target = out + own.to(tl.int64) * G * D + (first + tl.arange(0, ROWS))[:, None] * D
    tl.store(target + column + tl.arange(0, COLUMNS)[None, :], total.to(out.dtype.element_ty))


def gathered_rows(x_ND: Tensor, w_EGD: Tensor, where: Dispatch, tiling: Tiling) -> Tensor:
    num_rows, (num_experts, width, dim) = where.order_S.shape[0], w_EGD.shape
    out_SG = x_ND.new_empty(num_rows, width)
    most_tiles = triton.cdiv(num_rows, tiling.rows) + num_experts
    w = TensorDescriptor.from_tensor(w_EGD.view(-1, dim), [tiling.columns, tiling.step])
    _rows_kernel[(most_tiles * triton.cdiv(width, tiling.columns),)](
        *(x_ND, w, where.order_S, where.ends_E, out_SG, num_experts, triton.next_power_of_2(num_experts)),
        *(where.slot_NK.shape[1], dim, width, *tiling[:3]),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return out_SG


def gathered_weights(grad_SG: Tensor, x_ND: Tensor, where: Dispatch, tiling: Tiling) -> Tensor:
    num_experts, width, dim = where.ends_E.shape[0], grad_SG.shape[1], x_ND.shape[1]
    out_EGD = x_ND.new_empty(num_experts, width, dim)
    _weights_kernel[(num_experts * (width // tiling.rows) * (dim // tiling.columns),)](
        *(grad_SG, x_ND, where.order_S, where.ends_E, out_EGD),
        *(where.slot_NK.shape[1], dim, width, *tiling[:3]),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return out_EGD


def drawn(num_tokens: int, num_experts: int, num_chosen: int, dim: int, width: int, device: str) -> tuple[Tensor, ...]:
    """Tokens, an expert's matrices and gradients of the rows; random, and the experts of each token."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(num_tokens, dim, device=device, dtype=dtype)
    w = torch.randn(num_experts, width, dim, device=device, dtype=dtype) * dim**-0.5
    grad = torch.randn(num_tokens * num_chosen, width, device=device, dtype=dtype)
    expert = torch.rand(num_tokens, num_experts, device=device).topk(num_chosen).indices
    return x, w, grad, expert


def check(kind: str, device: str, tiling: Tiling) -> None:
    """Against one product per expert in float64, with an expert that has no row and one that has many."""
    x, w, grad, expert = drawn(300, 8, 2, 256, 256, device)
    expert[expert == 3] = 5
    where, begin = dispatch(expert, 8), 0
    token = where.order_S // 2
    found = (
        gathered_rows(x, w, where, tiling) if kind == "rows" else gathered_weights(grad, x, where, tiling)
    ).double()
    for own, end in enumerate(where.ends_E.tolist()):
        source = x[token[begin:end]].double()
        if kind == "rows":
            expected, part = source @ w[own].double().t(), found[begin:end]
        else:
            expected, part = grad[begin:end].double().t() @ source, found[own]
        assert (part - expected).norm() <= 1e-2 * expected.norm(), (own, kind)
        begin = end


TILINGS = [
    *(Tiling(*shape, step, warps, stages) for shape, warps in (((128, 256), 8), ((256, 128), 8), ((128, 128), 8))
      for step, stages in ((64, 3), (64, 4))),
    # A load whose addresses are loaded takes stages of its own.
    Tiling(128, 256, 64, 8, 6),
    Tiling(256, 128, 64, 8, 6),
    Tiling(128, 128, 64, 4, 3),
    Tiling(128, 128, 64, 4, 5),
    Tiling(128, 128, 128, 8, 2),
]  # fmt: skip
SHAPES = {"m2-mini": (32_768, 64, 8, 1024, 1024), "M2": (32_768, 256, 8, 3072, 3072)}


def measure(name: str, num_tokens: int, num_experts: int, num_chosen: int, dim: int, width: int) -> None:
    from torch.nn.functional import grouped_mm

    from m2forge.kernels.expert_triton import spread

    x, w, grad, expert = drawn(num_tokens, num_experts, num_chosen, dim, width, "cuda")
    where, num_rows = dispatch(expert, num_experts), num_tokens * num_chosen
    copies = spread(x, where.slot_NK, num_rows)
    show(f"{name}: copies of the rows", 0, lambda: spread(x, where.slot_NK, num_rows))
    flops = 2 * num_rows * dim * width
    show(f"{name}: rows, grouped_mm", flops, lambda: grouped_mm(copies, w.transpose(1, 2), offs=where.ends_E))
    show(f"{name}: weights, grouped_mm", flops, lambda: grouped_mm(grad.t(), copies, offs=where.ends_E))
    calls = {"rows": partial(gathered_rows, x, w, where), "weights": partial(gathered_weights, grad, x, where)}
    for tiling, (kind, call) in product(TILINGS, calls.items()):
        try:
            check(kind, "cuda", tiling)
            show(f"{name}: {kind}, {tuple(tiling)}", flops, partial(call, tiling))
        except Exception as error:  # noqa: BLE001  (a tiling that does not fit; the next one is tried)
            print(f"{name}: {kind}, {tuple(tiling)}: {type(error).__name__} {str(error)[:100]}", flush=True)


def show(title: str, flops: int, call: Callable[[], object]) -> None:
    ms = do_bench(call, return_mode="median")
    print(f"{title:40} {ms:7.3f} ms {flops / ms / 1e9:6.0f} TFLOP/s", flush=True)


def main() -> None:
    if IS_INTERPRETED:
        for kind in ("rows", "weights"):
            check(kind, "cpu", Tiling(64, 64, 32, 4, 2))
        print("the products are right")
        return
    for name, sizes in SHAPES.items():
        measure(name, *sizes)


if __name__ == "__main__":
    main()
