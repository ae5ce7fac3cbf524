"""What strangers cannot do: see another session, reach the admin's routes, send too much, too slowly or nonsense; and
what is never written down."""

import concurrent.futures
import ctypes
import gc
import json
import logging
import random
import resource
import socket
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from m2forge.errors import ConfigError
from m2forge.gateway.calls.sample import SampleReader
from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.dialects.openai.chat import ChatStream, OpenAIChat
from m2forge.gateway.http import connection
from m2forge.gateway.server import bind
from tests.gateway.dialogue import minimax
from tests.gateway.episodes.test_retry_http import BODY, PATHS, post
from tests.gateway.fuzz_bodies import BODIES, CHAT, long_bodies
from tests.gateway.live import ADMIN_KEY, Live, check_recorded, live, recorded

SMALL = GatewayConfig(port=0, max_body_bytes=20_000, max_header_bytes=4000, max_depth=20, read_timeout_s=0.4)


def talk(gateway: Live, *pieces: bytes, ends: bool = False, pause_s: float = 0.0) -> bytes:
    """All that comes back for raw bytes. `ends`: close our half after them."""
    host, port = gateway.url.removeprefix("http://").split(":")
    read = b""
    try:
        with socket.create_connection((host, int(port)), 30) as connection:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause_s)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(65536):
                read += data
    except TimeoutError:
        raise  # it hangs
    except OSError:
        pass  # the gateway closed the connection before it had read all
    return read


def head(key: str, length: int, path: str = "/v1/chat/completions", *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", f"x-api-key: {key}", f"content-length: {length}", *more]
    return "\r\n".join([*lines, "connection: close", "", ""]).encode()


def test_every_route_has_its_key() -> None:
    with live(minimax()) as gateway, httpx2.Client(base_url=gateway.url) as client:
        _, key = gateway.episode()
        for method, path in [
            *(("POST", path) for path in [*PATHS, "/v1/messages/count_tokens"]),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/policy"),
        ]:
            for sent in ({}, {"x-api-key": "m2f-x"}, {"Authorization": f"Bearer {ADMIN_KEY}"}, {"Authorization": key}):
                answer = client.request(method, path, headers=sent, json={} if method == "POST" else None)
                assert answer.status_code == 401
                assert ("type" in answer.json()) == path.startswith("/v1/messages")
        for method, path in (
            ("POST", "/episodes"),
            ("GET", "/episodes/x"),
            ("POST", "/episodes/x/reward"),
            ("POST", "/episodes/x/close"),
        ):
            for sent in ({}, {"x-api-key": key}, {"Authorization": f"Bearer {ADMIN_KEY}x"}):
                assert client.request(method, path, headers=sent).status_code == 401
        assert client.get("/health").json()["version"] == {"lineage": "scripted", "step": 0}
        assert client.get("/metrics").status_code == 200
        assert client.get("/nowhere").status_code == 404


def test_beyond_loopback_health_and_metrics_need_the_admin_key() -> None:
    elsewhere = GatewayConfig(host="127.0.0.2", port=0)
    with live(minimax(), config=elsewhere) as gateway, httpx2.Client(base_url=gateway.url) as client:
        _, key = gateway.episode()
        for path in ("/health", "/metrics"):
            for sent in ({}, {"x-api-key": key}, {"Authorization": f"Bearer {ADMIN_KEY}x"}):
                assert client.get(path, headers=sent).status_code == 401
            assert client.get(path, headers={"Authorization": f"Bearer {ADMIN_KEY}"}).status_code == 200
        assert client.get("/v1/messages/nowhere").json()["error"]["type"] == "not_found_error"
        wrong = client.get("/v1/chat/completions")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


def test_a_session_sees_only_itself() -> None:
    with live(minimax()) as gateway:
        (one, one_key), (other, other_key) = gateway.episode("a"), gateway.episode("b")
        first = post(gateway, one_key, BODY | {"seed": 1})
        again = post(gateway, other_key, BODY | {"seed": 1}, x_stainless_retry_count="1")
        assert first.json()["id"] != again.json()["id"], "an answer of another episode was told"
        assert (one.num_calls, other.num_calls) == (1, 1)
        with httpx2.Client(base_url=gateway.url, headers={"x-api-key": ADMIN_KEY}) as client:
            reward = {"value": 1, "call": first.json()["id"]}
            assert client.post(f"/episodes/{other.id}/reward", json=reward).status_code == 400
        check_recorded(gateway, one, other)


def test_it_listens_elsewhere_only_with_an_admin_key() -> None:
    with pytest.raises(ConfigError, match="admin key"):
        bind(GatewayConfig(host="0.0.0.0", port=0), None)
    bind(GatewayConfig(host="0.0.0.0", port=0), "key").close()
    with bind(GatewayConfig(port=0), None) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        with pytest.raises(ConfigError, match="cannot be listened on"):
            bind(GatewayConfig(port=listener.getsockname()[1]), None)


@pytest.fixture(params=["fast", "plain"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both parsers of HTTP, where both are installed."""
    if request.param == "plain":
        monkeypatch.setattr(connection, "HAS_HTTPTOOLS", False)
    elif not connection.HAS_HTTPTOOLS:
        pytest.skip("httptools is not installed")
    return str(request.param)


@pytest.mark.slow
def test_what_is_too_large_too_deep_or_too_slow_is_refused(parser: str) -> None:
    with live(minimax(), config=SMALL) as gateway:
        _, key = gateway.episode()
        deep = b'{"model": "m", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}"
        cases: list[tuple[bytes, bytes]] = [
            (talk(gateway, head(key, 30_000)), b"413"),
            (talk(gateway, head(key, 10**15)), b"413"),
            (talk(gateway, head(key, 100), b"{" * 10), b"408"),
            (talk(gateway, b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"), b"408"),
            (talk(gateway, b""), b"408"),
            (talk(gateway, head(key, 2, "/v1/messages", f"x-large: {'y' * 3900}"), b"{}"), b"431"),
            (talk(gateway, b"GET /health HTTP/1.1\r\nhost: x\r\nx-large: " + b"y" * 5000), b"431"),
            (talk(gateway, head(key, len(deep)), deep), b"400"),
            (talk(gateway, head(key, 4), b"\xff\xfe{}"), b"400"),
            (talk(gateway, head(key, 2, "/v1/messages", "content-encoding: gzip"), b"{}"), b"415"),
            (talk(gateway, b"nonsense\r\n\r\n"), b"400"),
            (talk(gateway, head(key, -5)), b"400"),
        ]
        for number, (answer, status) in enumerate(cases):
            assert answer.startswith(b"HTTP/1.1 " + status), (number, answer[:200])
        chunked = b"POST /v1/responses HTTP/1.1\r\nhost: x\r\nx-api-key: %b\r\ntransfer-encoding: chunked\r\n\r\n"
        pieces = [b"%x\r\n%b\r\n" % (8000, b" " * 8000)] * 4
        assert talk(gateway, chunked % key.encode(), *pieces).startswith(b"HTTP/1.1 413")
        # Framing that breaks off inside a body, before the answer and during it.
        broken = [chunked % key.encode(), b"5\r\nabcde\r\nnonsense\r\n"]
        assert talk(gateway, *broken).startswith(b"HTTP/1.1 400")
        assert b"HTTP/1.1 401" in talk(gateway, chunked % b"x", b"5\r\nabcde\r\n", b"nonsense\r\n", pause_s=0.05)
        # A client that sends all before it reads is told why, too; and its connection serves it on.
        with httpx2.Client(base_url=gateway.url, headers={"x-api-key": key}, verify=False) as client:
            for _ in range(3):
                assert client.post("/v1/responses", content=b" " * 70_000).status_code == 413
                assert client.post("/v1/responses", content=b" " * 9_000, headers={"x-api-key": ""}).status_code == 401
                assert client.post("/v1/responses", content=b" " * 9_000).status_code == 400
        # One byte now and then does not hold a connection either.
        drip = [bytes([byte]) for byte in b"GET /health HTTP/1.1\r\nx-a"]
        started_s = time.monotonic()
        assert talk(gateway, *drip, pause_s=0.05).startswith(b"HTTP/1.1 408") or time.monotonic() - started_s < 20
        assert post(gateway, key, BODY).status_code == 200


def test_no_text_and_no_key_is_logged(caplog: pytest.LogCaptureFixture, tmp_path: Any) -> None:
    body = BODY | {"messages": [{"role": "user", "content": "sesame-open"}]}
    with caplog.at_level(logging.DEBUG):
        with live(minimax(), config=GatewayConfig(port=0, journal=str(tmp_path))) as gateway:
            _, key = gateway.episode()
            assert post(gateway, key, body).status_code == 200
            assert post(gateway, key, body | {"sesame-open": 1}).status_code == 400
        logged = texts_of(caplog)
        assert not any("sesame" in message or key in message for message in logged)
        with live(minimax(), config=GatewayConfig(port=0, logs_text=True)) as gateway:
            _, key = gateway.episode()
            assert post(gateway, key, body).status_code == 200
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("m2forge")]
    assert any("sesame" in message for message in ours)
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())


LOGGERS = ("m2forge", "uvicorn", "asyncio")


def texts_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """All that was logged by this side, the words of exceptions included."""
    formatter = logging.Formatter()
    return [formatter.format(record) for record in caplog.records if record.name.startswith(LOGGERS)]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("place", ["read", "response", "stream", "piece", "end_sample", "generate", "parser"])
def test_an_internal_failure_is_logged_without_prompt_text(
    place: str, is_streamed: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "sesame-open"

    def fail(*args: object, **options: object) -> None:
        raise ZeroDivisionError(secret)

    body = BODY | {"messages": [{"role": "user", "content": secret}], "stream": is_streamed}
    with caplog.at_level(logging.DEBUG), live(minimax()) as gateway:
        episode, key = gateway.episode()
        owners = {"generate": gateway.engine, "piece": ChatStream, "end_sample": ChatStream, "parser": SampleReader}
        with monkeypatch.context() as patch:
            patch.setattr(owners.get(place, OpenAIChat), "take" if place == "parser" else place, fail)
            response = post(gateway, key, body)
        is_reached = (
            is_streamed != (place == "response") if place in ("response", "stream", "piece", "end_sample") else True
        )
        assert secret not in response.text
        assert ("ZeroDivisionError" in "\n".join(texts_of(caplog))) == is_reached
        gateway.wait_until(lambda: episode.num_running == 0)
        assert post(gateway, key, body).status_code == 200
    gc.collect()
    assert not any("sesame" in message or key in message for message in texts_of(caplog))


# -- nonsense ----------------------------------------------------------------------------------------------------------

ODD: list[Any] = [None, True, 0, -1, 1e308, 2**70, "", "\ud800", "\u2028\x00", [], {}, [[]], {"role": 5}, "x" * 3000]


def mutated(body: dict[str, Any], rng: random.Random) -> Any:
    """The body with one thing changed, at any depth."""
    copy = json.loads(json.dumps(body))
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            places.append((value, name))
            if isinstance(inner, dict | list):
                walk(inner)

    walk(copy)
    owner, name = rng.choice(places)
    match rng.randrange(3):
        case 0:
            owner[name] = rng.choice(ODD)
        case 1:
            del owner[name]
        case _ if isinstance(owner, dict):
            owner[rng.choice(["n", "stop", "tools", "stream", "seed", "zz", "temperature"])] = rng.choice(ODD)
    return copy


def request(key: str, rng: random.Random) -> tuple[list[bytes], bool]:
    """Pieces of a request that is broken in some way, and whether our half is closed after it."""
    path = rng.choice([*BODIES, "/v1/models", "/episodes", "/x"])
    valid = rng.choice(BODIES.get(path, [BODY]))
    body = json.dumps(mutated(valid | {"stream": rng.random() < 0.5}, rng)).encode()
    ends = rng.random() < 0.2
    match rng.randrange(9):
        case 0:
            at = rng.randrange(len(body))
            body = body[:at] + bytes([rng.randrange(256)]) + body[at + rng.randrange(3) :]
        case 1:
            body = rng.choice([b"", b"null", b"[" * 300, b"{" * 9000, b'{"a":' * 500, b"1e999", b"NaN", b'"\\ud800"'])
        case 2:
            body = rng.randbytes(rng.randrange(200))
        case 3:
            return [head(key, len(body) + rng.choice([1, 50, 10**6]), path), body], ends
        case 4:
            return [head(key, max(len(body) - rng.randrange(1, 20), 0), path), body], ends
        case 5:
            return [head(key, len(body), path)[: rng.randrange(1, 120)]], ends
        case 6:
            return [rng.randbytes(rng.randrange(1, 300)), b"\r\n\r\n"], ends
        case 7:
            framed = head(key, len(body), path).replace(b"content-length: ", b"transfer-encoding: chunked\r\nx-was: ")
            chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body) + rng.choice([0, 0, 3]), body)
            return [framed, chunk], ends
    whole = head(key, len(body), path) + body
    at = rng.randrange(len(whole))
    return [whole[:at], whole[at:]], ends


NUM_ROUND = 5000
"""Requests of one episode, which is closed after them."""
ALLOWED = ("none", "200", "400", "401", "404", "405", "408", "413", "431")


def send(gateway: Live, key: str, seed: int) -> str:
    pieces, ends = request(key, random.Random(seed))
    answer = talk(gateway, *pieces, ends=ends)
    status = answer[9:12].decode() or "none"
    assert status in ALLOWED, (seed, pieces, answer[:300])
    return status


def fuzz_round(gateway: Live, pool: concurrent.futures.Executor, seeds: list[int]) -> set[str]:
    """What the requests of an episode were answered; none of its records is lost."""
    episode, key = gateway.episode()
    statuses = set(pool.map(lambda seed: send(gateway, key, seed), seeds))
    assert post(gateway, key, BODY).status_code == 200
    gateway.wait_until(lambda: gateway.server.app.calls.num_running == episode.num_running == 0)
    seen = [pair for pair in gateway.engine.seen() if pair[1]]
    assert sorted(gateway.run(lambda: recorded(episode))) == sorted(seen), "a record was lost"
    gateway.run(episode.close)
    gateway.engine.prompts.clear()
    gateway.engine.completions.clear()
    gateway.engine.chunks.clear()
    return statuses


@pytest.mark.slow
@pytest.mark.parametrize("num_requests", [800, pytest.param(100_000, marks=pytest.mark.long)])
def test_broken_requests_are_refused_and_nothing_else_happens(
    num_requests: int, parser: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(num_requests)
    seeds = [rng.getrandbits(40) for _ in range(num_requests)]
    config = SMALL.model_copy(update={"read_timeout_s": 0.2, "journal": str(tmp_path), "max_closed": 1})
    caplog.set_level(logging.ERROR)
    memory_mib, statuses = [], set()
    with live(minimax(), config=config) as gateway, concurrent.futures.ThreadPoolExecutor(16) as pool:
        for start in range(0, num_requests, NUM_ROUND):
            statuses |= fuzz_round(gateway, pool, seeds[start : start + NUM_ROUND])
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # what the allocator has free is not lost
            memory_mib.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20)
    assert {"200", "400", "408"} < statuses
    assert not caplog.records, "something failed"
    # The first rounds fill caches; after them the client's threads and the gateway together stay as they are.
    quarter = len(memory_mib) // 4
    assert memory_mib[-1] < 1.05 * memory_mib[quarter], memory_mib


def test_good_conversations_of_every_dialect_are_answered() -> None:
    """What the broken ones are made of."""
    with live(minimax()) as gateway:
        episode, key = gateway.episode()
        for path, bodies in BODIES.items():
            for body in bodies:
                assert post(gateway, key, body, path).status_code == 200, (path, body)
        check_recorded(gateway, episode)


@pytest.mark.slow
def test_broken_requests_of_a_megabyte_are_refused_too() -> None:
    rng = random.Random(1)
    with live(minimax()) as gateway:
        episode, key = gateway.episode()
        for path, body in long_bodies(1 << 20).items():
            whole = json.dumps(body).encode()
            assert len(whole) > 1 << 20
            for changed in (body, mutated(body, rng), mutated(body, rng)):
                sent = json.dumps(changed).encode()
                assert talk(gateway, head(key, len(sent), path), sent)[9:12] == b"400"
            assert talk(gateway, head(key, len(whole), path), whole[:-9], ends=True)[9:12] in (b"400", b"")
        assert not episode.history._beginnings
        assert post(gateway, key, CHAT).status_code == 200
        check_recorded(gateway, episode)


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_hung_up_on(parser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def bind_small(config: GatewayConfig, key: str | None) -> socket.socket:
        listener = bind(config, key)
        # Connections inherit it: a buffer of megabytes would have to be filled first.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr("m2forge.gateway.server.bind", bind_small)
    config = GatewayConfig(port=0, write_timeout_s=0.3)
    with live(minimax(), config=config) as gateway:
        _, key = gateway.episode()
        body = json.dumps(BODY | {"stream": True, "n": 10, "max_tokens": 1500, "logprobs": True}).encode()
        host, port = gateway.url.removeprefix("http://").split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.sendall(head(key, len(body)) + body)
            gateway.wait_until(lambda: gateway.server.app.calls.num_running == 1)
            gateway.wait_until(lambda: not gateway.server._server.server_state.connections)
        gateway.wait_until(lambda: gateway.server.app.calls.num_running == 0)
        assert post(gateway, key, BODY).status_code == 200


def test_pipelined_requests_are_answered_in_order(parser: str) -> None:
    with live(minimax(), delay_s=0.002) as gateway:
        episode, key = gateway.episode()
        body = json.dumps(BODY | {"max_tokens": 3}).encode()
        first = head(key, len(body)).replace(b"connection: close\r\n", b"") + body
        answers = talk(gateway, first + first + head(key, 4, "/v1/messages") + b"nope")
        assert [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"400"]
        # Whoever hangs up after having asked ahead is noticed all the same.
        host, port = gateway.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            long = json.dumps(BODY | {"max_tokens": 2000, "stream": True}).encode()
            client.sendall(head(key, len(long)) + long + first)
            client.recv(100)
        gateway.wait_until(lambda: gateway.server.app.calls.num_running == 0)
        check_recorded(gateway, episode)


def test_an_offer_of_another_protocol_is_passed_over(parser: str) -> None:
    with live(minimax()) as gateway:
        _, key = gateway.episode()
        body = json.dumps(BODY).encode()
        offer = head(key, len(body), "/v1/chat/completions", "upgrade: h2c", "http2-settings: AAMAAABk")
        answer = talk(
            gateway, offer.replace(b"connection: close", b"connection: upgrade, http2-settings, close") + body
        )
        assert answer.startswith(b"HTTP/1.1 200")
        # A tunnel is none of our routes.
        assert talk(gateway, b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")[9:12] in (b"400", b"404")
        open_end = offer.replace(b"connection: close", b"connection: upgrade, http2-settings")
        again = head(key, len(body)) + body
        assert talk(gateway, open_end + body[:50], body[50:] + again, pause_s=0.05).count(b"HTTP/1.1 200") == 2
