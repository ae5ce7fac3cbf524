"""Slots for concurrent attempts, shared by training and evaluation: never more than `agent.num_jobs` in all.

While an evaluation runs, training leaves `check.share` of the slots to it and uses the rest; training attempts that
already hold one of those slots finish first. Before the first training step and after the last, an evaluation may take
all slots.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class Slots:
    def __init__(self, total: int, share: float = 1.0) -> None:
        """`share`: share of the slots for evaluations beside training; at least one slot."""
        self.total, self._reserved = total, max(1, min(total, round(share * total)))
        self.is_training = False
        """Whether training is running and takes slots."""
        self._is_evaluating = False
        self.num_training = self.num_evaluating = 0
        """Slots that training and evaluation hold."""
        self._waiting: list[asyncio.Future[None]] = []

    def take(self, num: int) -> int:
        """Take up to `num` slots for training; returns how many."""
        limit = self.total - self._reserved if self._is_evaluating else self.total
        num_free = min(limit - self.num_training, self.total - self.num_training - self.num_evaluating)
        num = max(0, min(num, num_free))
        self.num_training += num
        return num

    def give_back(self, num: int = 1) -> None:
        """Return `num` slots of training."""
        self.num_training -= num
        self._wake()

    def end_training(self) -> None:
        self.is_training = False
        self._wake()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Reserve the evaluation's share of the slots for the duration of the context."""
        self._is_evaluating = True
        try:
            yield
        finally:
            self._is_evaluating = False

    @asynccontextmanager
    async def evaluating(self) -> AsyncIterator[None]:
        """Wait for a free slot and hold it for one attempt at a held-out task."""
        while not self._has_room():
            freed = asyncio.get_running_loop().create_future()
            self._waiting.append(freed)
            await freed
        self.num_evaluating += 1
        try:
            yield
        finally:
            self.num_evaluating -= 1
            self._wake()

    def _has_room(self) -> bool:
        limit = self._reserved if self.is_training else self.total
        return self.num_evaluating < limit and self.num_training + self.num_evaluating < self.total

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for freed in waiting:
            if not freed.done():
                freed.set_result(None)
