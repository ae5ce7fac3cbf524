"""The HTTP/1.1 client of this package: requests to one server, with whole or streamed responses.

    client = HttpClient("http://127.0.0.1:8400", key=key)
    response = await client.request("POST", "/weights", encode_json(body), timeout_s=30.0)

An engine's response is many small chunks, and a general-purpose client spends more time on each than all other code on
its path. Here a chunk costs one slice of the received bytes. A connection carries one request at a time and is reused
once its response was read to the end. The client follows no redirects, decodes no content, uses no proxy and never
retries: a caller knows whether its request may be sent twice.

All failures are OSErrors: `UnreachableError` if no connection was made and so nothing was sent, `BrokenOffError` if the
response ended early or is not HTTP, TimeoutError after a caller's timeout.
"""

import asyncio
import base64
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import unquote, urlencode, urlsplit

from m2forge.errors import ConfigError
from m2forge.records import JsonValue

CONNECT_S = 10.0
"""Timeout of making a connection."""
IDLE_S = 2.0
"""How long an idle connection stays open for the next request. Servers close theirs after 5 s; a request sent on a
connection just being closed would fail."""
_END = b"\r\n"
_HEAD_END = b"\r\n\r\n"
_MAX_HEAD_BYTES = 64 << 10
_HIGH_BYTES = 1 << 20
"""Unread bytes above which reading pauses, so that the server must wait."""


class UnreachableError(OSError):
    """No connection could be made, so nothing was sent."""


class BrokenOffError(OSError):
    """The response ended early or is not HTTP."""


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    content: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


class HttpClient:
    """A client of one server."""

    def __init__(self, url: str | Callable[[], str], *, key: str | None = None) -> None:
        """`url`: of the server, or a function that returns it, for one that may move: each new connection goes to its
        current URL, and requests in flight at the previous one fail. `key` is sent as a bearer token; a user and
        password in the URL are sent too, if there is no key."""
        self._find_url, self._key, self.is_closed = url if callable(url) else None, key, False
        self._connections = self._point_to(url() if callable(url) else url)

    def _point_to(self, url: str) -> "ConnectionPool":
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"url {url!r}: {error}; expected http://HOST:PORT or https://HOST:PORT") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url {url!r}: expected http://HOST:PORT or https://HOST:PORT")
        host = parts.netloc.rpartition("@")[2]
        headers = {"Host": host, "Accept": "*/*", "Content-Type": "application/json"}
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        self._headers = _header_lines(headers)
        self._path = parts.path.rstrip("/").encode()
        is_secure = parts.scheme == "https"
        port = port or (443 if is_secure else 80)
        return ConnectionPool(parts.hostname, port, is_secure=is_secure, idle_s=IDLE_S)

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        parameters: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Response:
        """Sends a request and receives the whole response, whatever its status, within `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            connection = await self.connect()
            try:
                self.send(connection, method, path, body, parameters=parameters, headers=headers)
                return Response(await connection.receive_status(), await connection.read_all())
            finally:
                self.release(connection)

    async def connect(self) -> "Connection":
        """A connection for one streamed exchange, which the caller must `release`."""
        if self.is_closed:
            raise UnreachableError("the client is closed")
        if self._find_url is not None and (url := self._find_url()) != self.url:
            self._connections.close()
            self._connections = self._point_to(url)
        return await self._connections.take()

    def send(
        self,
        connection: "Connection",
        method: str,
        path: str,
        body: bytes = b"",
        *,
        parameters: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        target = self._path + path.encode()
        if parameters:
            target += b"?" + urlencode(parameters).encode()
        more = _header_lines(headers) if headers else b""
        connection.send(
            b"%b %b HTTP/1.1\r\n%b%bContent-Length: %d\r\n\r\n"
            % (method.encode(), target, self._headers, more, len(body)),
            body,
        )

    def release(self, connection: "Connection") -> None:
        """Keeps the connection for reuse, or closes it if its response was not read to the end."""
        self._connections.give_back(connection)

    def close(self) -> None:
        """Closes all connections; requests in flight fail."""
        self.is_closed = True
        self._connections.close()


def encode_json(value: JsonValue) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


class Connection(asyncio.Protocol):
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

    def send(self, head: bytes, body: bytes) -> None:
        self._forget()
        self._transport.writelines((head, body))

    async def receive_status(self) -> int:
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
            self.fail(BrokenOffError(f"the server sent invalid HTTP: {error}"))
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


class ConnectionPool:
    """Connections to one server, one per request in flight."""

    def __init__(self, host: str, port: int, *, is_secure: bool, idle_s: float) -> None:
        self._host, self._port, self._idle_s = host, port, idle_s
        self._context = ssl.create_default_context() if is_secure else None
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    async def take(self) -> Connection:
        """Returns an idle connection or opens one. Raises UnreachableError if it cannot connect."""
        loop = asyncio.get_running_loop()
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_lost and loop.time() - connection.idle_since_s < self._idle_s:
                self._busy.add(connection)
                return connection
            connection.hang_up()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._context)
        except TimeoutError as error:
            # A caller's own timeout is a cancellation here; this one is the connection's.
            raise UnreachableError(f"no connection within {CONNECT_S:g} s") from error
        except (OSError, UnicodeError) as error:
            # UnicodeError: a name that DNS cannot express.
            raise UnreachableError(str(error) or type(error).__name__) from error
        self._busy.add(connection)
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keeps the connection for reuse, or closes it if its response was not read to the end."""
        self._busy.discard(connection)
        if not connection.is_reusable:
            connection.hang_up()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(self._idle_s, self._sweep)

    def close(self) -> None:
        """Closes all connections; requests in flight fail."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in [*self._busy, *self._idle]:
            connection.fail(BrokenOffError("the client was closed"))
            connection.hang_up()
        self._busy.clear()
        self._idle.clear()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        old_s = loop.time() - self._idle_s
        for connection in self._idle:
            if connection.idle_since_s <= old_s:
                connection.hang_up()
        self._idle = [connection for connection in self._idle if not connection.is_lost]
        self._sweeper = loop.call_later(self._idle_s, self._sweep) if self._idle else None


def _headers(lines: list[bytes]) -> dict[bytes, bytes]:
    headers = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip()
    return headers


def _header_lines(headers: Mapping[str, str]) -> bytes:
    for name, value in headers.items():
        # A line break would begin another header, or the body.
        if not value.isprintable() or not value.isascii():
            raise ConfigError(f"header {name}: expected printable ASCII characters and no line break")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
