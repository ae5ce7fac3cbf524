"""A connection of uvicorn's with bounds on the head of a request: how large it may become, and how long it may take.

The server below bounds neither the time until a request's headers are complete nor, with every parser, their size, so
connections could be held open by sending a header now and then. Here the clock runs from the connection's opening, or
from the first byte after an answer, until a request's headers are there. Bodies are bounded by the application.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from m2forge.gateway.config import GatewayConfig

_REFUSAL = b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_LARGE, _TOO_SLOW = b"431 Request Header Fields Too Large", b"408 Request Timeout"


def make_connection(config: GatewayConfig) -> type[H11Protocol]:
    """The class of connections that keep to the configuration."""

    class BoundedConnection(Connection):
        max_header_bytes, read_timeout_s = config.max_header_bytes, config.read_timeout_s

    return BoundedConnection


class Connection(H11Protocol):
    max_header_bytes: int
    read_timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the parent has it
        super().connection_made(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        # Else it is the body of a request that is being answered, or was before its body had come: that is passed over.
        if self.conn.their_state is not h11.IDLE:
            super().data_received(data)
            return
        if self._head_timer is None:
            self._start_clock()
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self.cycle is not cycle:
            self._stop_clock()
        elif self._num_head_bytes > self.max_header_bytes:
            self._refuse(_TOO_LARGE)

    def send_400_response(self, msg: str) -> None:
        """The parent's answer to what is no HTTP. If that is found in the middle of a body, the application is waiting
        for the rest: for it the client has gone."""
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # the application was quicker
            self.transport.close()
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def on_response_complete(self) -> None:
        cycle = self.cycle
        super().on_response_complete()
        # The parent went on with requests that were sent ahead of their answers.
        if self.cycle is not cycle:
            self._stop_clock()

    def _start_clock(self) -> None:
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(self.read_timeout_s, self._refuse, _TOO_SLOW)

    def _stop_clock(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: bytes) -> None:
        self._stop_clock()
        if not self.transport.is_closing():
            self.transport.write(_REFUSAL % status)
            self.transport.close()
