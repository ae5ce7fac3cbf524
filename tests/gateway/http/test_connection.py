"""Connections through real sockets: refused bodies, many at once, requests sent ahead."""

import json
import resource
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, cast

import pytest

from m2forge.errors import ConfigError
from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.http import connection as connection_limit
from m2forge.gateway.http.connection import fit_open_files
from tests.gateway.dialogue import minimax
from tests.gateway.episodes.test_retry_http import BODY
from tests.gateway.live import ADMIN_KEY, Live, live
from tests.gateway.test_security import head, parser, talk

if TYPE_CHECKING:
    from m2forge.gateway.http.connection import FastConnection

__all__ = ["parser"]

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@contextmanager
def connected(gateway: Live) -> Iterator[socket.socket]:
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 30) as client:
        yield client


def response(client: socket.socket) -> bytes:
    """One whole response, which says how long it is."""
    client.settimeout(30)
    read = b""
    while b"\r\n\r\n" not in read:
        data = client.recv(65536)
        assert data, "the gateway closed the connection"
        read += data
    start, _, rest = read.partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in start.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(rest) < length:
        rest += client.recv(65536)
    return start + b"\r\n\r\n" + rest


def is_closed(client: socket.socket) -> bool:
    """Whether the gateway has closed it; waits a moment for that."""
    client.settimeout(0.5)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def are_closed(clients: Sequence[socket.socket]) -> list[bool]:
    """As `is_closed`, of all at once."""
    with ThreadPoolExecutor(len(clients)) as pool:
        return list(pool.map(is_closed, clients))


def seconds_until_closed(client: socket.socket, drip: bytes = b"") -> float:
    started_s = time.monotonic()
    client.settimeout(0.05)
    while time.monotonic() - started_s < 30:
        try:
            if drip:
                client.sendall(drip)
            if client.recv(65536) == b"":
                return time.monotonic() - started_s
        except TimeoutError:
            continue
        except ConnectionError:
            return time.monotonic() - started_s
    return float("inf")


@pytest.mark.slow
@pytest.mark.parametrize("drip", [b"", b" "])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_refused_connection_whose_body_does_not_come_is_closed(drip: bytes, is_last: bool, parser: str) -> None:
    with live(minimax(), config=GatewayConfig(port=0, linger_s=0.4)) as gateway, connected(gateway) as client:
        sent = head("m2f-unknown", 10_000)
        client.sendall(sent if is_last else sent.replace(b"connection: close\r\n", b""))
        assert response(client).startswith(b"HTTP/1.1 401")
        assert seconds_until_closed(client, drip) < 30
        gateway.wait_until(lambda: not gateway.server._server.server_state.connections)


@pytest.mark.slow
def test_a_refused_body_that_arrives_whole_keeps_the_connection(parser: str) -> None:
    with live(minimax(), config=GatewayConfig(port=0, linger_s=1.0)) as gateway, connected(gateway) as client:
        client.sendall(head("m2f-unknown", 100).replace(b"connection: close\r\n", b""))
        assert response(client).startswith(b"HTTP/1.1 401")
        client.sendall(b" " * 100)
        time.sleep(1.2)
        client.sendall(HEALTH)
        assert response(client).startswith(b"HTTP/1.1 200")
        (ours,) = cast("set[FastConnection]", gateway.server._server.server_state.connections)
        gateway.wait_until(lambda: ours.timeout_keep_alive_task is not None)
        client.sendall(head("m2f-unknown", 100).replace(b"connection: close\r\n", b""))
        assert response(client).startswith(b"HTTP/1.1 401")
        client.sendall(b" " * 100)
        gateway.wait_until(lambda: ours.timeout_keep_alive_task is not None)


@pytest.mark.slow
def test_a_body_may_take_longer_than_an_idle_connection_lasts(parser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2forge.gateway.server.KEEP_ALIVE_S", 0.2)
    with live(minimax(), config=GatewayConfig(port=0, linger_s=60)) as gateway, connected(gateway) as client:
        client.sendall(head("m2f-unknown", 100).replace(b"connection: close\r\n", b""))
        assert response(client).startswith(b"HTTP/1.1 401")
        time.sleep(0.5)
        client.sendall(b" " * 100 + HEALTH)
        assert response(client).startswith(b"HTTP/1.1 200")
        assert seconds_until_closed(client) < 30, "an idle connection is kept only so long"


def test_a_client_that_sends_before_reading_sees_the_refusal(parser: str) -> None:
    config = GatewayConfig(port=0, max_body_bytes=1000)
    with live(minimax(), config=config) as gateway:
        _, key = gateway.episode()
        for _ in range(5):
            with connected(gateway) as client:
                client.sendall(head(key, 1_000_000))
                for _ in range(10):
                    client.sendall(b" " * 100_000)
                    time.sleep(0.002)
                read = b""
                while data := client.recv(65536):
                    read += data
                assert read.startswith(b"HTTP/1.1 413")
                assert json.loads(read.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"


@pytest.mark.slow
@pytest.mark.parametrize("offer", [b"upgrade: h2c\r\nconnection: upgrade\r\n", b""])
def test_two_thousand_requests_sent_ahead_are_answered(offer: bytes, parser: str) -> None:
    with live(minimax()) as gateway:
        one = HEALTH.removesuffix(b"\r\n") + offer + b"\r\n"
        last = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        assert talk(gateway, one * 2000 + last).count(b"HTTP/1.1 200 OK") == 2001
        assert gateway.server._server.server_state.total_requests == 2001


def test_keyless_connections_are_limited_and_the_loop_is_not(parser: str) -> None:
    config = GatewayConfig(port=0, max_keyless_connections=8)
    with live(minimax(), config=config) as gateway, ExitStack() as stack:
        _, key = gateway.episode()
        held = [stack.enter_context(connected(gateway)) for _ in range(40)]
        held[-1].sendall(HEALTH)
        assert response(held[-1]).startswith(b"HTTP/1.1 200")
        gateway.wait_until(lambda: len(gateway.server._server.server_state.connections) <= 8)
        assert all(map(is_closed, held[:32]))
        # New connections keep arriving; a connection with a valid key is never among those closed.
        admin, agent = (stack.enter_context(connected(gateway)) for _ in range(2))
        for client, path, sent in (
            (admin, "/episodes/none", ADMIN_KEY),
            (agent, "/v1/models", key),
        ):
            client.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {sent}\r\n\r\n".encode())
            assert response(client)
        held += [stack.enter_context(connected(gateway)) for _ in range(40)]
        for client, path, sent in ((admin, "/episodes/none", ADMIN_KEY), (agent, "/v1/models", key)):
            client.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {sent}\r\n\r\n".encode())
            assert response(client)[9:12] in (b"404", b"200")
        # A wrong key is none.
        for client in held[-8:]:
            client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-api-key: m2f-wrong\r\n\r\n")
            assert response(client).startswith(b"HTTP/1.1 401")
        assert len(gateway.server._server.server_state.connections) <= 10


def test_connections_of_one_key_are_limited_to_its_own_cost(parser: str) -> None:
    config = GatewayConfig(port=0, max_connections_per_key=3, max_connections=5)
    with live(minimax(), config=config, delay_s=0.02) as gateway, ExitStack() as stack:
        (one, one_key), (_, other_key), (_, third_key) = gateway.episode(), gateway.episode(), gateway.episode()
        body = json.dumps(BODY | {"max_tokens": 500, "stream": True}).encode()

        def ask(key: str) -> socket.socket:
            client = stack.enter_context(connected(gateway))
            client.sendall(head(key, len(body)) + body)
            return client

        busy = [ask(one_key) for _ in range(3)]
        gateway.wait_until(lambda: one.num_running == 3)
        received = response(ask(one_key))
        assert received.startswith(b"HTTP/1.1 429")
        assert b"max_connections_per_key" in received
        error = json.loads(received.partition(b"\r\n\r\n")[2])["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        start = received.lower().partition(b"\r\n\r\n")[0]
        assert b"\r\nretry-after: 1" in start
        assert b"x-should-retry" not in start
        # The others are served until all that there may be are busy; the admin is served even then.
        busy += [ask(other_key) for _ in range(2)]
        gateway.wait_until(lambda: gateway.server.app.calls.num_running == 5)
        received = response(ask(third_key))
        assert received.startswith(b"HTTP/1.1 503")
        assert b"max_connections" in received
        assert b"\r\nretry-after: 1" in received.lower()
        admin = f"GET /episodes/{one.id} HTTP/1.1\r\nhost: x\r\nx-api-key: {ADMIN_KEY}\r\nconnection: close\r\n\r\n"
        assert talk(gateway, admin.encode()).startswith(b"HTTP/1.1 200")
        assert all(client.recv(100) for client in busy)
        for client in busy:
            client.close()
        gateway.wait_until(lambda: gateway.server.app.calls.num_running == 0)
        assert ask(third_key).recv(12) == b"HTTP/1.1 200"


def test_an_idle_connection_of_the_key_makes_room_for_another(parser: str) -> None:
    with live(minimax(), config=GatewayConfig(port=0, max_connections_per_key=2)) as gateway, ExitStack() as stack:
        _, key = gateway.episode()
        models = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\n\r\n".encode()
        clients = [stack.enter_context(connected(gateway)) for _ in range(5)]
        for client in clients:
            client.sendall(models)
            assert response(client).startswith(b"HTTP/1.1 200")
        assert are_closed(clients) == [True, True, True, False, False]
        # The loop, which has the admin key, may hold as many as it needs.
        clients = [stack.enter_context(connected(gateway)) for _ in range(5)]
        for client in clients:
            client.sendall(models.replace(key.encode(), ADMIN_KEY.encode()))
            response(client)
        assert not any(are_closed(clients))


def test_connections_are_as_many_as_the_process_may_open_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = [(1024, 2000)]

    def set_limit(kind: int, limit: tuple[int, int]) -> None:
        limits.append(limit)

    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    config = GatewayConfig(max_connections=4096, max_keyless_connections=100)
    fitted = fit_open_files(config)
    assert fitted.max_keyless_connections == 100
    # Each request of an episode has a connection to the engine as well.
    assert fitted.max_connections == (2000 - 100 - connection_limit.OTHER_FILES) // 2
    assert limits[-1] == (2000, 2000)
    assert "ulimit -n" in caplog.text
    limits.append((1024, resource.RLIM_INFINITY))
    assert fit_open_files(config) is config
    assert limits[-1][0] == 2 * 4096 + 100 + connection_limit.OTHER_FILES
    limits.append((100, 100))
    with pytest.raises(ConfigError, match="100 files"):
        fit_open_files(config)


@pytest.mark.parametrize("num_files", [208, 256, 1024, 2560, 4096, 10_000])
def test_a_low_limit_of_open_files_lowers_the_connections(
    num_files: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (num_files, num_files))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: None)
    fitted = fit_open_files(GatewayConfig())
    assert fitted.max_connections >= 1
    assert fitted.max_keyless_connections >= 1
    num_held = 2 * fitted.max_connections + fitted.max_keyless_connections
    assert num_held <= num_files - connection_limit.LEAST_OTHER_FILES
    assert f"may open {num_files} files" in caplog.text
