"""Asyncio tasks that end together."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import TypeVar

T = TypeVar("T")


async def gather(work: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """As `asyncio.gather`, but when one raises, or the caller is cancelled, the others are cancelled and have ended
    before this returns: none goes on to use what the caller then closes."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable[asyncio.Task[T]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
