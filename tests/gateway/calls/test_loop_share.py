"""Pieces of work that take turns on the event loop."""

import asyncio
import contextlib
import time

import pytest

from m2forge.gateway.calls.body import FREE_S, MAX_PAUSE_S, PAUSES, LoopShare


def work(seconds: float) -> float:
    """When it began."""
    start_s = time.monotonic()
    while time.monotonic() - start_s < seconds:
        pass
    return start_s


def test_a_piece_without_waiting_requests_costs_no_loop_pass() -> None:
    async def run() -> None:
        share, passed = LoopShare(), []
        share.num_requests = 1
        asyncio.get_running_loop().call_soon(lambda: passed.append(True))
        for _ in range(3):
            await share.run(lambda: work(0.0))
        assert not passed, "the loop ran something else in between"
        await asyncio.sleep(0)
        assert passed

    asyncio.run(run())


@pytest.mark.parametrize("num_requests", [1, 2])
def test_long_pieces_pause_only_while_other_requests_wait(num_requests: int) -> None:
    async def run() -> float:
        share = LoopShare()
        share.num_requests = num_requests
        await share.run(lambda: work(4 * FREE_S))
        ended_s = time.monotonic()
        return await share.run(lambda: work(0.0)) - ended_s

    # The least of five, because the machine may be busy with something else.
    waited_s = min(asyncio.run(run()) for _ in range(5))
    assert (waited_s > 15 * FREE_S) == (num_requests > 1)


def test_the_loop_serves_others_between_ordered_pieces() -> None:
    async def run() -> None:
        share, order = LoopShare(), []

        def piece(number: int) -> None:
            order.append(f"piece {number}")
            asyncio.get_running_loop().call_soon(order.append, f"after {number}")

        await asyncio.gather(*(share.run(lambda number=number: piece(number)) for number in range(3)))  # type: ignore[misc]
        await asyncio.sleep(0)
        pieces = [entry for entry in order if entry.startswith("piece")]
        assert pieces == ["piece 0", "piece 1", "piece 2"]

    asyncio.run(run())


@pytest.mark.parametrize("when", ["waiting", "woken"])
def test_a_cancelled_request_passes_its_turn_on(when: str) -> None:
    async def run() -> None:
        share = LoopShare()
        share.num_requests = 3
        first = asyncio.create_task(share.run(lambda: work(2 * FREE_S)))
        second = asyncio.create_task(share.run(lambda: work(0.0)))
        third = asyncio.create_task(share.run(lambda: work(0.0)))
        await first
        if when == "woken":
            share._wake_next()
        second.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await second
        await asyncio.wait_for(third, 60)
        await asyncio.wait_for(share.run(lambda: work(0.0)), 60)

    asyncio.run(run())


def test_a_piece_that_raises_ends_its_turn() -> None:
    async def run() -> None:
        share = LoopShare()
        with pytest.raises(ZeroDivisionError):
            await share.run(lambda: 1 // 0)
        assert await asyncio.wait_for(share.run(lambda: 7), 60) == 7

    asyncio.run(run())


@pytest.mark.parametrize("work_s", [0.0, 0.02, 0.1])
def test_a_turn_that_took_long_is_followed_by_a_pause(work_s: float) -> None:
    async def wait() -> tuple[float, float]:
        share = LoopShare()
        share.num_requests = 2
        started_s = await share.run(lambda: work(work_s))
        ended_s = time.monotonic()
        return ended_s - started_s, await share.run(lambda: work(0.0)) - ended_s

    took_s, waited_s = asyncio.run(wait())
    assert waited_s >= min(max(0.0, PAUSES * (took_s - FREE_S)), MAX_PAUSE_S) - 0.005
    if not work_s:
        assert min(waited_s, *(asyncio.run(wait())[1] for _ in range(4))) < 0.1
    else:
        assert waited_s > 3 * work_s
