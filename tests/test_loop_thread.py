"""A thread that runs coroutines for synchronous code: results, interrupts and closing."""

import asyncio
import concurrent.futures
import os
import signal
import threading
import time

import pytest

from m2forge.loop_thread import LoopThread


def test_results_and_errors_come_back_to_the_caller() -> None:
    async def divide(by: int) -> float:
        await asyncio.sleep(0)
        return 6 / by

    with LoopThread("test") as thread:
        assert thread.run(divide(2)) == 3
        with pytest.raises(ZeroDivisionError):
            thread.run(divide(0))
        assert thread.run(divide(3)) == 2


def test_an_interrupt_returns_after_the_cleanup() -> None:
    ended: list[str] = []

    async def wait() -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            ended.append("cleaned up")

    with LoopThread("test") as thread:
        with pytest.raises(KeyboardInterrupt):
            thread.run(wait())
        assert ended == ["cleaned up"]


def test_closing_cancels_what_runs_and_calls_back_last() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    thread = LoopThread("test", on_close=lambda: ended.append("closed"))
    running = thread.start(wait())
    thread.run(asyncio.sleep(0))
    thread.close()
    thread.close()
    assert ended == ["cancelled", "closed"]
    with pytest.raises(concurrent.futures.CancelledError):
        running.wait()
    running.cancel()
    with pytest.raises(RuntimeError):
        thread.run(asyncio.sleep(0))


def test_a_coroutine_cancelled_before_it_starts_ends() -> None:
    with LoopThread("test") as thread:
        blocked = thread.start(_block(0.1))
        running = thread.start(asyncio.sleep(60))
        running.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            running.wait()
        blocked.wait()


async def _block(seconds: float) -> None:
    time.sleep(seconds)
