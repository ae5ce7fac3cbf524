"""A pool from asyncio: calls of many agents in, few transactions out.

    async with PoolWriter(pool) as writer:
        await writer.append(lease, call)               returns when it is stored
        leases = await writer.run(pool.lease, "worker", 8)

SQLite has one writer at a time and a transaction costs the same for one call as for many. So one thread does all that
writes: it takes whatever calls wait, stores them in one transaction, and tells each of those who wait how it went. The
event loop never blocks, and the more agents there are the more calls share a transaction, with a disk's sync also.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from m2forge.errors import M2ForgeError
from m2forge.pool.delta import StoredCall
from m2forge.pool.pool import Pool
from m2forge.pool.record import Append
from m2forge.pool.stored import Lease

MAX_APPENDS = 512
"""Calls of one transaction, so that others get their turn."""

P = ParamSpec("P")
T = TypeVar("T")


class PoolWriter:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pool")
        self._waiting: list[tuple[Append, asyncio.Future[None]]] = []
        self._flushing: asyncio.Task[None] | None = None

    async def append(self, lease: Lease, call: StoredCall) -> None:
        """Raises `LeaseLostError` where the attempt is not the episode's any more. Calls of one attempt are stored in
        the order in which they are appended."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((Append(lease, call), future))
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())
        await future

    async def run(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a method of the pool, after what was asked before."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: method(*args, **kwargs))

    async def close(self) -> None:
        """What waits is stored first."""
        while self._flushing is not None:
            await self._flushing
        self._thread.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _flush(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:MAX_APPENDS], self._waiting[MAX_APPENDS:]
                await self._store(batch)
        finally:
            self._flushing = None

    async def _store(self, batch: list[tuple[Append, asyncio.Future[None]]]) -> None:
        refused: list[M2ForgeError | None]
        try:
            refused = await self.run(self._pool.append, [item for item, _ in batch])
        except M2ForgeError as error:
            # The database does not serve: nothing of the batch is stored.
            refused = [error] * len(batch)
        except BaseException:
            for _, future in batch:
                future.cancel()
            raise
        for (_, future), reason in zip(batch, refused, strict=True):
            if future.done():
                continue
            if reason is None:
                future.set_result(None)
            else:
                future.set_exception(reason)
