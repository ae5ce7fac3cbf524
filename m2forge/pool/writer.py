"""Asyncio access to a pool: calls of many agents in, few transactions out.

    async with PoolWriter(pool) as writer:
        await writer.append(lease, call)               returns when it is stored
        await writer.end(lease, calls, outcome)        stores a whole attempt; returns when it is stored
        leases = await writer.run(pool.lease, "worker", 8)

SQLite has one writer at a time, and a transaction costs the same for one call as for many. So one thread does all
writes: it stores everything that is pending in one transaction and resolves each caller's future. The event loop never
blocks, and the more agents there are, the more calls share a transaction and its disk sync.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Generic, ParamSpec, Self, TypeVar

from m2forge.errors import M2ForgeError
from m2forge.pool.delta import StoredCall
from m2forge.pool.pool import Pool
from m2forge.pool.record import Append, Ending
from m2forge.pool.stored import Lease, Outcome

MAX_AT_ONCE = 512
"""Maximum calls, or attempts, per transaction, so that other transactions get their turn."""

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")


class _Gathering(Generic[Item, T]):
    """Batches pending items into one store operation and resolves their futures."""

    def __init__(self, store: Callable[[list[Item]], Awaitable[Sequence[T | M2ForgeError]]]) -> None:
        self._store = store
        self._waiting: list[tuple[Item, asyncio.Future[T]]] = []
        self._flushing: asyncio.Task[None] | None = None

    async def add(self, item: Item) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())
        return await future

    async def finish(self) -> None:
        while self._flushing is not None:
            await self._flushing

    async def _flush(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:MAX_AT_ONCE], self._waiting[MAX_AT_ONCE:]
                await self._store_batch(batch)
        finally:
            self._flushing = None

    async def _store_batch(self, batch: list[tuple[Item, asyncio.Future[T]]]) -> None:
        told: Sequence[T | M2ForgeError]
        try:
            told = await self._store([item for item, _ in batch])
        except M2ForgeError as error:
            # The database failed: nothing of the batch is stored.
            told = [error] * len(batch)
        except BaseException:
            for _, future in batch:
                future.cancel()
            raise
        for (_, future), answer in zip(batch, told, strict=True):
            if future.done():
                continue
            if isinstance(answer, M2ForgeError):
                future.set_exception(answer)
            else:
                future.set_result(answer)


class PoolWriter:
    def __init__(self, pool: Pool) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pool")
        self._appends: _Gathering[Append, None] = _Gathering(lambda items: self.run(pool.append, items))
        self._endings: _Gathering[Ending, bool] = _Gathering(lambda items: self.run(pool.end, items))

    async def append(self, lease: Lease, call: StoredCall) -> None:
        """Store a call; raises `LeaseLostError` if the attempt is no longer the episode's current one. Calls of one
        attempt are stored in the order in which they are appended."""
        await self._appends.add(Append(lease, call))

    async def end(self, lease: Lease, calls: Sequence[StoredCall], outcome: Outcome) -> bool:
        """End an attempt; `calls` are those not appended before. Returns whether its unit may now be complete and wait
        for a reward. Raises as `append` does, and then stores none of it."""
        return await self._endings.add(Ending(lease, tuple(calls), outcome))

    async def run(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a method of the pool in the writer's thread, in the order of the calls."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: method(*args, **kwargs))

    async def close(self) -> None:
        """Store all pending items, then stop the thread."""
        await self._appends.finish()
        await self._endings.finish()
        self._thread.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
