"""Limits the share of the event loop that long requests may take, however many arrive.

Their work cannot be interrupted, so it runs in pieces, one at a time and in order of arrival, and the loop serves other
requests between two pieces. A piece that took t seconds, more than `FREE_S`, is followed by a pause of
`PAUSES` * (t - `FREE_S`), at most `MAX_PAUSE_S`, while other requests are in flight. A short piece with no other
waiting costs no extra iteration of the loop.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

FREE_S = 0.005
"""Seconds that a turn in a conversation of a few hundred messages takes."""
PAUSES = 7.0
MAX_PAUSE_S = 0.5
LONG_BYTES = 16 << 10
"""Requests with shorter bodies run without taking turns."""


class LoopShare:
    def __init__(self) -> None:
        self.num_requests = 0
        """Number of requests in flight in the whole gateway, short ones included; the gateway updates it."""
        self._is_taken = False
        """Whether a piece or the pause after it is running, or the next piece was woken."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def run(self, work: Callable[[], T]) -> T:
        """Run one piece when it is its turn."""
        if self._is_taken:
            await self._wait()
        self._is_taken = True
        start_s = time.monotonic()
        try:
            return work()
        finally:
            self._end(time.monotonic() - start_s)

    async def _wait(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._wake_next()  # pass on the turn that this piece had
            raise

    def _end(self, took_s: float) -> None:
        is_long = took_s > FREE_S
        if not is_long and not self._waiting:
            self._is_taken = False
            return
        has_others = self.num_requests > 1
        pause_s = min(PAUSES * (took_s - FREE_S), MAX_PAUSE_S) if is_long and has_others else 0.0
        # Even without a pause the loop runs once, so that it can serve other events.
        asyncio.get_running_loop().call_later(pause_s, self._wake_next)

    def _wake_next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False
