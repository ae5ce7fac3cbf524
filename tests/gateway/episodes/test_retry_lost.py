"""Retries where something else goes wrong as well: a repeat that is lost too, a retry that outlives the first client,
others that sent the same body; and requests that wait for what others were promised."""

import concurrent.futures
import socket
import struct
import threading
import time
from typing import Any

import httpx2
import pytest

from m2forge.gateway.calls import calls
from m2forge.gateway.calls.sample import Reply, read_reply
from m2forge.gateway.config import Budget, GatewayConfig
from m2forge.gateway.dialects.types import CompletionRequest
from m2forge.gateway.episodes.episode import AdmittedRequest, Requests, RequestState
from m2forge.gateway.episodes.journal import Answered
from m2forge.text.message import Message
from m2forge.text.tokenizer import Tokenizer
from tests.gateway.dialogue import minimax
from tests.gateway.episodes.test_retry_http import BODY, post
from tests.gateway.live import Live, check_recorded, live


def start(gateway: Live, key: str, body: Any) -> socket.socket:
    """A connection that has sent a request and reads nothing yet."""
    host, port = gateway.url.removeprefix("http://").split(":")
    data = httpx2.Request("POST", "http://x", json=body).content  # as `post` writes it
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: {len(data)}\r\n\r\n"
    connection = socket.create_connection((host, int(port)), 10)
    connection.sendall(head.encode() + data)
    return connection


def break_off(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_a_repeat_that_is_lost_too_is_told_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same body from a client that sends no header: only the lost connection says that it is a retry."""
    is_reading, may_go_on = threading.Event(), threading.Event()

    def read_slowly(recorded: Answered, request: CompletionRequest, tokenizer: Tokenizer) -> Reply:
        is_reading.set()
        may_go_on.wait(60)
        return read_reply(recorded, request, tokenizer)

    with live(minimax(), [Message("assistant", "Hello", "t"), Message("assistant", "Other", "t")]) as gateway:
        episode, key = gateway.episode()
        first = post(gateway, key, BODY | {"max_tokens": 100})
        request = episode.requests.named(first.json()["id"])
        assert request is not None
        gateway.run(lambda: setattr(request, "is_delivered", False))  # the first was lost
        monkeypatch.setattr(calls, "read_reply", read_slowly)
        connection = start(gateway, key, BODY | {"max_tokens": 100})
        assert is_reading.wait(60)
        break_off(connection)  # the loop is busy, and does not know
        may_go_on.set()
        gateway.wait_until(lambda: request.num_waiting == 0)
        assert not request.is_delivered
        again = [post(gateway, key, BODY | {"max_tokens": 100}).json()["id"] for _ in range(2)]
        assert again[0] == first.json()["id"] != again[1], "told once more, and then it is another sample"
        assert episode.num_calls == 2
        check_recorded(gateway, episode)


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_a_retry_was_told_is_nobody_elses(is_streamed: bool) -> None:
    says = [Message("assistant", "A longer answer, word by word.", "t"), Message("assistant", "Other", "t")]
    with live(minimax(), says, delay_s=0.01) as gateway:
        episode, key = gateway.episode()
        body = BODY | {"max_tokens": 500, "stream": is_streamed}
        connection = start(gateway, key, body)
        gateway.wait_until(lambda: episode.num_running == 1)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            retried = pool.submit(post, gateway, key, body, x_stainless_retry_count="1")
            gateway.wait_until(lambda: gateway.num_listeners() == 2)
            connection.close()
            response = retried.result()
        assert response.status_code == 200
        other = post(gateway, key, body)
        assert other.headers["x-request-id"] != response.headers["x-request-id"]
        assert episode.num_calls == 2
        check_recorded(gateway, episode)


@pytest.mark.slow
def test_a_retry_of_one_of_two_equal_requests_gets_its_sample() -> None:
    says = [Message("assistant", "One " * 20, "t"), Message("assistant", "Two " * 20, "t")]
    with live(minimax(), [*says, Message("assistant", "Three", "t")], delay_s=0.005) as gateway:
        episode, key = gateway.episode()
        body = BODY | {"max_tokens": 500}
        connection = start(gateway, key, body)
        gateway.wait_until(lambda: episode.num_running == 1)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            other = pool.submit(post, gateway, key, body)
            gateway.wait_until(lambda: episode.num_running == 2)
            connection.close()
            gateway.wait_until(lambda: episode.num_running == 1)
            retried = post(gateway, key, body, x_stainless_retry_count="1")
            response = other.result()
        assert retried.json()["id"] != response.json()["id"]
        # Nobody is owed anything now: the next attempt is of one that was answered.
        again = post(gateway, key, body, x_stainless_retry_count="2")
        assert again.json()["id"] in (retried.json()["id"], response.json()["id"])


def answered(requests: Requests, digest: str = "d", *, is_delivered: bool) -> AdmittedRequest:
    request = AdmittedRequest(digest)
    requests.add(request)
    request.state, request.is_delivered = RequestState.ANSWERED, is_delivered
    return request


def test_attempts_are_spread_over_equal_requests() -> None:
    requests = Requests()
    made = [answered(requests, is_delivered=True) for _ in range(3)]
    found = [requests.find("d", attempt=1) for _ in range(3)]
    assert set(found) == set(made)
    lost = answered(requests, is_delivered=False)
    assert requests.find("d", attempt=1) is lost
    lost.num_waiting = 1  # it is being told
    assert requests.find("d") is None
    running = AdmittedRequest("d")
    requests.add(running)
    assert requests.find("d", attempt=1) in (lost, running)
    requests.remove(running)
    assert requests.find("d", attempt=1) is None, "of the one that came to nothing"
    requests.add(AdmittedRequest("d"))
    assert requests.find("d", attempt=1) is not None


# -- tokens that are promised to others -------------------------------------------------------------------------------

OPEN_END: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
"""Says nothing about how long the answer may be."""


@pytest.mark.slow
def test_parallel_calls_wait_for_budget_promised_to_others() -> None:
    with live(minimax(), [Message("assistant", "word " * 10, "t")] * 3, delay_s=0.005) as gateway:
        episode, key = gateway.episode(budget=Budget(max_tokens=4000))
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            bodies = [OPEN_END | {"user": str(number)} for number in range(3)]
            response = list(pool.map(lambda body: post(gateway, key, body), bodies))
        assert [answer.status_code for answer in response] == [200, 200, 200]
        assert all(answer.json()["choices"][0]["finish_reason"] == "stop" for answer in response)
        check_recorded(gateway, episode)


def test_what_is_spent_is_refused_to_those_who_waited_too() -> None:
    with live(minimax(), delay_s=0.005) as gateway:
        episode, key = gateway.episode(budget=Budget(max_tokens=30))
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            first = pool.submit(post, gateway, key, BODY | {"max_tokens": 30, "seed": 3})
            gateway.wait_until(lambda: episode.num_running == 1)
            second = pool.submit(post, gateway, key, BODY | {"max_tokens": 31, "seed": 3})
            assert first.result().status_code == 200
            assert episode.num_sampled == 30
            response = second.result()
        assert response.status_code == 429
        assert response.headers["x-should-retry"] == "false"
        assert "30 of 30 sampled tokens are spent" in response.json()["error"]["message"]


@pytest.mark.slow
def test_a_waiting_client_may_leave_and_waits_a_calls_time() -> None:
    config = GatewayConfig(port=0, call_timeout_s=0.5)
    with live(minimax(), config=config, delay_s=0.02) as gateway:
        episode, key = gateway.episode(budget=Budget(max_tokens=4000))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(post, gateway, key, OPEN_END)
            gateway.wait_until(lambda: episode.num_running == 1)
            connection = start(gateway, key, OPEN_END | {"user": "other"})
            gateway.wait_until(lambda: len(episode._waiting) == 1)
            connection.close()
            gateway.wait_until(lambda: all(ended.done() for ended in episode._waiting))
            assert running.result().status_code == 200
        time.sleep(0.05)
        assert (episode.num_calls, episode.num_running) == (1, 0)
        # Promised to a request that never ends: who waits is told so.
        held, _ = gateway.run(lambda: episode.admit("held"))
        gateway.run(lambda: episode.reserve(held, 4000))
        begun_s = time.monotonic()
        response = post(gateway, key, OPEN_END | {"user": "third"})
        assert response.status_code == 429
        assert "reserved by calls in flight" in response.json()["error"]["message"]
        assert 0.4 < time.monotonic() - begun_s < 30
        assert httpx2.get(f"{gateway.url}/health").json()["num_requests"] == 0
