"""Chooses the requests and tokens that a step computes.

Within its token budget, a step holds the next token of every decoding request, then chunks of prompts in prefill and of
newly admitted ones. Requests are served by priority, then by age. When blocks run out, the last request in this order
is preempted: its blocks are freed, its sampled tokens stay, and it is prefilled again later. So the first request
always advances and every request ends. A request is admitted when there are blocks for all of its tokens; it may
preempt requests of lower priority.

A request whose next block another request is already prefilling waits for that block instead of computing it: samples
of one prompt, and prompts with a common prefix, prefill the shared part once.

Drafts are verified with the tokens and blocks that remain; they preempt no request. Blocks beyond the computed tokens
are freed at the end of each step.
"""

import math
from bisect import insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from m2forge.records import MAX_INT32, PolicyVersion
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.kv.block_pool import Block, BlockPool, Match
from m2forge.rollout.request import Request

Copy = tuple[int, int]
"""(source, target) block indices."""
PendingBlock = tuple[Block | None, tuple[int, ...]]
"""The block before a full block, and the full block's tokens."""


class Scheduler:
    def __init__(self, config: RolloutConfig, max_context: int | None = None) -> None:
        self.config = config
        self.max_context = min(max_context or MAX_INT32, config.num_blocks * config.block_tokens)
        self.pool = BlockPool(config.num_blocks, config.block_tokens)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        """Requests that wait for admission; like `running`, in scheduling order."""
        self.copies: list[Copy] = []
        """Block copies that the step makes, in this order, before it writes to the cache."""
        self.num_preempted = 0
        self.num_cached = 0
        """Total prefix cache hits, in tokens, over all admissions."""
        self._started: set[str] = set()
        self._step: dict[Request, int] = {}
        self._budget = 0
        self._slots = list(range(config.max_running))[::-1]
        """Free slots."""
        num_columns = num_blocks_for(self.max_context, config.block_tokens)
        self.tables = np.zeros((config.max_running, num_columns), np.int64)
        """Block tables by slot: the request's block indices, followed by stale entries."""

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=_order)

    def remove(self, request: Request) -> None:
        if request.blocks:
            self._withdraw(request)
        else:
            self.waiting.remove(request)

    def forget(self, id: str) -> None:
        """Drop the record that a prompt has started, once all its requests are done."""
        self._started.discard(id)

    def has_started(self, id: str) -> bool:
        """Whether any sample of the prompt was ever admitted."""
        return id in self._started

    @property
    def num_after_prefill(self) -> int:
        """Sequences that will run once all waiting requests are prefilled, at most `max_running`."""
        return min(len(self.running) + len(self.waiting), self.config.max_running)

    def preempt_all(self) -> None:
        for request in reversed(self.running.copy()):
            self._withdraw(request)
            self.add(request)

    def schedule(self, version: PolicyVersion, *, admits: bool = True) -> dict[Request, int]:
        """Returns the number of tokens to compute for each request, and gives each the blocks for them. `admits`:
        whether prompts that have not started may be admitted."""
        self._step, self._budget, self.copies = {}, self.config.step_tokens, []
        decoding, prefilling = list[Request](), list[Request]()
        for request in self.running:
            (decoding if request.num_uncomputed == 1 else prefilling).append(request)
        for request in decoding:
            if request.blocks:  # else it was preempted
                self._continue(request)
        for request in prefilling:
            if self.waiting and _is_lower(request, self.waiting[0]):
                self._admit(version, admits, above=request)
            if request.blocks:
                self._continue(request)
        if self.waiting:
            self._admit(version, admits)
        for request in decoding if self.config.speculation else ():
            if request.drafts and request in self._step:
                num_drafts = min(len(request.drafts), self._budget, self._capacity(request) - 1)
                self._grant(request, 1 + num_drafts)
        return self._step.copy()

    def advance(self, request: Request, num_tokens: int, version: PolicyVersion) -> None:
        """Note that the step computed `num_tokens` of the request, and publish its newly filled blocks for sharing."""
        size = self.config.block_tokens
        num_full = request.num_computed // size
        request.note_computed(num_tokens, version)
        if request.num_computed // size == num_full or len(request.computed_by) > 1:
            return  # blocks computed by several versions are not shared
        for index in range(num_full, request.num_computed // size):
            self._publish(request, index, request.ids[index * size : (index + 1) * size])

    def _publish(self, request: Request, index: int, tokens: list[int]) -> None:
        parent = request.blocks[index - 1] if index else None
        ((_, version),) = request.computed_by
        block = self.pool.publish(request.blocks[index], parent, version, tokens)
        if block is not request.blocks[index]:
            self._limit_mtp_computed(request, block.num_modules, index * self.config.block_tokens)
        self._set_block(request, index, block)

    def table(self, request: Request) -> npt.NDArray[np.int64]:
        """The request's block table."""
        return self.tables[request.slot, : len(request.blocks)]

    def table_of(self, slots: Sequence[int], num_tokens: int) -> npt.NDArray[np.int64]:
        """The block tables of several slots, wide enough for `num_tokens`, rounded up to a power of four blocks: few
        widths need few CUDA graphs."""
        num_bits = (num_blocks_for(num_tokens, self.config.block_tokens) - 1).bit_length()
        num_blocks = 1 << (num_bits + num_bits % 2)
        return self.tables[slots, :num_blocks]

    # -- drafts -------------------------------------------------------------------------------------------------------

    def reserve(self, request: Request, num_drafts: int) -> int:
        """Take blocks for drafts after the computed tokens, until `trim`; returns how many drafts fit."""
        num_drafts = min(num_drafts, self._capacity(request), self.max_context - request.num_computed)
        self._take(request, num_drafts)
        return num_drafts

    def num_steps_per_sync(self, requests: Sequence[Request], depth: int, tokens_per_step: float) -> int:
        """How many decode steps run before the next host sync: no more than the longest remaining completion needs at
        the expected tokens per step; no more than the shortest needs while requests wait; and one where blocks are
        scarce."""
        last = min if self.waiting else max
        num_remaining = last(request.num_remaining for request in requests)
        num_steps = min(self.config.steps_per_sync, math.ceil(num_remaining / tokens_per_step))
        num_missing = sum(
            max(self._num_missing(request, _num_useful(request, depth, num_steps)), 0) for request in requests
        )
        return num_steps if num_missing <= self.pool.num_available else 1

    def reserve_steps(
        self, requests: Sequence[Request], granted: Sequence[int], depth: int, num_steps: int
    ) -> list[int]:
        """Takes blocks for the steps; returns how many tokens fit from each sequence's last one on, at least as many as
        `granted`."""
        if not depth and num_steps == 1:
            return list(granted)
        return [
            max(num, self.reserve(request, _num_useful(request, depth, num_steps)))
            for request, num in zip(requests, granted, strict=True)
        ]

    def trim(self, request: Request) -> None:
        """Free the blocks that hold no computed token."""
        num_needed = num_blocks_for(max(request.num_computed, 1), self.config.block_tokens)
        if len(request.blocks) > num_needed:
            self.pool.release(request.blocks[num_needed:])
            del request.blocks[num_needed:]

    def note_mtp_computed(self, request: Request, depth: int, num_tokens: int) -> None:
        """Note that the first `depth` MTP modules have run over the request's first `num_tokens` tokens."""
        for module in range(depth):
            before, after = request.num_mtp_computed[module], max(request.num_mtp_computed[module], num_tokens)
            for block in request.blocks[before // self.config.block_tokens : after // self.config.block_tokens]:
                block.num_modules = max(block.num_modules, module + 1)
            request.num_mtp_computed[module] = after

    def _limit_mtp_computed(self, request: Request, num_modules: int, num_tokens: int) -> None:
        """Note that only the first `num_modules` modules have run over the tokens after `num_tokens`."""
        for module in range(num_modules, len(request.num_mtp_computed)):
            request.num_mtp_computed[module] = min(request.num_mtp_computed[module], num_tokens)

    # -- running requests ---------------------------------------------------------------------------------------------

    def _continue(self, request: Request) -> None:
        num_tokens = min(request.num_uncomputed, self._budget)
        if request.num_computed + num_tokens <= len(request.blocks) * self.config.block_tokens:
            self._grant(request, num_tokens)
            return
        while self._num_missing(request, num_tokens) > self.pool.num_available and self.running[-1] is not request:
            self._preempt(self.running[-1])
        # The last request takes the blocks that remain and keeps them while it waits for more.
        self._grant(request, min(num_tokens, self._capacity(request)))

    def _capacity(self, request: Request) -> int:
        """Tokens that still fit if the request took all available blocks."""
        return (len(request.blocks) + self.pool.num_available) * self.config.block_tokens - request.num_computed

    def _num_missing(self, request: Request, num_tokens: int) -> int:
        return num_blocks_for(request.num_computed + num_tokens, self.config.block_tokens) - len(request.blocks)

    def _grant(self, request: Request, num_tokens: int) -> None:
        """Schedule `num_tokens` of the request in this step, including those granted before."""
        if num_tokens < 1:
            return
        if request.num_computed + num_tokens > len(request.blocks) * self.config.block_tokens:
            self._take(request, num_tokens)
        self._budget -= num_tokens - self._step.get(request, 0)
        self._step[request] = num_tokens

    def _take(self, request: Request, num_tokens: int) -> None:
        for _ in range(self._num_missing(request, num_tokens)):
            self._add_block(request, self.pool.take())

    def _add_block(self, request: Request, block: Block) -> None:
        self.tables[request.slot, len(request.blocks)] = block.index
        request.blocks.append(block)

    def _set_block(self, request: Request, index: int, block: Block) -> None:
        self.tables[request.slot, index] = block.index
        request.blocks[index] = block

    def _preempt(self, request: Request) -> None:
        self._withdraw(request)
        self.add(request)
        self.num_preempted += 1

    def _withdraw(self, request: Request) -> None:
        num_full, num_tail = divmod(request.num_computed, self.config.block_tokens)
        if num_tail and len(request.computed_by) == 1:
            # A partial block can still serve a request with the same prefix.
            self._publish(request, num_full, request.ids[request.num_computed - num_tail : request.num_computed])
        self.pool.release(request.blocks)
        request.blocks, request.num_computed, request.computed_by = [], 0, []
        request.num_mtp_computed, request.drafts = [], []
        self._slots.append(request.slot)
        self.running.remove(request)
        self._budget += self._step.pop(request, 0)

    # -- waiting requests ---------------------------------------------------------------------------------------------

    def _admit(self, version: PolicyVersion, admits: bool, above: Request | None = None) -> None:
        """Admit waiting requests; with `above`, only those of higher priority than `above`."""
        promised = {self._pending_block(request, version) for request in self.running} - {None}
        for request in self.waiting.copy():
            if self._budget < 1 or (above is not None and not _is_lower(above, request)):
                return
            if not (admits or self.has_started(request.id)):
                continue
            if len(self.running) == self.config.max_running and not _is_lower(self.running[-1], request):
                return
            match = self.pool.match(request.ids, version, len(request.ids) - 1)
            if self._next_block(request, len(match.blocks), match.blocks[-1:]) in promised:
                continue
            if not self._make_room(request, match):
                return
            self._enter(request, match, version)
            promised.add(self._pending_block(request, version))
            promised.discard(None)

    def _pending_block(self, request: Request, version: PolicyVersion) -> PendingBlock | None:
        """The block that the request will publish next, if its tokens are known."""
        if any(computed_by != version for _, computed_by in request.computed_by):
            return None
        num_full = request.num_computed // self.config.block_tokens
        return self._next_block(request, num_full, request.blocks[max(num_full - 1, 0) : num_full])

    def _next_block(self, request: Request, num_full: int, last: list[Block]) -> PendingBlock | None:
        size = self.config.block_tokens
        tokens = request.ids[num_full * size : (num_full + 1) * size]
        return (last[0] if last else None, tuple(tokens)) if len(tokens) == size else None

    def _make_room(self, request: Request, match: Match) -> bool:
        """Preempt requests of lower priority if needed; returns whether the request can be admitted."""
        num_needed = num_blocks_for(len(request.ids), self.config.block_tokens) - len(match.blocks)

        def num_taken() -> int:
            return num_needed + sum(block.num_holders == 0 for block in match.blocks)

        def lacks() -> bool:
            return num_taken() > self.pool.num_available or len(self.running) >= self.config.max_running

        if not lacks():
            return True
        lower = [other for other in self.running if _is_lower(other, request)]
        most = self.pool.num_available + sum(len(other.blocks) for other in lower)  # less if they share blocks
        while lacks() and lower and num_taken() <= most:
            self._preempt(lower.pop())
        return not lacks()

    def _enter(self, request: Request, match: Match, version: PolicyVersion) -> None:
        self.waiting.remove(request)
        insort(self.running, request, key=_order)
        self._started.add(request.id)
        request.slot = self._slots.pop()
        num_there = len(match.blocks) * self.config.block_tokens
        request.num_mtp_computed = [num_there] * self.config.speculation
        for index, block in enumerate(match.blocks):
            self.pool.hold(block)
            self._limit_mtp_computed(request, block.num_modules, index * self.config.block_tokens)
            self._add_block(request, block)
        if match.tail is not None:
            # The copy runs before any write of the step, so its source may already be evicted.
            self._add_block(request, self.pool.take())
            self.copies.append((match.tail.index, request.blocks[-1].index))
            num_there += match.num_tail
        self.num_cached += num_there
        if num_there:
            request.note_computed(num_there, version)
        if request.num_cached is None:
            request.num_cached = min(num_there, request.num_prompt)
        self._grant(request, min(request.num_uncomputed, self._budget))

    def metrics(self) -> dict[str, float]:
        return {
            "total_cached_tokens": float(self.num_cached),
            "total_preemptions": float(self.num_preempted),
            "num_running": float(len(self.running)),
            "num_waiting": float(len(self.waiting)),
            "num_blocks": float(self.pool.num_blocks),
            "num_held_blocks": float(self.pool.num_held),
            "num_unused_blocks": float(self.pool.num_unused),
        }

    def audit(self) -> None:
        """Check the block accounting, and that every request holds exactly the blocks it needs."""
        self.pool.audit(request.blocks for request in self.running)
        for requests in (self.running, self.waiting):
            assert requests == sorted(requests, key=_order)
        assert len(self.running) <= self.config.max_running
        for request in self.running:
            num_needed = num_blocks_for(max(request.num_computed, 1), self.config.block_tokens)
            assert len(request.blocks) == num_needed, f"{len(request.blocks)} blocks for {request.num_computed} tokens"
            indices = [block.index for block in request.blocks]
            assert self.tables[request.slot, :num_needed].tolist() == indices, "the table names other blocks"
            assert [request.num_computed, *request.num_mtp_computed] == sorted(
                [request.num_computed, *request.num_mtp_computed], reverse=True
            ), f"modules ran over {request.num_mtp_computed} of {request.num_computed} tokens"
        slots = [*self._slots, *(request.slot for request in self.running)]
        assert sorted(slots) == list(range(self.config.max_running)), "a slot is lost or there twice"
        for request in self.waiting:
            assert not request.blocks
            assert request.num_computed == 0


def num_blocks_for(num_tokens: int, block_tokens: int) -> int:
    return -(-num_tokens // block_tokens)


def _num_useful(request: Request, depth: int, num_steps: int) -> int:
    """Tokens that the steps can compute and the request still wants."""
    return min(num_steps * (1 + depth) + depth, request.num_remaining)


def _order(request: Request) -> tuple[int, int, int]:
    return request.order


def _is_lower(request: Request, other: Request) -> bool:
    """Whether the request's priority is lower; requests never preempt by age alone."""
    return request.prompt.priority < other.prompt.priority
