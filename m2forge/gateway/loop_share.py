"""The share of the event loop that work on long requests may take, however many of them come.

Such work cannot be interrupted, so it is done one piece at a time, and others are served between two pieces. A piece
that took t seconds, more than `FREE_S`, is followed by a pause of `PAUSES` * (t - `FREE_S`).
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

FREE_S = 0.005
"""What a turn of a conversation of some hundred messages takes."""
PAUSES = 7.0
MAX_PAUSE_S = 0.5
LONG_BYTES = 16 << 10
"""Requests with shorter bodies need no turn."""


class LoopShare:
    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn. What is done in it must not wait for anything."""
        await self._turn.acquire()
        start_s = time.monotonic()
        try:
            yield
        finally:
            pause_s = min(max(0.0, PAUSES * (time.monotonic() - start_s - FREE_S)), MAX_PAUSE_S)
            asyncio.get_running_loop().call_later(pause_s, self._turn.release)
