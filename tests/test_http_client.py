"""Answers by HTTP/1.1, in any pieces: the body that was sent, or an error that says what came instead."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import ConfigError
from m2forge.http_client import BrokenOffError, ConnectionPool, HttpClient, Response, UnreachableError, encode_json

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"


def chunked(parts: Sequence[bytes], trailer: bytes = b"") -> bytes:
    framed = b"".join(b"%x;note=1\r\n%b\r\n" % (len(part), part) for part in parts if part)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n" + trailer + b"\r\n"


def told(body: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def untold(body: bytes) -> bytes:
    return HEAD + b"\r\n" + body


def talk(
    answers: Sequence[Sequence[bytes]], check: Callable[[ConnectionPool], Awaitable[None]], *, closes: bool = False
) -> int:
    """Run `check` against a server that sends the pieces of one answer after another; how many connections it saw."""
    left, num_connections = list(answers), 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        while left:
            try:
                await reader.readuntil(b"\r\n\r\nbody")
            except asyncio.IncompleteReadError:
                break
            for piece in left.pop(0):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if closes:
                break
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connections = ConnectionPool("127.0.0.1", port, is_secure=False, idle_s=5.0)
        async with server, asyncio.timeout(60):
            await check(connections)
            connections.close()

    asyncio.run(run())
    return num_connections


async def read(connections: ConnectionPool) -> tuple[int, bytes]:
    answer = await connections.take()
    try:
        answer.send(b"POST / HTTP/1.1\r\nhost: x\r\n\r\n", b"body")
        return await answer.receive_status(), await answer.read_all()
    finally:
        connections.give_back(answer)


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(parts=st.lists(st.binary(max_size=40), max_size=8), places=st.lists(st.integers(0, 10**6), max_size=12))
def test_a_body_comes_whole_in_any_pieces(parts: list[bytes], places: list[int]) -> None:
    body = b"".join(parts)
    early = b"HTTP/1.1 100 Continue\r\n\r\n"
    answers = [early + chunked(parts), chunked(parts, b"x-trailer: 1\r\nx-other: 2\r\n"), told(body)]

    async def check(connections: ConnectionPool) -> None:
        for _ in answers:
            assert await read(connections) == (200, body)

    assert talk([cut(answer, places) for answer in answers], check) == 1, "the connection was not used again"

    async def check_once(connections: ConnectionPool) -> None:
        assert await read(connections) == (200, body)

    talk([cut(untold(body), places)], check_once, closes=True)


def test_a_large_chunk_is_not_looked_at_for_each_piece() -> None:
    body = bytes(range(256)) * (64 << 10)
    answer = chunked([body])
    pieces = [answer[at : at + 65536] for at in range(0, len(answer), 65536)]

    async def check(connections: ConnectionPool) -> None:
        assert await read(connections) == (200, body)

    talk([pieces], check)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        told(b"abc")[:-1],
        chunked([b"abc"])[:-2],
        chunked([b"abc"])[:-6],
        HEAD + b"transfer-encoding: chunked\r\n\r\nxyz\r\nabc\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nabc\r\n",
        HEAD + b"content-length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000,
    ],
)
def test_an_answer_that_breaks_off_or_is_none_is_told(answer: bytes) -> None:
    async def check(connections: ConnectionPool) -> None:
        with pytest.raises(BrokenOffError):
            await read(connections)

    talk([[answer]], check, closes=True)


def test_what_was_not_read_to_its_end_ends_the_connection() -> None:
    async def check(connections: ConnectionPool) -> None:
        answer = await connections.take()
        answer.send(b"POST / HTTP/1.1\r\n\r\n", b"body")
        await answer.receive_status()
        connections.give_back(answer)
        assert await read(connections) == (200, b"second")

    half = chunked([b"x" * 100])[:-7]
    assert talk([[half], [told(b"second")]], check) == 2


def test_a_server_that_is_far_ahead_waits() -> None:
    body = b"x" * (16 << 20)

    async def check(connections: ConnectionPool) -> None:
        answer = await connections.take()
        answer.send(b"POST / HTTP/1.1\r\n\r\n", b"body")
        await answer.receive_status()
        await asyncio.sleep(0.2)
        assert answer._num_bytes < 8 << 20
        assert await answer.read_all() == body
        connections.give_back(answer)

    pieces = [chunked([body[:65536]] * 256)]
    talk([pieces], check)


def test_a_deadline_and_a_close_reach_whoever_waits() -> None:
    async def check(connections: ConnectionPool) -> None:
        answer = await connections.take()
        answer.send(b"POST / HTTP/1.1\r\n\r\n", b"body")
        await answer.receive_status()
        assert await answer.read() == b"abc"
        asyncio.get_running_loop().call_later(0.02, answer.fail, TimeoutError())
        with pytest.raises(TimeoutError):
            await answer.read()
        connections.give_back(answer)
        waiting = asyncio.create_task(read(connections))
        await asyncio.sleep(0.02)
        connections.close()
        with pytest.raises(BrokenOffError, match="closed"):
            await waiting

    stalled = chunked([b"abc", b"def"])[:-13]
    talk([[stalled], [HEAD]], check)


def exchange(answer: bytes, check: Callable[[str], Awaitable[None]], *, waits_s: float = 0.0) -> list[bytes]:
    """Run `check` with the address of a server that sends one answer to each request; the requests it received."""
    received: list[bytes] = []
    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                received.append(data)
                await asyncio.sleep(waits_s)
                writer.write(answer)
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server, asyncio.timeout(60):
            await check(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
            await asyncio.gather(*(task for task in serving if task))

    asyncio.run(run())
    return received


def test_a_request_is_sent_as_it_was_given() -> None:
    async def check(place: str) -> None:
        client = HttpClient(f"http://{place}/base/", key="secret")
        body = encode_json({"text": "ä\ud800"})
        response = await client.request("POST", "/x", body, parameters={"a": "b c"}, headers={"x-more": "1"})
        assert response == Response(200, b"whole")
        assert response.is_success
        assert response.text == "whole"
        await client.request("GET", "/y")
        client.close()

    first, second = exchange(told(b"whole"), check)
    head, body = first.split(b"\r\n\r\n")
    line, *headers = head.split(b"\r\n")
    assert line == b"POST /base/x?a=b+c HTTP/1.1"
    assert body == b'{"text":"\\u00e4\\ud800"}'
    assert {b"Authorization: Bearer secret", b"x-more: 1", b"Content-Length: %d" % len(body)} <= {*headers}
    assert sum(header.startswith(b"Host: 127.0.0.1:") for header in headers) == 1
    assert second.startswith(b"GET /base/y HTTP/1.1\r\n")
    assert b"x-more" not in second


def test_a_user_in_the_address_is_sent_unless_there_is_a_key() -> None:
    async def check(place: str) -> None:
        for key in (None, "secret"):
            client = HttpClient(f"http://me:p%40ss@{place}", key=key)
            await client.request("GET", "/")
            client.close()

    basic, keyed = exchange(told(b""), check)
    assert b"Authorization: Basic bWU6cEBzcw==\r\n" in basic
    assert b"Host: 127.0.0.1:" in basic
    assert b"Authorization: Bearer secret\r\n" in keyed
    assert b"Basic" not in keyed


def test_each_failure_has_its_error() -> None:
    async def check(place: str) -> None:
        client = HttpClient(f"http://{place}")
        with pytest.raises(TimeoutError):
            await client.request("GET", "/", timeout_s=0.02)
        waiting = asyncio.create_task(client.request("GET", "/"))
        await asyncio.sleep(0.02)
        client.close()
        with pytest.raises(BrokenOffError, match="the client was closed"):
            await waiting
        with pytest.raises(UnreachableError, match="closed"):
            await client.request("GET", "/")
        for url in ("http://127.0.0.1:9", "http://a..b"):
            with pytest.raises(UnreachableError):
                await HttpClient(url).request("GET", "/", timeout_s=60.0)

    exchange(told(b""), check, waits_s=1.0)


@pytest.mark.parametrize(
    ("url", "key", "message"),
    [
        ("127.0.0.1:80", None, "expected http://HOST:PORT"),
        ("ftp://a", None, "expected http://HOST:PORT"),
        ("http://", None, "expected http://HOST:PORT"),
        ("http://a:b", None, "expected http://HOST:PORT"),
        ("http://a:99999", None, "expected http://HOST:PORT"),
        ("http://a", "k\r\nx-evil: 1", "header Authorization: expected printable ASCII"),
        ("http://ä", None, "header Host: expected printable ASCII"),
    ],
)
def test_an_address_or_key_that_cannot_be_sent_is_refused(url: str, key: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HttpClient(url, key=key)


def test_requests_follow_a_server_that_moves() -> None:
    async def serve(body: bytes) -> asyncio.Server:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            if b" /slow " not in head:
                writer.write(told(body + b" " + head.split(b"Host: ")[1].split(b"\r\n")[0]))
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()

        return await asyncio.start_server(answer, "127.0.0.1", 0)

    def url_of(server: asyncio.Server) -> str:
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def run() -> None:
        first, second = await serve(b"first"), await serve(b"second")
        url = url_of(first)
        client = HttpClient(lambda: url)
        async with asyncio.timeout(60):
            waiting = asyncio.create_task(client.request("GET", "/slow"))
            assert (await client.request("GET", "/")).text == f"first {url[7:]}"
            url = url_of(second)
            assert (await client.request("GET", "/")).text == f"second {url[7:]}"
            with pytest.raises(BrokenOffError):
                await waiting
        assert client.url == url
        client.close()
        for server in (first, second):
            server.close()
            await server.wait_closed()
        await asyncio.sleep(0.1)  # until the server's side of the connections is closed

    asyncio.run(run())
