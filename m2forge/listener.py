"""The listening socket of a server, its URL, and its event loop."""

import asyncio
import socket
from collections.abc import Callable

from m2forge.errors import ConfigError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def listen(host: str, port: int, backlog: int = 128) -> socket.socket:
    """Port 0 picks any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=backlog)
        # Connections inherit it. asyncio sets it only if a socket names its protocol, which this one does not; a
        # response of two writes would wait 40 ms for the client's delayed ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise ConfigError(
            f"{host}:{port} cannot be listened on ({error.strerror}); give another host or port"
        ) from error


def host_name(host: str) -> str:
    """The name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def find_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory if it is installed: asyncio's own loop takes half of a busy server's time."""
    try:
        import uvloop
    except ImportError:
        return None
    make_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return make_loop
