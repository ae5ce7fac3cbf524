"""Which tokens of which requests a step computes.

A step holds, within its budget of tokens: the next token of every request that is being completed, then parts of
prompts that are being read, then those that are let in. Requests are served in order of priority, then of age. Where
blocks run out, whoever is last gives all of its own up and waits, with the tokens it has drawn, to be read again; so
the first always goes on, and everybody ends. A request is let in when the blocks for all of its tokens are there, and
may push out requests of lower priority for it.

A request that is about to read what another one is just reading waits for that one's blocks instead: the samples of a
prompt, and prompts that begin alike, read what they share once.
"""

from bisect import insort

from m2forge.records import PolicyVersion
from m2forge.rollout.block_pool import Block, BlockPool, Match
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.request import Request

Copy = tuple[int, int]
"""(from, to): indices of blocks."""
Reading = tuple[Block | None, tuple[int, ...]]
"""The tokens of a whole block, and the block before them."""


class Scheduler:
    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_tokens)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        """Both in the order in which they are served."""
        self.copies: list[Copy] = []
        """Blocks whose contents the step needs copied before it writes anything, in this order."""
        self.num_preempted = 0
        self.num_cached = 0
        """Tokens that were there when a request was let in, over all."""
        self._started: set[str] = set()
        self._step: dict[Request, int] = {}
        self._budget = 0

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=_order)

    def remove(self, request: Request) -> None:
        if request.blocks:
            self._withdraw(request)
        else:
            self.waiting.remove(request)

    def forget(self, id: str) -> None:
        """All requests of a prompt are done."""
        self._started.discard(id)

    def has_started(self, id: str) -> bool:
        """Whether any sample of the prompt has ever run."""
        return id in self._started

    def preempt_all(self) -> None:
        for request in reversed(self.running.copy()):
            self._withdraw(request)
            self.add(request)

    def schedule(self, version: PolicyVersion, *, admits: bool = True) -> dict[Request, int]:
        """How many tokens of each request to compute, whose blocks it holds then. `admits`: whether prompts that have
        not started may be let in."""
        self._step, self._budget, self.copies = {}, self.config.step_tokens, []
        completing = [request for request in self.running if request.num_left == 1]
        reading = [request for request in self.running if request.num_left > 1]
        for request in (*completing, *reading):
            if request.blocks:  # else it was preempted for another one
                self._continue(request)
        if self.waiting:
            self._admit(version, admits)
        return self._step.copy()

    def advance(self, request: Request, num_tokens: int, version: PolicyVersion) -> None:
        """The tokens that the step held for it are computed: blocks that are full by now can be shared."""
        size = self.config.block_tokens
        num_full = request.num_computed // size
        request.note_computed(num_tokens, version)
        if len(request.computed_by) > 1:
            return  # what several weights computed is no other request's
        for place in range(num_full, request.num_computed // size):
            self._publish(request, place, request.ids[place * size : (place + 1) * size])

    def _publish(self, request: Request, place: int, tokens: list[int]) -> None:
        parent = request.blocks[place - 1] if place else None
        ((_, version),) = request.computed_by
        request.blocks[place] = self.pool.publish(request.blocks[place], parent, version, tokens)

    # -- those that run -----------------------------------------------------------------------------------------------

    def _continue(self, request: Request) -> None:
        num_tokens = min(request.num_left, self._budget)
        while self._num_missing(request, num_tokens) > self.pool.num_available and self.running[-1] is not request:
            self._preempt(self.running[-1])
        # The last one takes what is there, and waits with what it holds for more.
        room = (len(request.blocks) + self.pool.num_available) * self.config.block_tokens - request.num_computed
        self._grant(request, min(num_tokens, room))

    def _num_missing(self, request: Request, num_tokens: int) -> int:
        return num_blocks_for(request.num_computed + num_tokens, self.config.block_tokens) - len(request.blocks)

    def _grant(self, request: Request, num_tokens: int) -> None:
        if num_tokens < 1:
            return
        for _ in range(self._num_missing(request, num_tokens)):
            request.blocks.append(self.pool.take())
        self._step[request] = num_tokens
        self._budget -= num_tokens

    def _preempt(self, request: Request) -> None:
        self._withdraw(request)
        self.add(request)
        self.num_preempted += 1

    def _withdraw(self, request: Request) -> None:
        num_full, num_tail = divmod(request.num_computed, self.config.block_tokens)
        if num_tail and len(request.computed_by) == 1:
            # It fills no block, but may still serve whoever goes on from there.
            self._publish(request, num_full, request.ids[request.num_computed - num_tail : request.num_computed])
        self.pool.release(request.blocks)
        request.blocks, request.num_computed, request.computed_by = [], 0, []
        self.running.remove(request)
        self._budget += self._step.pop(request, 0)

    # -- those that wait ----------------------------------------------------------------------------------------------

    def _admit(self, version: PolicyVersion, admits: bool) -> None:
        promised = {self._reading(request, version) for request in self.running} - {None}
        for request in self.waiting.copy():
            if self._budget < 1:
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
            promised.add(self._reading(request, version))
            promised.discard(None)

    def _reading(self, request: Request, version: PolicyVersion) -> Reading | None:
        """The block that a request is going to publish next, if its tokens are known."""
        if any(computed_by != version for _, computed_by in request.computed_by):
            return None
        num_full = request.num_computed // self.config.block_tokens
        return self._next_block(request, num_full, request.blocks[max(num_full - 1, 0) : num_full])

    def _next_block(self, request: Request, num_full: int, last: list[Block]) -> Reading | None:
        size = self.config.block_tokens
        tokens = request.ids[num_full * size : (num_full + 1) * size]
        return (last[0] if last else None, tuple(tokens)) if len(tokens) == size else None

    def _make_room(self, request: Request, match: Match) -> bool:
        """Whether it can be let in, after lower priorities have given up what it takes."""
        num_needed = num_blocks_for(len(request.ids), self.config.block_tokens) - len(match.blocks)

        def lacks() -> bool:
            num_woken = sum(block.num_holders == 0 for block in match.blocks)
            return num_needed + num_woken > self.pool.num_available or len(self.running) >= self.config.max_running

        lower = [other for other in self.running if _is_lower(other, request)]
        most = self.pool.num_available + sum(len(other.blocks) for other in lower)  # less where they share some
        while lacks() and lower and num_needed <= most:
            self._preempt(lower.pop())
        return not lacks()

    def _enter(self, request: Request, match: Match, version: PolicyVersion) -> None:
        self.waiting.remove(request)
        insort(self.running, request, key=_order)
        self._started.add(request.id)
        for block in match.blocks:
            self.pool.hold(block)
        request.blocks = match.blocks.copy()
        num_there = len(match.blocks) * self.config.block_tokens
        if match.tail is not None:
            # The copy runs before anything is written, so that what it reads may even be evicted by now.
            request.blocks.append(self.pool.take())
            self.copies.append((match.tail.index, request.blocks[-1].index))
            num_there += match.num_tail
        self.num_cached += num_there
        if num_there:
            request.note_computed(num_there, version)
        if request.num_cached is None:
            request.num_cached = min(num_there, request.num_prompt)
        self._grant(request, min(request.num_left, self._budget))

    def audit(self) -> None:
        """Check the accounting of blocks, and that every request has the blocks it needs and no other."""
        self.pool.audit(request.blocks for request in self.running)
        for requests in (self.running, self.waiting):
            assert requests == sorted(requests, key=_order)
        assert len(self.running) <= self.config.max_running
        for request in self.running:
            num_needed = num_blocks_for(max(request.num_computed, 1), self.config.block_tokens)
            assert len(request.blocks) == num_needed, f"{len(request.blocks)} blocks for {request.num_computed} tokens"
        for request in self.waiting:
            assert not request.blocks
            assert request.num_computed == 0


def num_blocks_for(num_tokens: int, block_tokens: int) -> int:
    return -(-num_tokens // block_tokens)


def _order(request: Request) -> tuple[int, int, int]:
    return request.order


def _is_lower(request: Request, other: Request) -> bool:
    """Whether its priority is lower: age alone pushes nobody out."""
    return request.prompt.priority < other.prompt.priority
