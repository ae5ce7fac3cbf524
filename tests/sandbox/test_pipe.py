"""The writing end of a pipe, ended in every state it can be in: once, and without a word from asyncio."""

import asyncio
import os
from collections.abc import Callable

import pytest

from m2forge.sandbox.stream import Drain

MUCH = b"x" * (1 << 20)


def write_to_nobody(drain: Drain, reader: int) -> None:
    os.close(reader)
    drain.write(b"x")


def write_more_than_fits(drain: Drain, reader: int) -> None:
    drain.write(MUCH)
    drain.close()


ENDS: dict[str, Callable[[Drain, int], None]] = {
    "open": lambda drain, reader: None,
    "closed": lambda drain, reader: drain.close(),
    "closed with something left to write": write_more_than_fits,
    "aborted": lambda drain, reader: drain.abort(),
    "broken": write_to_nobody,
}


@pytest.mark.parametrize("state", ENDS)
def test_a_pipe_is_aborted_in_any_state(state: str) -> None:
    async def scene() -> list[dict[str, object]]:
        received: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: received.append(context))
        reader, writer = os.pipe()
        drain = await Drain.connect(os.fdopen(writer, "wb", buffering=0))
        ENDS[state](drain, reader)
        drain.abort()
        await asyncio.sleep(0.01)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(writer)
        if state != "broken":
            os.close(reader)
        return received

    assert asyncio.run(scene()) == []
