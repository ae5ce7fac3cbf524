"""Number of decode steps between host syncs, and the block space each sequence gets for them."""

import math
from collections.abc import Sequence

from m2forge.rollout.request import Request
from m2forge.rollout.scheduler import Scheduler, num_blocks_for


def num_steps_ahead(scheduler: Scheduler, requests: Sequence[Request], depth: int, tokens_per_step: float) -> int:
    """No more steps than the longest remaining completion needs at the expected tokens per step; no more than the
    shortest needs while requests wait; and one where blocks are scarce."""
    last = min if scheduler.waiting else max
    num_wanted = last(request.num_wanted for request in requests)
    num_steps = min(scheduler.config.ahead_steps, math.ceil(num_wanted / tokens_per_step))
    num_missing = 0
    for request in requests:
        num_tokens = request.num_computed + _num_useful(request, depth, num_steps)
        num_missing += max(num_blocks_for(num_tokens, scheduler.config.block_tokens) - len(request.blocks), 0)
    return num_steps if num_missing <= scheduler.pool.num_available else 1


def lend_room(
    scheduler: Scheduler, requests: Sequence[Request], granted: Sequence[int], depth: int, num_steps: int
) -> list[int]:
    """Takes blocks for the steps; returns how many tokens fit from each sequence's last one on, at least as many as
    `granted`."""
    if not depth and num_steps == 1:
        return list(granted)
    return [
        max(num, scheduler.lend(request, _num_useful(request, depth, num_steps)))
        for request, num in zip(requests, granted, strict=True)
    ]


def _num_useful(request: Request, depth: int, num_steps: int) -> int:
    """Tokens that the steps can compute and the request still wants."""
    return min(num_steps * (1 + depth) + depth, request.num_wanted)
