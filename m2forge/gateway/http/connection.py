"""A uvicorn connection with limits on the size and duration of a request's head, on how long a client may leave its
response unread, and on how long it may keep sending a refused body.

uvicorn limits neither the time until the headers are complete nor, with every parser, their size, so a client could
hold connections open by sending a header now and then; and it waits forever for a client that reads nothing. Here one
timer runs from the opening of the connection, or from the first byte after a response, until the headers are complete;
another runs while the write buffers are full. The application limits bodies. If a request is answered before its body
is complete, the rest of the body is discarded for `linger_s`, so that a client that reads only after sending still gets
the response; then the connection is closed.

`ConnectionLimits` limits the number of connections.

Uses uvicorn's httptools parser if it is installed, else its pure Python parser.
"""

import asyncio
import hmac
import logging
import resource
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.h11_impl import RequestResponseCycle as PlainCycle

from m2forge.errors import ConfigError
from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.http.limits import HTTPError, read_key

HTTP_ERROR: Final = "m2forge.http_error"
"""Key in an ASGI scope for the `HTTPError` of a request that exceeds a connection limit."""
RETRY_AFTER_S = 1
"""Retry-After in seconds; busy connections become free when their responses end."""
FILES_PER_REQUEST = 2
"""File descriptors per request: the client's connection, and the engine's while the request runs."""
OTHER_FILES = 512
"""File descriptors reserved for journals, body workers and the admin's connections."""
LEAST_OTHER_FILES, LEAST_CONNECTION_FILES = 192, 16
"""Minimum file descriptors that a gateway works with; up to 128 journals stay open."""
_KEYLESS, _ADMIN = "", "admin"
_log = logging.getLogger(__name__)


class Connection(Protocol):
    @property
    def is_idle(self) -> bool:
        """Whether no request waits for its response."""
        ...

    def hang_up(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Owners:
    """Maps API keys to owners: the admin, an episode's key hash, or none."""

    hash_key: Callable[[str], str]
    admin_hash: str | None
    is_episode: Callable[[str], bool]

    def find(self, key: str) -> str:
        if not key:
            return _KEYLESS
        hashed = self.hash_key(key)
        if self.admin_hash is not None and hmac.compare_digest(hashed, self.admin_hash):
            return _ADMIN
        return hashed if self.is_episode(hashed) else _KEYLESS


class ConnectionLimits:
    """Limits the number of connections by the API key of their last request.

        no key, or an invalid one            at most `max_keyless_connections` together
        the key of an episode                at most `max_connections_per_key`, and `max_connections` of all episodes
        the admin key                        not limited: the RL loop must always get through

    A connection has no key until the head of its first request has arrived. When there are too many without a key, the
    oldest idle one is closed, not the newest: a client that sends its head at once, as the RL loop does, keeps its
    connection however many others are held open. When there are too many with a key, the oldest idle one of that key,
    or of all keys, is closed; if all are busy, the request is refused: 429 for the key's limit, 503 for that of all
    keys.
    """

    def __init__(self, config: GatewayConfig, owners: Owners) -> None:
        self._owners = owners
        self._max_keyless, self._max_per_key = config.max_keyless_connections, config.max_connections_per_key
        self._max_keyed = config.max_connections
        self._owner_of: dict[Connection, str] = {}
        """Owner of each connection, least recently used first."""
        self._of_owner: dict[str, dict[Connection, None]] = {}
        """Connections of each owner, in the same order."""

    def open(self, connection: Connection) -> None:
        self._move(connection, _KEYLESS)
        keyless = self._of_owner[_KEYLESS]
        if len(keyless) > self._max_keyless:
            oldest = next(iter(keyless))
            self._evict(next((other for other in keyless if other.is_idle and other is not connection), oldest))

    def ask(self, connection: Connection, headers: Sequence[tuple[bytes, bytes]]) -> HTTPError | None:
        """Register a request with these headers. Returns the reason for refusing it, or None."""
        owner = self._owners.find(read_key(dict(headers)))
        self._move(connection, owner)
        if owner in (_KEYLESS, _ADMIN):
            return None
        connections = self._of_owner[owner]
        if len(connections) > self._max_per_key and not self._evict_idle(connections, connection):
            self._move(connection, _KEYLESS)
            return HTTPError(
                429,
                f"the episode has {self._max_per_key} connections that are busy, which is as many as it may have; "
                "wait for one, or raise gateway.max_connections_per_key",
                is_final=True,
                retry_after_s=RETRY_AFTER_S,
            )
        if self._num_keyed > self._max_keyed and not self._evict_idle(self._keyed(), connection):
            self._move(connection, _KEYLESS)
            return HTTPError(
                503,
                f"{self._max_keyed} connections of episodes are busy, which is as many as there may be; ask again, or "
                "raise gateway.max_connections",
                is_final=True,
                retry_after_s=RETRY_AFTER_S,
            )
        return None

    def close(self, connection: Connection) -> None:
        owner = self._owner_of.pop(connection, None)
        if owner is not None:
            connections = self._of_owner[owner]
            del connections[connection]
            if not connections:
                del self._of_owner[owner]

    @property
    def _num_keyed(self) -> int:
        return len(self._owner_of) - sum(len(self._of_owner.get(owner, ())) for owner in (_KEYLESS, _ADMIN))

    def _keyed(self) -> Iterable[Connection]:
        return (other for other, owner in self._owner_of.items() if owner not in (_KEYLESS, _ADMIN))

    def _move(self, connection: Connection, owner: str) -> None:
        self.close(connection)
        self._owner_of[connection] = owner
        self._of_owner.setdefault(owner, {})[connection] = None

    def _evict_idle(self, connections: Iterable[Connection], but: Connection) -> bool:
        idle = next((other for other in connections if other.is_idle and other is not but), None)
        if idle is not None:
            self._evict(idle)
        return idle is not None

    def _evict(self, connection: Connection) -> None:
        # Free the slot at once; the protocol notices the disconnect later.
        self.close(connection)
        connection.hang_up()


def fit_open_files(config: GatewayConfig) -> GatewayConfig:
    """Raise the soft limit of open files and reduce the connection limits to what this process may hold open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_PER_REQUEST * config.max_connections + config.max_keyless_connections + OTHER_FILES
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return config
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    if raised >= needed:
        return config
    num_keyed, num_keyless = share_files(raised, config.max_connections, config.max_keyless_connections)
    _log.warning(
        "max_connections is %d instead of %d and max_keyless_connections %d instead of %d: this process may open %d "
        "files; raise the limit (ulimit -n %d)",
        *(num_keyed, config.max_connections, num_keyless, config.max_keyless_connections, raised, needed),
    )
    return config.model_copy(update={"max_connections": num_keyed, "max_keyless_connections": num_keyless})


def share_files(num_files: int, max_keyed: int, max_keyless: int) -> tuple[int, int]:
    """Return how many connections with and without a key fit into `num_files` open files. Raises ConfigError if there
    are too few for any gateway."""
    least = LEAST_OTHER_FILES + LEAST_CONNECTION_FILES
    if num_files < least:
        raise ConfigError(
            f"this process may open {num_files} files, and a gateway needs {least} or more; raise the limit (ulimit -n)"
        )
    room = num_files - min(OTHER_FILES, max(LEAST_OTHER_FILES, num_files // 2))
    num_keyless = min(max_keyless, max(room // 4, room - FILES_PER_REQUEST * max_keyed))
    return min(max_keyed, (room - num_keyless) // FILES_PER_REQUEST), num_keyless


try:
    import httptools
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

    HAS_HTTPTOOLS = True
except ImportError:
    HAS_HTTPTOOLS = False
_ERROR_RESPONSE = b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_LARGE, _TOO_SLOW = b"431 Request Header Fields Too Large", b"408 Request Timeout"


def make_connection(config: GatewayConfig, connections: ConnectionLimits) -> type[asyncio.Protocol]:
    """Create the connection class with the configured limits, counted by `connections`."""
    base = FastConnection if HAS_HTTPTOOLS else PlainConnection
    limits = {
        "limits": connections,
        "linger_s": config.linger_s,
        "max_header_bytes": config.max_header_bytes,
        "read_timeout_s": config.read_timeout_s,
        "write_timeout_s": config.write_timeout_s,
    }
    return type("BoundedConnection", (base,), limits)


class _Response:
    """The transport that uvicorn's response uses: closing it waits until the client has stopped sending."""

    __slots__ = ("_connection", "is_closing", "write")

    def __init__(self, connection: "_Clocks") -> None:
        self._connection = connection
        self.write, self.is_closing = connection.transport.write, connection.transport.is_closing

    def close(self) -> None:
        self._connection.end()


class _Clocks:
    """Timers of one connection; a mixin for a protocol, which starts and stops them."""

    limits: ConnectionLimits
    max_header_bytes: int
    linger_s: float
    read_timeout_s: float
    write_timeout_s: float
    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    flow: FlowControl
    timeout_keep_alive: int
    timeout_keep_alive_task: asyncio.TimerHandle | None
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0
    _is_ended = False
    """Whether the last response was sent; incoming data is dropped."""

    @property
    def is_idle(self) -> bool:
        """Whether no request waits for its response."""
        raise NotImplementedError

    @property
    def is_in_body(self) -> bool:
        """Whether the body of the last request is incomplete."""
        raise NotImplementedError

    if TYPE_CHECKING:  # methods of the protocol

        def timeout_keep_alive_handler(self) -> None: ...

        def _unset_keepalive_if_required(self) -> None: ...

    def open(self) -> None:
        self.start_head_clock()
        self.limits.open(self)

    def ask(self, scope: Any, cycle: Any) -> None:
        """Called when a request's head is complete, before the application runs."""
        self._unset_keepalive_if_required()
        cycle.transport = _Response(self)
        error = self.limits.ask(self, scope["headers"])
        if error is not None:
            scope[HTTP_ERROR] = error

    def end(self) -> None:
        """Called when the last response was written."""
        if self.is_in_body and not self.transport.is_closing() and self.transport.can_write_eof():
            self._is_ended = True
            self.transport.write_eof()
        else:
            self.transport.close()

    def linger(self) -> None:
        """Called after a response: limits the time for the rest of the request's body, if any."""
        if self.is_in_body and not self.transport.is_closing() and self._linger_timer is None:
            self._linger_timer = self.loop.call_later(self.linger_s, self.transport.abort)

    def await_body(self) -> None:
        """Stop the keep-alive timer while a body is still arriving."""
        if self._linger_timer is not None:
            self._unset_keepalive_if_required()

    def stop_lingering(self) -> None:
        """Called when the body is complete: restart the keep-alive timer unless the next request already arrived."""
        if self._cancel_linger() and self.is_idle:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _cancel_linger(self) -> bool:
        timer, self._linger_timer = self._linger_timer, None
        if timer is not None:
            timer.cancel()
        return timer is not None

    def hang_up(self) -> None:
        """Disconnect to free a slot for another connection."""
        self.transport.abort()

    def lose(self) -> None:
        self.stop_head_clock()
        self.stop_write_clock()
        self._cancel_linger()
        self.limits.close(self)

    def start_head_clock(self) -> None:
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(self.read_timeout_s, self.refuse, _TOO_SLOW)

    def stop_head_clock(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def count_head(self, data: bytes) -> None:
        if self._head_timer is None:
            self.start_head_clock()
        self._num_head_bytes += len(data)

    def check_head(self) -> None:
        """Called after data that leaves a head incomplete."""
        if self._num_head_bytes > self.max_header_bytes:
            self.refuse(_TOO_LARGE)

    def start_write_clock(self) -> None:
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.write_timeout_s, self.transport.abort)

    def stop_write_clock(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def refuse(self, status: bytes) -> None:
        self.stop_head_clock()
        if not self.transport.is_closing():
            self.transport.write(_ERROR_RESPONSE % status)
            self.transport.close()


class PlainConnection(_Clocks, H11Protocol):
    @property
    def is_idle(self) -> bool:
        cycle: PlainCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    @property
    def is_in_body(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # same as in the parent
        super().connection_made(transport)
        self.open()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lose()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_ended:
            return
        # Otherwise the data is the body of a request that is being answered, or was answered early: it is not counted.
        is_head = self.conn.their_state is h11.IDLE
        if is_head:
            self.count_head(data)
        super().data_received(data)
        if not self.is_in_body:
            self.stop_lingering()
        if is_head and self._head_timer is not None:
            self.check_head()

    def handle_events(self) -> None:
        cycle = self.cycle
        super().handle_events()
        if self.cycle is not cycle:
            self.stop_head_clock()
            self.ask(self.cycle.scope, self.cycle)

    def send_400_response(self, msg: str) -> None:
        """Respond to invalid HTTP as the parent does. If it occurs within a body, the application is waiting for the
        rest, so it is notified of a disconnect."""
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # the application has already responded
            self.transport.close()
        _lose(self.cycle)

    def on_response_complete(self) -> None:
        self.linger()
        if not self._is_ended:
            super().on_response_complete()
            self.await_body()
        else:
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.start_write_clock()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stop_write_clock()


if HAS_HTTPTOOLS:

    class FastConnection(_Clocks, HttpToolsProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._is_in_body, self._is_refused = False, False
            self._answered: RequestResponseCycle | None = None
            """Request being answered; the parent's `cycle` is the last one received, which may be pipelined."""

        @property
        def is_idle(self) -> bool:
            return self._answered is None or (self._answered.response_complete and not self.pipeline)

        @property
        def is_in_body(self) -> bool:
            return self._is_in_body

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.open()

        def connection_lost(self, exc: Exception | None) -> None:
            self.lose()
            super().connection_lost(exc)
            _lose(self._answered)

        def data_received(self, data: bytes) -> None:
            if self._is_refused or self._is_ended:
                return
            if self._is_in_body:
                self._feed(data)
                return
            self.count_head(data)
            cycle = self.cycle
            self._feed(data)
            # An incomplete head is timed, also one that follows a complete request.
            if self.cycle is cycle and not self._is_refused:
                self.check_head()

        def _feed(self, data: bytes) -> None:
            """Feed the parser as the parent does, but ignore protocol upgrades."""
            self._unset_keepalive_if_required()
            unparsed = memoryview(data)
            try:
                while unparsed:
                    try:
                        self.parser.feed_data(unparsed)
                        return
                    except httptools.HttpParserUpgrade as offer:
                        unparsed = unparsed[offer.args[0] :]
                        self._pass_over()
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")

        def _pass_over(self) -> None:
            """Some clients offer an HTTP/2 upgrade with their first request, and the parser then treats what follows as
            the new protocol. Parse the head again without the offer."""
            headers = [(name, value) for name, value in self.headers if name not in (b"upgrade", b"connection")]
            if self._method == b"CONNECT":
                raise httptools.HttpParserInvalidMethodError("a tunnel is none of our routes")
            is_last = any(name == b"connection" and b"close" in value.lower() for name, value in self.headers)
            headers += [(b"connection", b"close")] if is_last else []
            lines = [b"%b %b HTTP/1.1" % (self._method, self.url), *(b"%b: %b" % pair for pair in headers)]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

        def on_headers_complete(self) -> None:
            self._method = self.parser.get_method()
            if self.parser.should_upgrade():
                return
            self._is_in_body = True
            self.stop_head_clock()
            super().on_headers_complete()
            self.ask(self.scope, self.cycle)

        def on_message_complete(self) -> None:
            if self.parser.should_upgrade():
                return
            self._is_in_body = False
            self.stop_lingering()
            super().on_message_complete()

        def on_response_complete(self) -> None:
            # The body arriving may belong to a pipelined request that is not answered yet.
            if self._is_ended or self.cycle.response_complete:
                self.linger()
            if not self._is_ended:
                super().on_response_complete()
                self.await_body()
            else:
                self.flow.resume_reading()

        def send_400_response(self, msg: str) -> None:
            """Respond to invalid HTTP as the parent does, unless another response has already started. Notify the
            application of a disconnect."""
            self._is_refused = True
            cycle = self._answered
            if cycle is None or cycle.response_complete or not cycle.response_started:
                super().send_400_response(msg)
            else:
                self.transport.close()
            _lose(cycle)
            _lose(self.cycle)

        def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
            self._answered = cycle
            super()._start_asgi_task(cycle, app)

        def pause_writing(self) -> None:
            super().pause_writing()
            self.start_write_clock()

        def resume_writing(self) -> None:
            super().resume_writing()
            self.stop_write_clock()


def _lose(cycle: Any) -> None:
    """Notify an unanswered request's application of a disconnect."""
    if cycle is not None and not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()
