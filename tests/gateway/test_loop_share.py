"""The share of the event loop that long requests may take."""

import asyncio
import time

import pytest

from m2forge.gateway.loop_share import FREE_S, MAX_PAUSE_S, PAUSES, LoopShare


@pytest.mark.parametrize("work_s", [0.0, 0.02, 0.1])
def test_a_turn_that_took_long_is_followed_by_a_pause(work_s: float) -> None:
    async def wait() -> tuple[float, float]:
        share = LoopShare()
        async with share.turn():
            started_s = time.monotonic()
            time.sleep(work_s)
            took_s = time.monotonic() - started_s
        ended_s = time.monotonic()
        async with share.turn():
            return took_s, time.monotonic() - ended_s

    took_s, waited_s = asyncio.run(wait())
    assert waited_s >= min(max(0.0, PAUSES * (took_s - FREE_S)), MAX_PAUSE_S) - 0.001
    if not work_s:
        assert waited_s < 0.1
    else:
        assert waited_s > 3 * work_s
