"""Asyncio tasks that are cancelled together."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import TypeVar

T = TypeVar("T")


async def gather(work: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Like `asyncio.gather`, but when one raises, or the caller is cancelled, it cancels the others and waits for them
    to end, so that none uses a resource that the caller then closes."""
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
