"""How long an event loop stalls through our own code, however loaded the machine is.

A coroutine sleeps for `PERIOD_S` again and again; what a wake-up is late, less the time that the loop's thread was
ready to run and had no processor (the kernel's count, schedstat), is time that the loop computed or was blocked. Less
also the longest such wait of the process's other threads: one of them may have held the interpreter's lock meanwhile.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

PERIOD_S = 0.005
MAX_STALL_S = 0.1


@asynccontextmanager
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
        late_s, now_s = time.monotonic() - at_s - PERIOD_S, _waited_s()
        own = threading.get_native_id()
        waits = {thread: now_s[thread] - waited_s.get(thread, 0.0) for thread in now_s}
        stalls.append(late_s - waits.pop(own) - max(waits.values(), default=0.0))


def _waited_s() -> dict[int, float]:
    """How long each thread of this process has waited for a processor."""
    waited_s = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            waited_s[int(task.name)] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return waited_s
