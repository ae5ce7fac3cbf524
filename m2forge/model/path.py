"""What joins the segments of a tree (tree/segment.py) that run one at a time.

    PathStack   keys and values of the tokens on the path from the root to the current segment, layer by layer, and the
                gradients that the segments below add to them
    PathPlan    the attention plan of one segment: it attends to the path above and to itself

Without gradients the plan writes the segment's keys and values to the stack. With gradients, the path above is an
input: the backward pass adds its gradient to the stack, and adds to the gradient of the segment's own keys and values
what the segments below have left there. So the gradient of a segment is complete when all segments below it have run
backward first.

A segment's first tokens also need the states that the MTP modules take from the token above (`to_parent`). These are
few: the walk (train/walk.py) holds them.

Shapes: N tokens of the segment with padding, P tokens of the path up to its end, H query heads, G key/value heads,
K head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from m2forge.kernels.arithmetic import at_least_float32
from m2forge.kernels.path_attention import path_attention_plain, path_mask
from m2forge.model.config import WindowConfig

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


MOST_KEY_PADDING = 127
"""Keys behind a path's last that a kernel may read, in whole blocks of 128."""


class PathTensor:
    """Keys or values of one layer."""

    def __init__(self, num_tokens: int, like_NGK: Tensor, on_host: bool) -> None:
        self._device, self._on_host = like_NGK.device, on_host
        self._shape = (num_tokens, *like_NGK.shape[1:])
        self.x_PGK = self._buffer(like_NGK.dtype)
        self.grad_PGK: Tensor | None = None
        """In at least float32: many segments add to it."""

    def _buffer(self, dtype: torch.dtype) -> Tensor:
        if self._on_host:
            return torch.zeros(self._shape, dtype=dtype, pin_memory=self._device.type == "cuda")
        return torch.zeros(self._shape, dtype=dtype, device=self._device)

    def join(self, depth: int, own_NGK: Tensor, num_keys: int, writes: bool) -> Tensor:
        """The path above, `depth` tokens, `own_NGK` behind it, and padding up to `num_keys`. `writes`: whether segments
        below will read them."""
        end = depth + own_NGK.shape[0]
        if self._on_host:
            if writes:
                self.x_PGK[depth:end] = own_NGK
            padding = own_NGK.new_zeros(num_keys - end, *own_NGK.shape[1:])
            return torch.cat((self.x_PGK[:depth].to(self._device), own_NGK, padding))
        # Written in any case: a view of the buffer saves a copy of the path in each layer.
        self.x_PGK[depth:end] = own_NGK
        return self.x_PGK[:num_keys].detach()

    def add_grad(self, grad_PGK: Tensor) -> None:
        """Adds the gradient of the path's first tokens."""
        if self.grad_PGK is None:
            self.grad_PGK = self._buffer(at_least_float32(grad_PGK.dtype))
        self.grad_PGK[: grad_PGK.shape[0]] += grad_PGK.to(self.grad_PGK.device)

    def take_grad(self, depth: int, end: int) -> Tensor | None:
        """The gradient of the tokens from `depth` to `end`, which is zero from here on; None if there is none."""
        if self.grad_PGK is None:
            return None
        taken_NGK = self.grad_PGK[depth:end].to(self._device, copy=True)
        self.grad_PGK[depth:end].zero_()
        return taken_NGK


class PathStack:
    def __init__(self, num_tokens: int, on_host: bool = False) -> None:
        """`num_tokens`: those of the longest path, with the padding of a segment at its end."""
        self._num_tokens, self._on_host = num_tokens + MOST_KEY_PADDING, on_host
        self._tensors: dict[tuple[str, int], PathTensor] = {}

    def at(self, kind: str, layer: int, like_NGK: Tensor) -> PathTensor:
        if (kind, layer) not in self._tensors:
            self._tensors[kind, layer] = PathTensor(self._num_tokens, like_NGK, self._on_host)
        return self._tensors[kind, layer]

    def copy(self, depth: int, end: int) -> dict[tuple[str, int], Tensor]:
        """A copy of the keys and values from `depth` to `end`, in the same memory."""
        return {key: tensor.x_PGK[depth:end].clone() for key, tensor in self._tensors.items()}

    def restore(self, depth: int, copied: dict[tuple[str, int], Tensor]) -> None:
        for key, x_NGK in copied.items():
            self._tensors[key].x_PGK[depth : depth + x_NGK.shape[0]] = x_NGK


class _Join(torch.autograd.Function):
    """Keys or values of the path up to the segment's end, from the segment's own."""

    @staticmethod
    def forward(
        ctx: Any, own_NGK: Tensor, tensor: PathTensor, depth: int, num_keys: int, num_inner: int, writes: bool
    ) -> Tensor:
        """`num_inner`: the segment's tokens that segments below attend to."""
        ctx.tensor, ctx.depth, ctx.num_own, ctx.num_inner = tensor, depth, own_NGK.shape[0], num_inner
        return tensor.join(depth, own_NGK, num_keys, writes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PGK: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        tensor, depth, num_inner = ctx.tensor, ctx.depth, ctx.num_inner
        if depth:
            tensor.add_grad(grad_PGK[:depth])
        own_NGK = grad_PGK[depth : depth + ctx.num_own]
        below_NGK = tensor.take_grad(depth, depth + num_inner) if num_inner else None
        if below_NGK is not None:
            total_NGK = own_NGK.to(below_NGK.dtype, copy=True)
            total_NGK[:num_inner] += below_NGK
            own_NGK = total_NGK.to(own_NGK.dtype)
        return own_NGK, None, None, None, None, None


@dataclass(frozen=True)
class _PlainAttend:
    mask_NP: Tensor

    @property
    def num_keys(self) -> int:
        return self.mask_NP.shape[1]

    def __call__(self, q_NHK: Tensor, k_PGK: Tensor, v_PGK: Tensor) -> Tensor:
        return path_attention_plain(q_NHK, k_PGK, v_PGK, self.mask_NP)


@dataclass(frozen=True)
class _FlexAttend:
    mask: "BlockMask"

    @property
    def num_keys(self) -> int:
        """In whole blocks."""
        return int(self.mask.seq_lengths[1])

    def __call__(self, q_NHK: Tensor, k_PGK: Tensor, v_PGK: Tensor) -> Tensor:
        from m2forge.kernels.flex import path_flex

        q, k, v = (x.transpose(0, 1)[None] for x in (q_NHK, k_PGK, v_PGK))
        return path_flex(q, k, v, self.mask)[0].transpose(0, 1)


class Subtrees(Protocol):
    """The tokens of a segment in depth-first order, padding last. `Trees` is one."""

    @property
    def position_N(self) -> Tensor: ...

    @property
    def count_N(self) -> Tensor | None: ...

    @property
    def parent_N(self) -> Tensor:
        """Index in the segment, −1 for a token below the path above."""
        ...

    @property
    def exit_N(self) -> Tensor:
        """Index in the segment after the last descendant."""
        ...


class Chain:
    """A run of tokens of one document from position `depth` on, and padding up to `length`."""

    def __init__(self, depth: int, num_tokens: int, device: torch.device, length: int | None = None) -> None:
        token_N = torch.arange(num_tokens if length is None else length, device=device)
        is_own_N = token_N < num_tokens
        self.position_N = torch.where(is_own_N, token_N + depth, token_N - num_tokens)
        self.count_N = None if length is None else is_own_N.long()
        self.parent_N = torch.where(token_N == num_tokens, -1, token_N - 1)
        self.exit_N = torch.where(is_own_N, num_tokens, token_N.shape[0])


class PathPlan:
    """The attention plan of one segment over the path above it; each plan serves one forward pass."""

    def __init__(
        self,
        stack: PathStack,
        subtrees: Subtrees,
        *,
        depth: int,
        num_tokens: int,
        is_leaf: bool,
        states_above: Sequence[Tensor] = (),
        grads_below: Sequence[Tensor | None] = (),
    ) -> None:
        """`depth`: tokens of the path above. `num_tokens`: those of the segment, without padding. `states_above`: what
        `last_states` of the segment above holds. `grads_below`: gradients of this plan's `last_states`, from the
        segments below."""
        self.position_N, self.count_N = subtrees.position_N, subtrees.count_N
        self._parent_N, self._exit_N = subtrees.parent_N, subtrees.exit_N
        self.stack, self.depth, self.num_tokens, self.is_leaf = stack, depth, num_tokens, is_leaf
        self.states_above, self._grads_below = states_above, grads_below
        self.last_states: list[Tensor] = []
        """The segment's last states, one row each, that the modules take: the main model's, then of each module but the
        last."""

    def bind(self, window: WindowConfig | None) -> "PathAttend":
        return self._bind(window, None)

    def bind_queries(self, window: WindowConfig | None, query_Q: Tensor) -> "PathAttend":
        return self._bind(window, query_Q)

    def _bind(self, window: WindowConfig | None, query_Q: Tensor | None) -> "PathAttend":
        size, num_sinks = (None, 0) if window is None else (window.size, window.num_sinks)
        geometry = (self._exit_N, self.position_N, self.depth, size, num_sinks)
        if self.position_N.is_cuda:
            from m2forge.kernels.flex import path_mask as block_mask

            return PathAttend(self, _FlexAttend(block_mask(*geometry, query_Q)))
        mask_NP = path_mask(*geometry)
        return PathAttend(self, _PlainAttend(mask_NP if query_Q is None else mask_NP[query_Q]))

    def to_parent(self, x_ND: Tensor) -> Tensor:
        """Called once by each module, in order."""
        index = len(self.last_states)
        self.last_states.append(x_ND[self.num_tokens - 1 : self.num_tokens])
        above_1D = self.states_above[index] if self.states_above else x_ND.new_zeros(1, x_ND.shape[1])
        if not x_ND.requires_grad:
            # Nor do the states above get a gradient. Ranks that shard a model rely on it: a module's input requires a
            # gradient on all of them or on none, or they would reduce gradients at different times and wait forever.
            above_1D = above_1D.detach()
        return torch.cat((above_1D, x_ND)).index_select(0, self._parent_N + 1)

    def roots(self) -> tuple[list[Tensor], list[Tensor]]:
        """(states to run backward from beside the loss, their gradients)"""
        known = [
            (state, grad.to(state.dtype))
            for state, grad in zip(self.last_states, self._grads_below, strict=False)
            if grad is not None and state.requires_grad
        ]
        return [state for state, _ in known], [grad for _, grad in known]


@dataclass(frozen=True)
class PathAttend:
    plan: PathPlan
    attend: _FlexAttend | _PlainAttend
    layer: int = -1

    def at_layer(self, layer: int) -> "PathAttend":
        return replace(self, layer=layer)

    def __call__(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        if q_NHK.is_cuda or torch.compiler.is_compiling():
            from m2forge.kernels.flex import run_eagerly

            # The backward pass adds to the stack: not in a compiled graph.
            out_NHK: Tensor = run_eagerly(self._run, q_NHK, k_NGK, v_NGK)
            return out_NHK
        return self._run(q_NHK, k_NGK, v_NGK)

    def _run(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        return self.attend(q_NHK, self._concat("k", k_NGK), self._concat("v", v_NGK))

    def _concat(self, kind: str, own_NGK: Tensor) -> Tensor:
        plan = self.plan
        tensor, num_keys = plan.stack.at(kind, self.layer, own_NGK), self.attend.num_keys
        num_inner, writes = 0 if plan.is_leaf else plan.num_tokens, not torch.is_grad_enabled()
        joined: Tensor = _Join.apply(  # type: ignore[no-untyped-call]
            own_NGK, tensor, plan.depth, num_keys, num_inner, writes
        )
        return joined
