"""Attention plans define which tokens attend to which, outside the network.

The network runs over N flat tokens. A plan gives each token's position (`position_N`), the masked attention (`bind`)
and each token's predecessor (`to_parent`). The same blocks serve every plan.

    CausalRows   B rows of equal length, each causal; trailing padding needs no mask
    Documents    packed documents in one flat sequence, each causal and isolated from the others
    Trees        token trees, each token attends to its ancestors (tree_plan.py)

Shapes: N tokens, H query heads, G key/value heads, K head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from m2forge.kernels.attention import document_attention
from m2forge.kernels.flex import document_mask, flex
from m2forge.model.config import WindowConfig


class Attend(Protocol):
    """Attention with a fixed mask."""

    def __call__(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor: ...


class AttentionPlan(Protocol):
    @property
    def position_N(self) -> Tensor:
        """Position of each token in its document, from 0."""
        ...

    @property
    def count_N(self) -> Tensor | None:
        """Weight of each token in expert loads and the auxiliary loss, int64; None: 1 each."""
        ...

    def bind(self, window: WindowConfig | None) -> Attend:
        """The attention of layers with this window."""
        ...

    def to_parent(self, x_ND: Tensor) -> Tensor:
        """Row n is x at the token before n in its document; zero for a first token."""
        ...


class CausalRows:
    def __init__(self, num_rows: int, length: int, device: torch.device | str | None = None) -> None:
        self.num_rows, self.length, self.device = num_rows, length, torch.device(device or "cpu")
        self.position_N = torch.arange(length, device=device).repeat(num_rows)
        self.count_N: Tensor | None = None

    def bind(self, window: WindowConfig | None) -> Attend:
        if window is None and self.device.type == "cuda":
            return CausalAttend(self.num_rows, self.length)
        return Documents([self.length] * self.num_rows, self.device).bind(window)

    def to_parent(self, x_ND: Tensor) -> Tensor:
        x_BLD = x_ND.view(self.num_rows, self.length, -1)
        return F.pad(x_BLD[:, :-1], (0, 0, 1, 0)).flatten(0, 1)


class Documents:
    def __init__(self, lengths: Sequence[int], device: torch.device | str | None = None) -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"every document needs at least one token, got lengths {list(lengths)[:8]}")
        self.lengths, self.device = tuple(lengths), torch.device(device or "cpu")
        length_D = torch.tensor(self.lengths)
        start_D = length_D.cumsum(0) - length_D
        self.start_N = start_D.repeat_interleave(length_D).to(self.device)
        """First token of each token's document."""
        self.position_N = torch.arange(sum(self.lengths), device=self.device) - self.start_N
        self.count_N: Tensor | None = None

    def bind(self, window: WindowConfig | None) -> Attend:
        if self.device.type == "cuda":
            size, num_sinks = (window.size, window.num_sinks) if window else (None, 0)
            return FlexAttend(document_mask(self.start_N, size, num_sinks))
        return DocumentAttend(self.lengths, tuple(visible(length, window) for length in self.lengths))

    def to_parent(self, x_ND: Tensor) -> Tensor:
        return x_ND.roll(1, 0) * (self.position_N > 0)[:, None].to(x_ND.dtype)


def visible(length: int, window: WindowConfig | None, first: int = 0) -> Tensor | None:
    """(length − first, length) mask of the keys that each query of a document sees, from the `first` query on; None
    where the plain causal mask suffices."""
    if window is None or window.size >= length:
        return None
    token = torch.arange(length)
    back = token[first:, None] - token[None, :]
    return (back >= 0) & ((back < window.size) | (token < window.num_sinks)[None, :])


@dataclass(frozen=True)
class CausalAttend:
    num_rows: int
    length: int

    def __call__(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        q, k, v = (x.view(self.num_rows, self.length, *x.shape[1:]).transpose(1, 2) for x in (q_NHK, k_NGK, v_NGK))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).reshape(q_NHK.shape)


@dataclass(frozen=True)
class DocumentAttend:
    lengths: tuple[int, ...]
    masks: tuple[Tensor | None, ...]

    def __call__(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        return document_attention(q_NHK, k_NGK, v_NGK, self.lengths, self.masks)


@dataclass(frozen=True)
class FlexAttend:
    mask: BlockMask

    def __call__(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q_NHK, k_NGK, v_NGK))
        return flex(q, k, v, self.mask)[0].transpose(0, 1)
