"""How long an event loop stalls through our own code, however loaded the machine is.

A coroutine sleeps for `PERIOD_S` again and again; what a wake-up is late, less the time that the loop's thread was
ready to run and had no processor (the kernel's count, /proc/thread-self/schedstat), is time that the loop computed or
was blocked.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

PERIOD_S = 0.005
MAX_STALL_S = 0.1


@contextlib.asynccontextmanager
async def watched_stalls() -> AsyncIterator[list[float]]:
    """The stalls so far, in seconds."""
    stalls: list[float] = []
    watching = asyncio.create_task(_watch(stalls))
    await asyncio.sleep(0)
    try:
        yield stalls
        await asyncio.sleep(2 * PERIOD_S)  # the last wake-up too
    finally:
        watching.cancel()


async def _watch(stalls: list[float]) -> None:
    while True:
        at_s, waited_s = time.monotonic(), _waited_s()
        await asyncio.sleep(PERIOD_S)
        stalls.append(time.monotonic() - at_s - PERIOD_S - (_waited_s() - waited_s))


def _waited_s() -> float:
    """How long this thread has waited for a processor."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
