"""What a sandbox reaches: listening sockets inside its network namespace, served by this process outside.

A sandbox has no interface but its own loopback. Its PID 1 opens listening sockets on it and passes them out; `serve`
accepts on them here, so a connection ends in this process, which decides where it goes on to:

    forward      to one address, the gateway's
    proxy        HTTP CONNECT and plain HTTP requests, to hosts that a rule allows

The proxy resolves names itself and connects to the address that it has checked. Addresses that are not public (this
machine, its networks, metadata services) are refused, unless the list of allowed hosts names the address itself.
"""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence

MAX_CONNECTIONS = 256
"""Concurrent connections of one sandbox; further ones wait."""
MAX_HEAD_BYTES = 1 << 16
CONNECT_S = 30.0
PROXY_PORT = 3128
_BLOCK = 1 << 16
_connections: set[asyncio.Task[None]] = set()
"""Connections of all sandboxes. An event loop holds its tasks weakly, and a sandbox may be gone before they end."""

Address = tuple[str, int]
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Rule = Callable[[str, int], Awaitable[Address | None]]
"""The address to connect to for a host and port; None refuses."""


async def serve(listener: socket.socket, handle: Handler) -> asyncio.Server:
    slots = asyncio.Semaphore(MAX_CONNECTIONS)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        _connections.add(task)
        task.add_done_callback(_connections.discard)
        async with slots:
            try:
                await handle(reader, writer)
            except (OSError, EOFError, TimeoutError, ValueError, asyncio.LimitOverrunError):
                pass  # One connection failed; the client sees it end.
            finally:
                writer.close()

    return await asyncio.start_server(accept, sock=listener, limit=MAX_HEAD_BYTES)


def forward(address: Address) -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _join(reader, writer, *await _connect(address))

    return handle


def proxy(rule: Rule) -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, version = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        is_tunnel = method == "CONNECT"
        authority, path = (target, "") if is_tunnel else _split_url(target)
        host, port = split_host(authority, 443 if is_tunnel else 80)
        address = await rule(host, port)
        if address is None:
            text = f"the sandbox's network policy does not allow {host}:{port}\n".encode()
            writer.write(
                b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(text) + text
            )
            await writer.drain()
            return
        below = await _connect(address)
        if is_tunnel:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            below[1].write(_own_head(method, path, version, head))
        await _join(reader, writer, *below)

    return handle


def _own_head(method: str, path: str, version: str, head: bytes) -> bytes:
    """The request as its server expects it. One request a connection: the next one may name another host."""
    lines = head.split(b"\r\n")[1:-2]
    dropped = (b"connection:", b"proxy-connection:", b"proxy-authorization:", b"keep-alive:")
    fields = [line for line in lines if not line.lower().startswith(dropped)]
    return b"\r\n".join([f"{method} {path} {version}".encode("latin-1"), *fields, b"Connection: close", b"", b""])


def _split_url(target: str) -> tuple[str, str]:
    if not target.startswith("http://"):
        raise ValueError(target)
    authority, slash, path = target.removeprefix("http://").partition("/")
    return authority.rpartition("@")[2], slash + path or "/"


def split_host(authority: str, port: int) -> Address:
    if authority.startswith("["):
        host, _, rest = authority[1:].partition("]")
        return host, int(rest.removeprefix(":") or port)
    host, colon, number = authority.partition(":")
    return host.lower().rstrip("."), int(number) if colon else port


def public_rule() -> Rule:
    async def rule(host: str, port: int) -> Address | None:
        return await _public_address(host, port)

    return rule


def allowlist_rule(allow: Sequence[str]) -> Rule:
    allowed = [split_host(address, 0) for address in allow]

    async def rule(host: str, port: int) -> Address | None:
        for name, only in allowed:
            if only not in (0, port):
                continue
            if host == name and _as_ip(host) is not None:
                return host, port
            if host == name.lstrip(".") or (name.startswith(".") and host.endswith(name)):
                return await _public_address(host, port)
        return None

    return rule


def _as_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


async def _public_address(host: str, port: int) -> Address | None:
    """The first address of a host, if all of them are public: a name may resolve to this machine."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
    for text in addresses:
        ip = _as_ip(text)
        mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
        if ip is None or not (mapped or ip).is_global or (mapped or ip).is_multicast:
            return None
    return (addresses[0], port) if addresses else None


async def _connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(CONNECT_S):
        return await asyncio.open_connection(*address)


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Copy in both directions until both have ended."""
    try:
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
    finally:
        far_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while block := await reader.read(_BLOCK):
        writer.write(block)
        await writer.drain()
    with contextlib.suppress(OSError, RuntimeError):
        writer.write_eof()
