"""A minimal HTTP/1.1 client for streamed responses: sends a request, returns the body's bytes as they arrive.

An engine's response is many small chunks, and a general-purpose client spends more time on each than all other code on
its path. Here a chunk costs one slice of the received bytes. A connection carries one request at a time and is reused
once its response was read to the end. The client follows no redirects, decodes no content and never retries.
"""

import asyncio
import ssl
from collections.abc import Mapping
from typing import cast

_END = b"\r\n"
_HEAD_END = b"\r\n\r\n"
_MAX_HEAD_BYTES = 64 << 10
_HIGH_BYTES = 1 << 20
"""Unread bytes above which reading pauses, so that the server must wait."""


class BrokenOffError(OSError):
    """The response ended early or is not HTTP."""


class Answer(asyncio.Protocol):
    """One connection, and the response received over it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.idle_since_s = 0.0
        self.is_lost = False
        """Whether the connection is closed."""
        self._waiter: asyncio.Future[None] | None = None
        self._is_paused = False
        self._forget()

    def _forget(self) -> None:
        self.status = 0
        self._raw = b""
        """Received bytes that are not parsed yet; `_pieces` follow them."""
        self._pieces: list[bytes] = []
        self._num_needed = 0
        """Bytes still missing before parsing can continue."""
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._num_left: int | None = None
        """Remaining bytes of the body; None if it is chunked or ends with the connection."""
        self._is_chunked, self._stays, self.is_ended = False, False, False
        self._error: Exception | None = None

    # -- for the caller ------------------------------------------------------------------------------------------------

    def ask(self, head: bytes, body: bytes) -> None:
        self._forget()
        self._transport.writelines((head, body))

    async def begin(self) -> int:
        """Waits for the status code and returns it."""
        while not self.status:
            await self._wait()
        return self.status

    async def read(self) -> bytes:
        """Returns the received bytes of the body, waiting for at least one; empty at its end."""
        while not self._parts:
            if self.is_ended:
                return b""
            await self._wait()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._num_bytes = 0
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    async def read_all(self) -> bytes:
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    def fail(self, error: Exception) -> None:
        """Raise `error` in the waiting reader, after the bytes received before it."""
        if not self.is_ended and self._error is None:
            self._error = error
            self._wake()

    @property
    def is_reusable(self) -> bool:
        return self.is_ended and self._stays and not self.is_lost and not self._raw and self._error is None

    def hang_up(self) -> None:
        self.is_lost = True
        self._transport.abort()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- for the connection --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        if self.status and self._num_left is None and not self._is_chunked and error is None:
            self.is_ended = True
            self._wake()
        self.fail(BrokenOffError(f"the connection was lost ({error or 'closed'})"))

    def data_received(self, data: bytes) -> None:
        if self._raw:
            # Joined once, however many pieces a large chunk arrives in.
            self._pieces.append(data)
            self._num_needed -= len(data)
            if self._num_needed > 0:
                return
            data = b"".join((self._raw, *self._pieces))
            self._pieces.clear()
        self._raw = data
        self._num_needed = 0
        try:
            if not self.status and not self._read_head():
                return
            self._read_body()
        except ValueError as error:
            self.fail(BrokenOffError(f"what came is no HTTP: {error}"))
            self.hang_up()
            return
        if self._num_bytes > _HIGH_BYTES and not self._is_paused and not self.is_lost:
            self._is_paused = True
            self._transport.pause_reading()
        if self._parts or self.is_ended or self.status:
            self._wake()

    def _read_head(self) -> bool:
        while (end := self._raw.find(_HEAD_END)) >= 0:
            first, *lines = self._raw[:end].split(_END)
            self._raw = self._raw[end + len(_HEAD_END) :]
            version, _, rest = first.partition(b" ")
            if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
                raise ValueError(f"expected a status line, received {first[:80]!r}")
            status = int(rest[:3])
            if status >= 200:
                self._take_headers(_headers(lines), version, status)
                return True
            # Interim (1xx) responses are ignored.
        if len(self._raw) > _MAX_HEAD_BYTES:
            raise ValueError(f"a head of more than {_MAX_HEAD_BYTES} bytes")
        return False

    def _take_headers(self, headers: Mapping[bytes, bytes], version: bytes, status: int) -> None:
        self._is_chunked = headers.get(b"transfer-encoding", b"").lower().endswith(b"chunked")
        if b"content-length" in headers and not self._is_chunked:
            self._num_left = int(headers[b"content-length"])
        if status in (204, 304):
            self._num_left = 0
        has_end = self._is_chunked or self._num_left is not None
        self._stays = has_end and version == b"HTTP/1.1" and headers.get(b"connection", b"").lower() != b"close"
        self.status, self.is_ended = status, self._num_left == 0

    def _read_body(self) -> None:
        if self._is_chunked:
            self._read_chunks()
        elif self._num_left is None:
            self._take(self._raw)
            self._raw = b""
        elif self._raw and self._num_left:
            part = self._raw[: self._num_left]
            self._raw = self._raw[len(part) :]
            self._num_left -= len(part)
            self._take(part)
            self.is_ended = not self._num_left

    def _read_chunks(self) -> None:
        raw, at = self._raw, 0
        while not self.is_ended and (end := raw.find(_END, at)) >= 0:
            size = int(raw[at:end].partition(b";")[0], 16)
            start = end + len(_END)
            stop = start + size
            if not size:
                # Trailers, which are rare, end with an empty line.
                close = start if raw.startswith(_END, start) else raw.find(_HEAD_END, start) + len(_END)
                if not raw.startswith(_END, close) or close < start:
                    break
                at, self.is_ended = close + len(_END), True
            elif len(raw) < stop + len(_END):
                self._num_needed = stop + len(_END) - len(raw)
                break
            else:
                if not raw.startswith(_END, stop):
                    raise ValueError("a chunk that is longer than it says")
                self._take(raw[start:stop])
                at = stop + len(_END)
        self._raw = raw[at:]

    def _take(self, part: bytes) -> None:
        if part:
            self._parts.append(part)
            self._num_bytes += len(part)


class Connections:
    """Connections to one server, one per request in flight."""

    def __init__(self, host: str, port: int, *, is_secure: bool, idle_s: float) -> None:
        self._host, self._port, self._idle_s = host, port, idle_s
        self._context = ssl.create_default_context() if is_secure else None
        self._idle: list[Answer] = []
        self._busy: set[Answer] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    async def take(self) -> Answer:
        """Returns an idle connection or opens one. Raises OSError if it cannot connect."""
        loop = asyncio.get_running_loop()
        while self._idle:
            answer = self._idle.pop()
            if not answer.is_lost and loop.time() - answer.idle_since_s < self._idle_s:
                self._busy.add(answer)
                return answer
            answer.hang_up()
        _, answer = await loop.create_connection(Answer, self._host, self._port, ssl=self._context)
        self._busy.add(answer)
        return answer

    def give_back(self, answer: Answer) -> None:
        """Keeps the connection for reuse, or closes it if its response was not read to the end."""
        self._busy.discard(answer)
        if not answer.is_reusable:
            answer.hang_up()
            return
        loop = asyncio.get_running_loop()
        answer.idle_since_s = loop.time()
        self._idle.append(answer)
        if self._sweeper is None:
            self._sweeper = loop.call_later(self._idle_s, self._sweep)

    def close(self) -> None:
        """Closes all connections; requests in flight fail."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for answer in [*self._busy, *self._idle]:
            answer.fail(BrokenOffError("the engine was closed"))
            answer.hang_up()
        self._busy.clear()
        self._idle.clear()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        old_s = loop.time() - self._idle_s
        for answer in self._idle:
            if answer.idle_since_s <= old_s:
                answer.hang_up()
        self._idle = [answer for answer in self._idle if not answer.is_lost]
        self._sweeper = loop.call_later(self._idle_s, self._sweep) if self._idle else None


def _headers(lines: list[bytes]) -> dict[bytes, bytes]:
    headers = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip()
    return headers
