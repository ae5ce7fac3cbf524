"""The AdamW step with master weights and moments in host memory.

    host: master, mean, square  → a chunk →  device: the same step as without offload  → the chunk →  host

Weights and gradients stay on the device. The update is elementwise, so splitting it into chunks changes no bit. On CUDA
the host memory is pinned and chunks alternate between two streams: while one is copied in or computed, the previous
one is copied out. All device memory of a chunk is allocated and freed within its stream.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from itertools import cycle

import torch
from torch import Tensor

from m2forge.kernels.adamw import AdamWRule, AdamWState, adamw_

CHUNK_ELEMENTS = 1 << 24
"""Elements per chunk: three float32 tensors of this size, on each of two streams, take 384 MiB of device memory."""


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, pinned if `tensor` is on CUDA."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor)


def adamw_from_host_(
    states: Sequence[AdamWState],
    grads: Sequence[Tensor],
    times: Sequence[int],
    scale: Tensor,
    rule: AdamWRule,
    chunk_elements: int | None = None,
) -> None:
    """`adamw.adamw_` for states whose tensors other than the weight are in host memory. The host may read or change
    them once the device has finished the step."""
    size, streams = chunk_elements or CHUNK_ELEMENTS, _streams(scale.device)
    for stream in streams:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(scale.device))
    turn = cycle(streams)
    for state, grad, time in zip(states, grads, times, strict=True):
        for start in range(0, state.weight.numel(), size):
            stream = next(turn)
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                _step_chunk(state, grad, time, scale, rule, slice(start, start + size))
    for stream in streams:
        if stream is not None:
            torch.cuda.current_stream(scale.device).wait_stream(stream)


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream | None, torch.cuda.Stream | None]:
    """The same streams at every step, because torch's allocator reuses memory freed on a stream only on that stream."""
    if device.type != "cuda":
        return None, None
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _step_chunk(state: AdamWState, grad: Tensor, time: int, scale: Tensor, rule: AdamWRule, chunk: slice) -> None:
    at_host = [None if x is None else x.view(-1)[chunk] for x in (state.master, state.mean, state.square)]
    master, mean, square = (None if x is None else x.to(scale.device, non_blocking=True, copy=True) for x in at_host)
    assert mean is not None
    assert square is not None
    here = AdamWState(state.weight.view(-1)[chunk], master, mean, square)
    adamw_([here], [grad.reshape(-1)[chunk]], [time], scale, rule)
    for kept, changed in zip(at_host, (master, mean, square), strict=True):
        if kept is not None and changed is not None:
            kept.copy_(changed, non_blocking=True)
