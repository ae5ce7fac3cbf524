"""A process's pipes in an event loop: its output goes to a callback, writes to its input wait for buffer space."""

import asyncio
from collections.abc import Callable
from typing import IO, cast


class Source(asyncio.Protocol):
    """Reads a pipe to its end and passes each chunk to `take`."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._transport: asyncio.ReadTransport | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(cls, file: IO[bytes], take: Callable[[bytes], None]) -> "Source":
        loop = asyncio.get_running_loop()
        _, source = await loop.connect_read_pipe(lambda: cls(take), file)
        return source

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.ReadTransport", transport)

    def data_received(self, data: bytes) -> None:
        self._take(data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def pause(self) -> None:
        if self._transport is not None and not self.ended.done():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self.ended.done():
            self._transport.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class Drain(asyncio.BaseProtocol):
    """Writes to a pipe; data is discarded once the reader has closed it."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._has_room = asyncio.Event()
        self._has_room.set()

    @classmethod
    async def connect(cls, file: IO[bytes]) -> "Drain":
        loop = asyncio.get_running_loop()
        _, drain = await loop.connect_write_pipe(cls, file)
        return drain

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._has_room.set()

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()

    def write(self, data: bytes) -> None:
        if self._transport is not None and data:
            self._transport.write(data)

    async def flush(self) -> None:
        """Wait until the buffer has room."""
        await self._has_room.wait()

    def close(self) -> None:
        """Close the pipe after all buffered data is written."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        transport = self._transport
        # Do not abort a closing transport with an empty buffer: asyncio would report its end twice.
        if transport is not None and (not transport.is_closing() or transport.get_write_buffer_size()):
            transport.abort()
