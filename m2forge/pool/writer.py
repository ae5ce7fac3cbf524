"""A pool from asyncio: calls of many agents in, few transactions out.

    async with PoolWriter(pool) as writer:
        await writer.append(lease, call)               returns when it is stored
        await writer.end(lease, calls, outcome)        an attempt that is at hand as a whole; the same
        leases = await writer.run(pool.lease, "worker", 8)

SQLite has one writer at a time and a transaction costs the same for one call as for many. So one thread does all that
writes: it takes whatever waits, stores it in one transaction, and tells each of those who wait how it went. The
event loop never blocks, and the more agents there are the more calls share a transaction, with a disk's sync also.
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
"""Calls, or ends, of one transaction, so that others get their turn."""

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")


class _Gathering(Generic[Item, T]):
    """What waits to be stored, and who waits for it."""

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
            # The database does not serve: nothing of the batch is stored.
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
        """Raises `LeaseLostError` where the attempt is not the episode's any more. Calls of one attempt are stored in
        the order in which they are appended."""
        await self._appends.add(Append(lease, call))

    async def end(self, lease: Lease, calls: Sequence[StoredCall], outcome: Outcome) -> bool:
        """An attempt has ended; `calls` are those that were not appended before. Whether its unit may wait to be judged
        now. Raises as `append` does, and then nothing of it is stored."""
        return await self._endings.add(Ending(lease, tuple(calls), outcome))

    async def run(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a method of the pool, after what was asked before."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: method(*args, **kwargs))

    async def close(self) -> None:
        """What waits is stored first."""
        await self._appends.finish()
        await self._endings.finish()
        self._thread.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
