"""Grouped matrix products (grouped GEMM): rows sorted by group, one matrix per group.

    rows:     out[s] = a[s] @ b[g]            for every row s of group g     (S, I) x (G, I, O) -> (S, O)
    weights:  out[g] = Σ_{s in g} a[s]ᵀ b[s]                                 (S, I), (S, O) -> (G, I, O)

`ends` (G, int32) holds the cumulative row counts; groups may be empty. Uses `torch.nn.functional.grouped_mm` where it
supports the operands; otherwise (float64, float16, odd strides, float32 on CUDA) a loop over non-empty groups gives the
same result, and warns once unless the dtype is float64, which serves comparisons.
"""

import logging

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

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
    if _is_native(a_SI, b_GIO):
        return grouped_mm(a_SI, b_GIO, offs=ends_G)
    out_SO = a_SI.new_empty(a_SI.shape[0], b_GIO.shape[2])
    for group, start, end in _spans(ends_G):
        torch.mm(a_SI[start:end], b_GIO[group], out=out_SO[start:end])
    return out_SO


def grouped_weights(a_SI: Tensor, b_SO: Tensor, ends_G: Tensor) -> Tensor:
    if _is_native(a_SI, b_SO):
        return grouped_mm(a_SI.t(), b_SO, offs=ends_G)
    out_GIO = a_SI.new_zeros(ends_G.shape[0], a_SI.shape[1], b_SO.shape[1])
    for group, start, end in _spans(ends_G):
        torch.mm(a_SI[start:end].t(), b_SO[start:end], out=out_GIO[group])
    return out_GIO
