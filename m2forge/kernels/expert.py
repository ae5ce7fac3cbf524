"""The experts of an MoE layer as one differentiable function.

    out[n] = Σ_k  weight[n,k] · W2[e] ( silu(W1[e] x[n]) * W3[e] x[n] ),   e = expert[n,k]

Tokens are sorted by expert once, so that each weight matrix multiplies all its tokens in one product. The router weight
multiplies the activation rather than the product's output: the sum is the same, and the backward pass, which stores
only the two pre-activations and recomputes the rest, does not need the output. Every reduction has a fixed order.

Shapes: N tokens, K experts per token, S = N·K rows, E experts, D hidden size, F expert width. Where other ranks hold
some of a token's experts, those pairs are absent and S is smaller.

The products are grouped (grouped GEMM): rows sorted by group, one matrix per group.

    rows:     out[s] = a[s] @ b[g]            for every row s of group g     (S, I) x (G, I, O) -> (S, O)
    weights:  out[g] = Σ_{s in g} a[s]ᵀ b[s]                                 (S, I), (S, O) -> (G, I, O)

`ends` (G, int32) holds the cumulative row counts; groups may be empty. Uses `torch.nn.functional.grouped_mm` where it
supports the operands; otherwise (float64, float16, odd strides, float32 on CUDA) a loop over non-empty groups gives the
same result, and warns once unless the dtype is float64, which serves comparisons.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import grouped_mm

from m2forge.kernels import arithmetic as native
from m2forge.kernels.arithmetic import raised
from m2forge.kernels.slow_path import name
from m2forge.observe.log import warn_once

ALIGNMENT_BYTES = 16
"""`grouped_mm` rejects operands whose rows do not start at multiples of this."""


_log = logging.getLogger(__name__)


def _is_native(a: Tensor, b: Tensor) -> bool:
    native_dtypes = (torch.bfloat16,) if a.is_cuda else (torch.bfloat16, torch.float32)
    if a.dtype not in native_dtypes:
        remedy = f"use {' or '.join(name(dtype) for dtype in native_dtypes)}"
    elif not all(_is_aligned(x) for x in (a, b)):
        remedy = f"use hidden and expert sizes whose rows are multiples of {ALIGNMENT_BYTES} bytes"
    else:
        return True
    if a.dtype != torch.float64:
        operands = f"{name(a.dtype)} operands of row sizes {a.shape[-1]} and {b.shape[-1]} on {a.device.type}"
        warn_once(_log, f"experts run one after another, which is slow: no grouped product takes {operands}; {remedy}")
    return False


def _is_aligned(x: Tensor) -> bool:
    """One of the last two strides is 1, every other one a multiple of 16 bytes, and so is the start."""
    *outer, rows, columns = x.stride()
    if 1 not in (rows, columns) or x.data_ptr() % ALIGNMENT_BYTES:
        return False
    leading = columns if rows == 1 else rows
    return all(stride * x.element_size() % ALIGNMENT_BYTES == 0 for stride in (*outer, leading))


def _spans(ends: Tensor) -> list[tuple[int, int, int]]:
    """(group, first row, end row) of every non-empty group."""
    spans, start = [], 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            spans.append((group, start, end))
        start = end
    return spans


def grouped_rows(a_SI: Tensor, b_GIO: Tensor, ends_G: Tensor) -> Tensor:
    if a_SI.shape[0] and _is_native(a_SI, b_GIO):
        return grouped_mm(a_SI, b_GIO, offs=ends_G)
    out_SO = a_SI.new_empty(a_SI.shape[0], b_GIO.shape[2])
    for group, start, end in _spans(ends_G):
        torch.mm(a_SI[start:end], b_GIO[group], out=out_SO[start:end])
    return out_SO


def grouped_weights(a_SI: Tensor, b_SO: Tensor, ends_G: Tensor) -> Tensor:
    if a_SI.shape[0] and _is_native(a_SI, b_SO):
        return grouped_mm(a_SI.t(), b_SO, offs=ends_G)
    out_GIO = a_SI.new_zeros(ends_G.shape[0], a_SI.shape[1], b_SO.shape[1])
    for group, start, end in _spans(ends_G):
        torch.mm(a_SI[start:end].t(), b_SO[start:end], out=out_GIO[group])
    return out_GIO


FEW_PAIRS = 2048
"""Number of (token, expert) pairs up to which, on CUDA and without gradients, kernels without sorting are faster."""


@dataclass(frozen=True)
class Dispatch:
    """The permutation of (token, expert) pairs into rows sorted by expert."""

    order_S: Tensor
    """Row → flat pair index n·K + k."""
    slot_NK: Tensor
    """Pair → row: the inverse of `order_S`; −1 for an absent pair."""
    ends_E: Tensor
    """Cumulative rows per expert, int32."""

    @property
    def load_E(self) -> Tensor:
        """Rows per expert."""
        return torch.diff(self.ends_E, prepend=self.ends_E.new_zeros(1))

    def counted_load(self, count_N: Tensor) -> Tensor:
        """Rows per expert, each row weighted by its token's count."""
        # Cumulative sums over the sorted rows: on CUDA, scatter-adding took longer than the layer's products.
        count_S = count_N.index_select(0, self.order_S // self.slot_NK.shape[1])
        until_E = F.pad(count_S.cumsum(0), (1, 0)).index_select(0, self.ends_E)
        return torch.diff(until_E, prepend=until_E.new_zeros(1))


ExpertFFN: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Dispatch], Tensor]
"""What `expert_ffn` is, on any number of ranks."""


def dispatch(expert_NK: Tensor, num_experts: int) -> Dispatch:
    # 16-bit keys take a quarter of the radix passes of 64-bit ones.
    keys_S = expert_NK.flatten().to(torch.int16) if expert_NK.is_cuda else expert_NK.flatten()
    sorted_S, order_S = torch.sort(keys_S, stable=True)
    rows_S = torch.arange(order_S.shape[0], device=order_S.device)
    slot_NK = torch.empty_like(order_S).scatter(0, order_S, rows_S).view(expert_NK.shape)
    bounds_E = torch.arange(num_experts, device=order_S.device, dtype=sorted_S.dtype)
    ends_E = torch.searchsorted(sorted_S, bounds_E, right=True, out_int32=True)
    return Dispatch(order_S, slot_NK, ends_E)


def dispatch_some(expert_NK: Tensor, num_experts: int) -> Dispatch:
    """`dispatch` where pairs of expert −1 are absent. Syncs with the host."""
    # Absent pairs are sorted last.
    where = dispatch(torch.where(expert_NK < 0, num_experts, expert_NK), num_experts)
    num_rows = int(where.ends_E[-1])
    slot_NK = torch.where(where.slot_NK < num_rows, where.slot_NK, -1)
    return Dispatch(where.order_S[:num_rows], slot_NK, where.ends_E)


def expert_ffn(x_ND: Tensor, w13_EGD: Tensor, w2_EDF: Tensor, weight_NK: Tensor, where: Dispatch) -> Tensor:
    """`w13_EGD` holds W1 above W3 (G = 2F). `weight_NK` is in at least float32."""
    indices = (where.order_S, where.slot_NK, where.ends_E)
    out_ND: Tensor = torch.ops.m2forge.expert_ffn(x_ND, w13_EGD, w2_EDF, weight_NK, *indices)[0]
    return out_ND


def expert_ffn_unsorted(x_ND: Tensor, w13_EGD: Tensor, w2_EDF: Tensor, weight_NK: Tensor, expert_NK: Tensor) -> Tensor:
    """`expert_ffn` without gradients; on CUDA, few pairs are not sorted."""
    # The sorted path syncs with the host for all dtypes but bfloat16.
    if x_ND.is_cuda and (expert_NK.numel() <= FEW_PAIRS or x_ND.dtype != torch.bfloat16):
        from m2forge.kernels.expert_triton import expert_ffn_decode, serves

        if serves(x_ND, w13_EGD, w2_EDF):
            return expert_ffn_decode(x_ND, w13_EGD, w2_EDF, weight_NK, expert_NK)
    return expert_ffn(x_ND, w13_EGD, w2_EDF, weight_NK, dispatch(expert_NK, w2_EDF.shape[0]))


def expert_ffn_plain(x_ND: Tensor, w13_EGD: Tensor, w2_EDF: Tensor, weight_NK: Tensor, expert_NK: Tensor) -> Tensor:
    """The formula above, expert by expert: the reference that `expert_ffn` must equal."""
    out_ND = torch.zeros_like(x_ND)
    for expert in range(w2_EDF.shape[0]):
        token, k = torch.where(expert_NK == expert)
        gate, up = (x_ND[token] @ w13_EGD[expert].t()).chunk(2, dim=-1)
        y = (F.silu(gate) * up) @ w2_EDF[expert].t()
        out_ND = out_ND.index_add(0, token, (y * weight_NK[token, k, None]).to(x_ND.dtype))
    return out_ND


# -- pieces, by device ------------------------------------------------------------------------------------------------


def _spread(x_ND: Tensor, order_S: Tensor, slot_NK: Tensor) -> Tensor:
    """Rows sorted by expert: row s is the token of pair s."""
    if x_ND.is_cuda:
        from m2forge.kernels.expert_triton import spread

        return spread(x_ND, slot_NK, order_S.shape[0])
    return x_ND.index_select(0, order_S // slot_NK.shape[1])


def _collect(y_SD: Tensor, slot_NK: Tensor) -> Tensor:
    """Sum over each token's rows."""
    if y_SD.is_cuda:
        from m2forge.kernels.expert_triton import collect

        return collect(y_SD, slot_NK)
    return _by_pair(y_SD, slot_NK).sum(1)


def _by_pair(rows: Tensor, slot_NK: Tensor) -> Tensor:
    """The row of each pair, (N, K, …); zeros for an absent one, which is row −1."""
    if rows.shape[0] < slot_NK.numel():
        rows = torch.cat((rows, rows.new_zeros(1, *rows.shape[1:])))
        slot_NK = slot_NK % rows.shape[0]
    return rows.index_select(0, slot_NK.flatten()).view(*slot_NK.shape, *rows.shape[1:])


def _activate(h_SG: Tensor, weight_S: Tensor) -> Tensor:
    """weight · silu(gate) · up."""
    if h_SG.is_cuda:
        from m2forge.kernels.expert_triton import activate

        return activate(h_SG, weight_S)
    gate, up = raised(h_SG).chunk(2, dim=-1)
    return F.silu(gate).mul_(up).mul_(weight_S[:, None]).to(h_SG.dtype)


def _activate_backward(grad_SF: Tensor, h_SG: Tensor, weight_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of h, gradient of the weights, the recomputed activation)."""
    if h_SG.is_cuda:
        from m2forge.kernels.expert_triton import activate_backward

        return activate_backward(grad_SF, h_SG, weight_S)
    gate, up = raised(h_SG).chunk(2, dim=-1)
    grad_SF = raised(grad_SF)
    silu = F.silu(gate)
    bare_SF = silu * up
    grad_weight_S = torch.linalg.vecdot(grad_SF, bare_SF)
    grad_bare_SF = grad_SF * weight_S[:, None]
    grad_gate = torch.ops.aten.silu_backward(grad_bare_SF * up, gate)
    grad_h_SG = torch.cat((grad_gate, silu.mul_(grad_bare_SF)), dim=-1)
    return grad_h_SG.to(h_SG.dtype), grad_weight_S, bare_SF.mul_(weight_S[:, None]).to(h_SG.dtype)


# -- all at once, in c/expert.c ---------------------------------------------------------------------------------------


def _native_forward(
    x_ND: Tensor, w13_EGD: Tensor, w2_EDF: Tensor, weight_S: Tensor, order_S: Tensor, slot_NK: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor]:
    x_ND, (num_experts, dim, width) = x_ND.contiguous(), w2_EDF.shape
    num_rows, (num_tokens, num_chosen) = order_S.shape[0], slot_NK.shape
    h_SG, out_ND = x_ND.new_empty(num_rows, 2 * width), torch.empty_like(x_ND)
    sizes = (num_tokens, num_chosen, num_experts, dim, width)
    where = (order_S // num_chosen, slot_NK.contiguous(), ends_E)
    native.call("expert_forward", x_ND, w13_EGD, w2_EDF, weight_S, *where, *sizes, h_SG, out_ND)
    return out_ND, h_SG


def _native_backward(
    grad_ND: Tensor,
    x_ND: Tensor,
    w13_EGD: Tensor,
    w2_EDF: Tensor,
    weight_S: Tensor,
    order_S: Tensor,
    slot_NK: Tensor,
    ends_E: Tensor,
    h_SG: Tensor,
    for_matrices: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x_ND, grad_ND, (num_experts, dim, width) = x_ND.contiguous(), grad_ND.contiguous(), w2_EDF.shape
    num_tokens, num_chosen = slot_NK.shape
    grad_x_ND, grad_weight_S = torch.empty_like(x_ND), torch.empty_like(weight_S)
    grad_w13, grad_w2 = (w.new_empty(w.shape if for_matrices else 0) for w in (w13_EGD, w2_EDF))
    sizes = (num_tokens, num_chosen, num_experts, dim, width)
    where = (order_S // num_chosen, slot_NK.contiguous(), ends_E)
    grads = (grad_x_ND, *((grad_w13, grad_w2) if for_matrices else (None, None)), grad_weight_S)
    native.call("expert_backward", grad_ND, x_ND, w13_EGD, w2_EDF, weight_S, *where, h_SG, *sizes, *grads)
    return grad_x_ND, grad_w13, grad_w2, _by_pair(grad_weight_S, slot_NK)


# -- the operator -----------------------------------------------------------------------------------------------------


# Defined by torch.library's lower layer: an operator of `custom_op` loads torch's compiler when it is first called,
# over a second in every process that runs the network.
torch.library.define(
    "m2forge::expert_ffn",
    "(Tensor x_ND, Tensor w13_EGD, Tensor w2_EDF, Tensor weight_NK, Tensor order_S, Tensor slot_NK, Tensor ends_E)"
    " -> (Tensor, Tensor)",
)
torch.library.define(
    "m2forge::expert_ffn_backward",
    "(Tensor grad_ND, Tensor x_ND, Tensor w13_EGD, Tensor w2_EDF, Tensor weight_NK, Tensor order_S, Tensor slot_NK,"
    " Tensor ends_E, Tensor h_SG, bool for_matrices) -> (Tensor, Tensor, Tensor, Tensor)",
)


@torch.library.impl("m2forge::expert_ffn", "CompositeExplicitAutograd")
def _expert_ffn(
    x_ND: Tensor, w13_EGD: Tensor, w2_EDF: Tensor, weight_NK: Tensor, order_S: Tensor, slot_NK: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor]:
    weight_S = weight_NK.flatten().index_select(0, order_S)
    if native.serves(x_ND, w13_EGD, w2_EDF, weight_NK):
        return _native_forward(x_ND, w13_EGD.contiguous(), w2_EDF.contiguous(), weight_S, order_S, slot_NK, ends_E)
    h_SG = grouped_rows(_spread(x_ND, order_S, slot_NK), w13_EGD.transpose(1, 2), ends_E)
    y_SD = grouped_rows(_activate(h_SG, weight_S), w2_EDF.transpose(1, 2), ends_E)
    return _collect(y_SD, slot_NK), h_SG


def _expert_ffn_meta(
    x_ND: Tensor, w13_EGD: Tensor, w2_EDF: Tensor, weight_NK: Tensor, order_S: Tensor, slot_NK: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_ND), x_ND.new_empty(order_S.shape[0], w13_EGD.shape[1])


@torch.library.impl("m2forge::expert_ffn_backward", "CompositeExplicitAutograd")
def _expert_ffn_backward(
    grad_ND: Tensor,
    x_ND: Tensor,
    w13_EGD: Tensor,
    w2_EDF: Tensor,
    weight_NK: Tensor,
    order_S: Tensor,
    slot_NK: Tensor,
    ends_E: Tensor,
    h_SG: Tensor,
    for_matrices: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight_S = weight_NK.flatten().index_select(0, order_S)
    if native.serves(x_ND, w13_EGD, w2_EDF, weight_NK):
        where, matrices = (order_S, slot_NK, ends_E), (w13_EGD.contiguous(), w2_EDF.contiguous())
        return _native_backward(grad_ND, x_ND, *matrices, weight_S, *where, h_SG, for_matrices)
    grad_y_SD = _spread(grad_ND.contiguous(), order_S, slot_NK)
    grad_a_SF = grouped_rows(grad_y_SD, w2_EDF, ends_E)
    grad_h_SG, grad_weight_S, a_SF = _activate_backward(grad_a_SF, h_SG, weight_S)
    grad_w2 = grouped_weights(grad_y_SD, a_SF, ends_E) if for_matrices else w2_EDF.new_empty(0)
    del grad_y_SD, a_SF, grad_a_SF
    grad_x_ND = _collect(grouped_rows(grad_h_SG, w13_EGD, ends_E), slot_NK)
    grad_w13 = w13_EGD.new_empty(0)
    if for_matrices:
        grad_w13 = grouped_weights(grad_h_SG, _spread(x_ND, order_S, slot_NK), ends_E)
    grad_weight_NK = _by_pair(grad_weight_S, slot_NK)
    return grad_x_ND, grad_w13, grad_w2, grad_weight_NK


def _expert_ffn_backward_meta(
    grad_ND: Tensor,
    x_ND: Tensor,
    w13_EGD: Tensor,
    w2_EDF: Tensor,
    weight_NK: Tensor,
    order_S: Tensor,
    slot_NK: Tensor,
    ends_E: Tensor,
    h_SG: Tensor,
    for_matrices: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    matrices = (w13_EGD, w2_EDF) if for_matrices else (w13_EGD.new_empty(0), w2_EDF.new_empty(0))
    grad_w13, grad_w2 = (torch.empty_like(w) for w in matrices)
    return torch.empty_like(x_ND), grad_w13, grad_w2, torch.empty_like(weight_NK)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_ND: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    for_matrices = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
    grad_x, grad_w13, grad_w2, grad_weight = torch.ops.m2forge.expert_ffn_backward(
        grad_ND, *ctx.saved_tensors, for_matrices
    )
    matrices = (grad_w13, grad_w2) if for_matrices else (None, None)
    return grad_x, *matrices, grad_weight, None, None, None


torch.library.register_fake("m2forge::expert_ffn", _expert_ffn_meta)
torch.library.register_fake("m2forge::expert_ffn_backward", _expert_ffn_backward_meta)
torch.library.register_autograd("m2forge::expert_ffn", _backward, setup_context=_save)
