"""The gate of a SwiGLU network: silu(gate) · up, gate and up the two halves of each row."""

import torch
import torch.nn.functional as F
from torch import Tensor

from m2forge.kernels import native


def gated(h_NG: Tensor) -> Tensor:
    """(N, G / 2)."""
    if native.serves(h_NG, dtype=torch.bfloat16):
        h_NG = h_NG.contiguous()
        num_rows, width = h_NG.shape[0], h_NG.shape[1] // 2
        y_NF = h_NG.new_empty(num_rows, width)
        native.call("gate_bfloat16", h_NG, num_rows, width, y_NF)
        return y_NF
    return gated_plain(h_NG)


def gated_plain(h_NG: Tensor) -> Tensor:
    gate_NF, up_NF = h_NG.chunk(2, dim=-1)
    return F.silu(gate_NF) * up_NF
