"""Linear maps, y = x Wᵀ: `linear` with an output of its operands' type, `linear_float32` with one in at least float32.

Products of bfloat16 numbers are exact in float32, so multiplying bfloat16 operands with float32 sums equals raising
them first; on CUDA that is one tensor-core product with a float32 output. The router and the float32 head use it.

On a CPU without instructions for bfloat16, where torch multiplies number by number, c/linear.c serves whoever asks for
no gradient. Where the machine has float16 arithmetic, that sums up to 96 terms in it, pairwise, and these in float32:
the error is smaller than that of rounding the output to bfloat16. `linear_float32`, whose output is not rounded, never
goes there.
"""

import functools
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from m2forge.kernels import native
from m2forge.kernels.norm import Norm
from m2forge.kernels.precision import raised


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return native_linear(x, weight, x.dtype) if serves(x, weight) else F.linear(x, weight)


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    if x.is_cuda and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16):
        out: Tensor = _LinearFloat32.apply(x, weight)  # type: ignore[no-untyped-call]
        return out
    return F.linear(raised(x), raised(weight))


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Whether torch's own products of bfloat16 are fast on this CPU."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class _Packed(NamedTuple):
    weight: weakref.ref[Tensor]
    version: int
    """Of the weight when it was packed: torch counts its changes in place."""
    elements: Tensor
    factor_O: Tensor


_packed: dict[int, _Packed] = {}
"""By the identity of the weight."""


def pack(weights: Iterable[Tensor]) -> None:
    """Keep a copy of each matrix in the layout that the native product reads, as long as the matrix itself lives, where
    that product would serve: two bytes more for every weight, and a step of few rows need not make the layout again.
    Call it anew whenever the weights have changed; changes that torch does not count (through `.data`) go unseen."""
    for weight_OD in weights:
        if not serves(weight_OD.detach()) or not weight_OD.is_contiguous():
            continue
        elements = torch.zeros(native.ask("packed_bytes", *weight_OD.shape), dtype=torch.uint8)
        factor_O = torch.zeros(weight_OD.shape[0])
        native.call("pack_bfloat16", weight_OD.detach(), *weight_OD.shape, elements, factor_O)
        reference = weakref.ref(weight_OD, functools.partial(_forget, _packed, id(weight_OD)))
        _packed[id(weight_OD)] = _Packed(reference, weight_OD._version, elements, factor_O)


def _forget(packed: dict[int, _Packed], identity: int, _: weakref.ref[Tensor]) -> None:
    """`packed` outlives this module's names when the interpreter ends."""
    packed.pop(identity, None)


def serves(*operands: Tensor) -> bool:
    return native.serves(*operands, dtype=torch.bfloat16) and not _multiplies_bfloat16()


def native_linear(
    x: Tensor,
    weight_OD: Tensor,
    dtype: torch.dtype,
    norm: Norm | None = None,
    onto: Tensor | None = None,
    is_gated: bool = False,
) -> Tensor:
    """Of c/linear.c, where it serves: onto + norm(x) Wᵀ, what is not given left out; if it is gated, silu(a) · b with a
    and b the halves of norm(x) Wᵀ. `dtype` float32 shows what is rounded to bfloat16."""
    packed, elements, factor_O = _packed.get(id(weight_OD)), None, None
    if packed is not None and packed.weight() is weight_OD and packed.version == weight_OD._version:
        elements, factor_O = packed.elements, packed.factor_O
    x_MD, weight_OD = x.flatten(0, -2), weight_OD.contiguous()
    x_MD = x_MD if x_MD.stride(1) == 1 else x_MD.contiguous()
    (num_out, width), (norm_D, eps) = weight_OD.shape, norm or (None, 0.0)
    y = x.new_empty((*x.shape[:-1], num_out // 2 if is_gated else num_out), dtype=dtype)
    wide, narrow = (y, None) if dtype == torch.float32 else (None, y)
    onto = None if onto is None else onto.contiguous()
    matrix = (weight_OD, elements, factor_O, x_MD.stride(0), x_MD.shape[0], num_out, width)
    native.call("linear_bfloat16", x_MD, norm_D, eps, *matrix, int(is_gated), onto, wide, narrow)
    return y


class _LinearFloat32(torch.autograd.Function):
    """Gradients are rounded to the operands' type before their products, as any low-precision layer does."""

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
