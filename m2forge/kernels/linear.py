"""Linear maps, y = x Wᵀ + b: `linear` returns its operands' dtype, `linear_float32` at least float32.

Products of bfloat16 numbers are exact in float32, so multiplying bfloat16 operands with float32 accumulation equals
upcasting them first; on CUDA that is one tensor-core product with a float32 output. The router and the float32 LM head
use it.

On a CPU, bfloat16 products without a gradient run in the fastest of the kernels in c/linear.c (NEON) and c/linear_x86.c
(AVX2, AVX-512, AVX-512-bf16, AMX) and torch's own, chosen by a probe of some milliseconds. One kernel serves products
of all sizes, so that an output does not depend on the number of rows in the batch. Where the machine has float16
arithmetic, the NEON kernel sums up to 96 terms in it, pairwise, and these sums in float32: the error is smaller than
that of rounding the output to bfloat16. `linear_float32`, whose output is not rounded, never uses it.
"""

import contextlib
import functools
import itertools
import logging
import mmap
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from m2forge.kernels import arithmetic as native
from m2forge.kernels.arithmetic import raised
from m2forge.kernels.pointwise import Norm

KERNELS = ("the plain kernel", "AVX-512-bf16", "AMX")
"""Indexed by kernel number in c/linear_x86.c; c/linear.c has only the first."""
PROBE_OUT, PROBE_WIDTH = 1536, 576
FEW_ROWS, MANY_ROWS = 8, 256
PROBE_REPEATS = 4
LINE_BYTES = 64

_log = logging.getLogger(__name__)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None:
        return native_linear(x, weight, x.dtype) if serves(x, weight) else F.linear(x, weight)
    return biased_linear(x, weight, bias) if serves(x, weight, bias) else F.linear(x, weight, bias)


def biased_linear(x: Tensor, weight: Tensor, bias: Tensor, norm: Norm | None = None) -> Tensor:
    """Requires `serves`. Computes norm(x) Wᵀ + bias and rounds once."""
    return native_linear(x, weight, x.dtype, norm, onto=bias.expand(*x.shape[:-1], -1))


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    if x.is_cuda and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16):
        out: Tensor = _LinearFloat32.apply(x, weight)  # type: ignore[no-untyped-call]
        return out
    return F.linear(raised(x), raised(weight))


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Whether torch's bfloat16 products are fast on this CPU."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def fastest_kernel() -> int | None:
    """Number of the native kernel that serves this process, by `_probe`; None: torch's product does."""
    return _probe()


def _probe() -> int | None:
    """Number of the fastest native kernel, by the time of a prefill step plus decode steps with as many rows in total;
    None if torch's product is fastest."""
    generator = torch.Generator().manual_seed(0)
    weight_OD, few_MD, many_MD = (
        torch.randn(rows, PROBE_WIDTH, generator=generator).bfloat16() for rows in (PROBE_OUT, FEW_ROWS, MANY_ROWS)
    )
    seconds: dict[int | None, float] = {}
    kinds = native.ask("linear_kinds")
    with torch.no_grad():
        for kind in [kind for kind in range(len(KERNELS)) if kinds >> kind & 1]:
            packed = _lay_out([weight_OD])[0]
            run = functools.partial(_multiply, weight_OD=weight_OD, dtype=torch.bfloat16, packed=packed, kernel=kind)
            seconds[kind] = _best_s(run, many_MD) + MANY_ROWS / FEW_ROWS * _best_s(run, few_MD)
        if _multiplies_bfloat16():
            run = functools.partial(F.linear, weight=weight_OD)
            seconds[None] = _best_s(run, many_MD) + MANY_ROWS / FEW_ROWS * _best_s(run, few_MD)
    fastest = min(seconds, key=lambda kind: seconds[kind])
    _log.debug("products of bfloat16 run in %s: %s", "torch" if fastest is None else KERNELS[fastest], seconds)
    return fastest


def _best_s(run: Callable[[Tensor], Tensor], x_MD: Tensor) -> float:
    times_s = []
    for _ in range(1 + PROBE_REPEATS):
        started_s = time.perf_counter()
        run(x_MD)
        times_s.append(time.perf_counter() - started_s)
    return min(times_s[1:])


class _Packed(NamedTuple):
    weight: weakref.ref[Tensor]
    version: int
    """Torch's in-place version counter of the weight when it was packed."""
    elements: Tensor
    factor_O: Tensor


_packed: dict[int, _Packed] = {}
"""By the `id` of the weight."""


def pack(weights: Iterable[Tensor]) -> None:
    """Keep a copy of each matrix in the native kernel's layout while the matrix lives, if that kernel would serve: two
    more bytes per weight, and decode steps need not repack it. Call it again whenever the weights have changed; changes
    that torch does not count (through `.data`) go unnoticed."""
    packable = [weight for weight in weights if serves(weight.detach()) and weight.is_contiguous()]
    for weight_OD, (elements, factor_O) in zip(packable, _lay_out(packable), strict=True):
        reference = weakref.ref(weight_OD, functools.partial(_forget, _packed, id(weight_OD)))
        _packed[id(weight_OD)] = _Packed(reference, weight_OD._version, elements, factor_O)


def _lay_out(weights: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The packed elements and factors of each matrix, all in one mapping of huge pages where available: a decode step
    reads all of them, and hardware prefetching stops at page boundaries."""
    sizes = [native.ask("packed_bytes", *weight_OD.shape) for weight_OD in weights]
    starts = list(itertools.accumulate((-(-size // LINE_BYTES) * LINE_BYTES for size in sizes), initial=0))
    if not weights:
        return []
    # Private: shared mappings get huge pages only where the system is configured for it.
    memory = mmap.mmap(-1, starts[-1], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    laid_out = []
    for weight_OD, start, size in zip(weights, starts, sizes, strict=False):
        elements = torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=size)
        factor_O = torch.zeros(weight_OD.shape[0])
        native.call("pack_bfloat16", weight_OD.detach(), *weight_OD.shape, elements, factor_O)
        laid_out.append((elements, factor_O))
    return laid_out


def _forget(packed: dict[int, _Packed], identity: int, _: weakref.ref[Tensor]) -> None:
    """`packed` is an argument because this module's globals may be gone at interpreter exit."""
    packed.pop(identity, None)


def serves(*operands: Tensor) -> bool:
    return native.serves(*operands, dtype=torch.bfloat16) and fastest_kernel() is not None


def native_linear(
    x: Tensor,
    weight_OD: Tensor,
    dtype: torch.dtype,
    norm: Norm | None = None,
    onto: Tensor | None = None,
    is_gated: bool = False,
) -> Tensor:
    """Requires `serves`. Computes onto + norm(x) Wᵀ, omitting absent terms; if gated, silu(a) · b with a and b the
    halves of norm(x) Wᵀ. `dtype` float32 returns the values before rounding to bfloat16."""
    known, packed = _packed.get(id(weight_OD)), None
    if known is not None and known.weight() is weight_OD and known.version == weight_OD._version:
        packed = known.elements, known.factor_O
    kernel = fastest_kernel()
    assert kernel is not None
    return _multiply(x, weight_OD, dtype, packed, kernel, norm, onto, is_gated)


def _multiply(
    x: Tensor,
    weight_OD: Tensor,
    dtype: torch.dtype,
    packed: tuple[Tensor, Tensor] | None,
    kernel: int,
    norm: Norm | None = None,
    onto: Tensor | None = None,
    is_gated: bool = False,
) -> Tensor:
    elements, factor_O = packed or (None, None)
    x_MD, weight_OD = x.flatten(0, -2), weight_OD.contiguous()
    x_MD = x_MD if x_MD.stride(1) == 1 else x_MD.contiguous()
    (num_out, width), (norm_D, eps) = weight_OD.shape, norm or (None, 0.0)
    y = x.new_empty((*x.shape[:-1], num_out // 2 if is_gated else num_out), dtype=dtype)
    wide, narrow = (y, None) if dtype == torch.float32 else (None, y)
    onto = None if onto is None else onto.contiguous()
    matrix = (weight_OD, elements, factor_O, x_MD.stride(0), x_MD.shape[0], num_out, width)
    native.call("linear_bfloat16", x_MD, norm_D, eps, *matrix, int(is_gated), onto, wide, narrow, kernel)
    return y


class _LinearFloat32(torch.autograd.Function):
    """Gradients are rounded to the operands' dtype before their products, as in any low-precision layer."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, weight_ED)
        return torch.mm(x_ND, weight_ED.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad_NE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_ND, weight_ED = ctx.saved_tensors
        grad_NE = grad_NE.to(x_ND.dtype)
        grad_x = grad_NE @ weight_ED if ctx.needs_input_grad[0] else None
        grad_weight = grad_NE.t() @ x_ND if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight
