"""A connection of uvicorn's with bounds: how large the head of a request may become, how long it may take, and how long
a client may leave unread what it was sent.

The server below bounds neither the time until a request's headers are complete nor, with every parser, their size, so
connections could be held open by sending a header now and then; and it waits for ever for a client that reads nothing.
Here the clock runs from the connection's opening, or from the first byte after an answer, until a request's headers are
there; and from the moment when the buffers are full until they are not. Bodies are bounded by the application.

uvicorn's fast parser is taken where httptools is installed, else the one that is written in Python.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from m2forge.gateway.config import GatewayConfig

try:
    import httptools
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

    HAS_HTTPTOOLS = True
except ImportError:
    HAS_HTTPTOOLS = False

_REFUSAL = b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_LARGE, _TOO_SLOW = b"431 Request Header Fields Too Large", b"408 Request Timeout"


def make_connection(config: GatewayConfig) -> type[asyncio.Protocol]:
    """The class of connections that keep to the configuration."""
    base = FastConnection if HAS_HTTPTOOLS else PlainConnection
    limits = {
        "max_header_bytes": config.max_header_bytes,
        "read_timeout_s": config.read_timeout_s,
        "write_timeout_s": config.write_timeout_s,
    }
    return type("BoundedConnection", (base,), limits)


class _Clocks:
    """Timers of one connection; mixed into a protocol, which says when they run."""

    max_header_bytes: int
    read_timeout_s: float
    write_timeout_s: float
    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0

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
        """After a part of a head that was not the last."""
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
            self.transport.write(_REFUSAL % status)
            self.transport.close()


class PlainConnection(_Clocks, H11Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the parent has it
        super().connection_made(transport)
        self.start_head_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_head_clock()
        self.stop_write_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        cycle: object = self.cycle
        # Else it is the body of a request that is being answered, or was before its body had come: that is passed over.
        if self.conn.their_state is not h11.IDLE:
            super().data_received(data)
            return
        self.count_head(data)
        super().data_received(data)
        if self.cycle is not cycle:
            self.stop_head_clock()
        else:
            self.check_head()

    def send_400_response(self, msg: str) -> None:
        """The parent's answer to what is no HTTP. If that is found in the middle of a body, the application is waiting
        for the rest: for it the client has gone."""
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # the application was quicker
            self.transport.close()
        _lose(self.cycle)

    def on_response_complete(self) -> None:
        cycle = self.cycle
        super().on_response_complete()
        # The parent went on with requests that were sent ahead of their answers.
        if self.cycle is not cycle:
            self.stop_head_clock()

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
            """What is being answered; the parent's `cycle` is what was asked last, perhaps ahead of that."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.start_head_clock()

        def connection_lost(self, exc: Exception | None) -> None:
            self.stop_head_clock()
            self.stop_write_clock()
            super().connection_lost(exc)
            _lose(self._answered)

        def data_received(self, data: bytes) -> None:
            if self._is_refused:
                return
            if self._is_in_body:
                self._feed(data)
                return
            self.count_head(data)
            cycle = self.cycle
            self._feed(data)
            # A head that is not whole runs against the clock, also one that follows a whole request.
            if self.cycle is cycle and not self._is_refused:
                self.check_head()

        def _feed(self, data: bytes) -> None:
            """As the parent does, but for offers of other protocols."""
            self._unset_keepalive_if_required()
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                self._pass_over(data[offer.args[0] :])
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")

        def _pass_over(self, rest: bytes) -> None:
            """Some clients offer HTTP/2 with their first request. The parser takes what follows for that; so it is
            given the request once more, without the offer."""
            kept = [(name, value) for name, value in self.headers if name not in (b"upgrade", b"connection")]
            if self._method == b"CONNECT":
                self.send_400_response("Invalid HTTP request received.")
                return
            is_last = any(name == b"connection" and b"close" in value.lower() for name, value in self.headers)
            kept += [(b"connection", b"close")] if is_last else []
            lines = [b"%b %b HTTP/1.1" % (self._method, self.url), *(b"%b: %b" % pair for pair in kept)]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._feed(b"\r\n".join([*lines, b"", b""]) + rest)

        def on_headers_complete(self) -> None:
            self._method = self.parser.get_method()
            if self.parser.should_upgrade():
                return
            self._is_in_body = True
            self.stop_head_clock()
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            if self.parser.should_upgrade():
                return
            self._is_in_body = False
            super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            """The parent's answer to what is no HTTP; but after the beginning of another answer there is no place for
            one. For the application the client has gone."""
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
    """For a request that is not answered yet the client has gone."""
    if cycle is not None and not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()
