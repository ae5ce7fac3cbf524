"""Retries and hang-ups: the same answer to who asks again, no work for who has left, and budgets that hold."""

import contextlib
import json
import socket
import threading
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from m2forge.gateway.config import Budget, GatewayConfig
from m2forge.gateway.episodes.journal import Answered, read_entries
from m2forge.gateway.episodes.registry import Episodes
from m2forge.records import FinishReason
from m2forge.text.message import Message
from tests.gateway.dialogue import minimax
from tests.gateway.live import ADMIN_KEY, Live, check_recorded, live
from tests.gateway.test_sdk_openai import connected

BODY: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 16,
    "logprobs": True,
}
PATHS = {
    "/v1/chat/completions": BODY,
    "/v1/responses": {
        "model": "m",
        "input": "Hi",
        "max_output_tokens": 16,
        "include": ["message.output_text.logprobs"],
    },
    "/v1/completions": {"model": "m", "prompt": "Hi", "logprobs": 0},
    "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 16},
}


def post(gateway: Live, key: str, body: Any, path: str = "/v1/chat/completions", **headers: str) -> httpx2.Response:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    with httpx2.Client(base_url=gateway.url, timeout=20) as client:
        return client.post(path, json=body, headers={"Authorization": f"Bearer {key}"} | sent)


def hang_up(gateway: Live, key: str, body: Any, *, after: bytes) -> bytes:
    """Send a request, read until `after` was there, and leave."""
    host, port = gateway.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(head.encode() + data)
        read = b""
        while after not in read:
            read += connection.recv(4096)
        return read


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_retry_is_told_the_recorded_answer(path: str, is_streamed: bool) -> None:
    body = PATHS[path] | {"stream": is_streamed}
    with live(minimax(), [Message("assistant", "Hello ß.", "Hm.")]) as gateway:
        episode, key = gateway.episode()
        first = post(gateway, key, body, path)
        retried = post(gateway, key, body, path, x_stainless_retry_count="1")
        assert first.status_code == retried.status_code == 200
        assert episode.num_calls == 1
        if is_streamed:
            assert _said(retried.text) == _said(first.text)
            assert retried.headers["x-request-id"] == first.headers["x-request-id"]
        else:
            assert retried.json() == first.json()
        other = post(gateway, key, body, path)  # no retry: another sample
        assert other.headers["x-request-id"] != first.headers["x-request-id"]
        tokens = [post(gateway, key, body, path, idempotency_key="abc").headers["x-request-id"] for _ in range(2)]
        assert tokens[0] == tokens[1]
        assert episode.num_calls == 3
        check_recorded(gateway, episode)
        assert f'requests_total{{dialect="{_dialect(path)}",outcome="repeated"}} 2.0' in _metrics(gateway)


def _said(stream: str) -> str:
    """All text that a stream tells, whatever pieces it comes in."""
    texts = []
    for line in stream.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            kind = event.get("type", "")
            if kind in ("response.output_text.delta", "response.reasoning_text.delta"):
                texts.append(event["delta"])
            elif kind == "content_block_delta":
                texts.append(event["delta"].get("text", "") + event["delta"].get("thinking", ""))
            for choice in event.get("choices", []):
                delta = choice.get("delta", choice)
                texts += [delta.get(name) or "" for name in ("text", "content", "reasoning_content")]
    assert "".join(texts)
    return "".join(texts)


def _dialect(path: str) -> str:
    return {"/v1/chat/completions": "chat"}.get(path, path.removeprefix("/v1/"))


def _metrics(gateway: Live) -> str:
    return httpx2.get(f"{gateway.url}/metrics").text


@pytest.mark.slow
def test_the_sdks_own_retry_is_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection breaks before it has read the answer, so it asks again, and says so in a header."""
    monkeypatch.setattr(openai._constants, "INITIAL_RETRY_DELAY", 0.01)
    with live(minimax(), [Message("assistant", "Hello.", "Hm.")]) as gateway:
        episode, key = gateway.episode()
        tries = []

        def note(request: httpx2.Request) -> None:
            tries.append(request.headers.get("x-stainless-retry-count"))

        def drop(response: httpx2.Response) -> None:
            if len(tries) == 1:
                raise httpx2.ReadError("the line was cut")

        with (
            httpx2.Client(event_hooks={"request": [note], "response": [drop]}) as http,
            openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=2, http_client=http) as client,
        ):
            received = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        assert tries == ["0", "1"]
        assert received.choices[0].message.content == "Hello."
        check_recorded(gateway, episode)
        assert episode.num_calls == 1


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_hangs_up_aborts_its_generation(is_streamed: bool) -> None:
    with live(minimax(), delay_s=0.01) as gateway:
        episode, key = gateway.episode()
        body = BODY | {"max_tokens": 2000, "stream": is_streamed}
        if is_streamed:
            hang_up(gateway, key, body, after=b"data: ")
        else:
            hang_up(gateway, key, body, after=b"")
        gateway.wait_until(lambda: gateway.engine.num_aborted == 1 and episode.num_running == 0)
        # What was sampled is recorded, and no retry is told half an answer.
        calls = gateway.run(episode.calls)
        assert all(call.finish_reason is FinishReason.ABORT for call in calls)
        assert calls or not is_streamed
        if calls:
            check_recorded(gateway, episode)
        gateway.run(lambda: gateway.engine.__setattr__("_delay_s", 0.0))
        answer = post(gateway, key, body, x_stainless_retry_count="1")
        assert answer.status_code == 200
        assert gateway.run(episode.calls)[-1].finish_reason is not FinishReason.ABORT


def test_half_an_answer_is_nobodys_after_a_restart_either(tmp_path: Path) -> None:
    with live(minimax(), config=GatewayConfig(port=0, journal=str(tmp_path)), delay_s=0.01) as gateway:
        episode, key = gateway.episode()
        post(gateway, key, BODY)
        hang_up(gateway, key, BODY | {"max_tokens": 2000, "stream": True}, after=b"data: ")
        gateway.wait_until(lambda: episode.num_calls == 2)
    (again,) = Episodes(minimax(), folder=tmp_path)
    assert again.calls() == episode.calls()
    entries = [entry for entry in read_entries(tmp_path / f"{episode.id}.journal")[0] if isinstance(entry, Answered)]
    claimed = [again.requests.find(entry.digest) for entry in entries if entry.digest]
    assert [request is not None for request in claimed] == [True]


def test_a_conversation_continues_from_what_was_sent() -> None:
    format = minimax()
    says = [Message("assistant", "one two three four five six seven eight", "t"), Message("assistant", "ok", "t")]
    with live(format, says, delay_s=0.02) as gateway:
        episode, key = gateway.episode()
        read = hang_up(
            gateway, key, BODY | {"stream": True, "max_tokens": 500, "logprobs": False}, after=b'"content": "'
        )
        gateway.wait_until(lambda: episode.num_calls == 1)
        completion = episode.completions[0]
        assert completion.content
        assert completion.content in "one two three four five six seven eight"
        assert read
        messages = [
            *BODY["messages"],
            {"role": "assistant", "content": completion.content},
            {"role": "user", "content": "go on"},
        ]
        assert post(gateway, key, BODY | {"messages": messages, "max_tokens": 500}).status_code == 200
        check_recorded(gateway, episode)
        first, second = gateway.engine.seen()
        assert second[0][: len(first[0]) + len(first[1])] == first[0] + first[1]


@pytest.mark.slow
def test_a_retry_while_the_first_still_runs_gets_its_answer() -> None:
    with live(minimax(), [Message("assistant", "A longer answer, word by word.", "t")], delay_s=0.02) as gateway:
        episode, key = gateway.episode()
        body = BODY | {"max_tokens": 500}
        answers: list[httpx2.Response] = []
        first = threading.Thread(target=lambda: answers.append(post(gateway, key, body)))
        first.start()
        gateway.wait_until(lambda: episode.num_running == 1)
        retried = post(gateway, key, body, x_stainless_retry_count="1")
        first.join()
        assert retried.json() == answers[0].json()
        assert episode.num_calls == 1
        check_recorded(gateway, episode)


@pytest.mark.slow
def test_a_retry_takes_over_from_a_client_that_left() -> None:
    with live(minimax(), [Message("assistant", "A longer answer, word by word.", "t")], delay_s=0.02) as gateway:
        episode, key = gateway.episode()
        body = BODY | {"max_tokens": 500, "stream": True}
        answers: list[httpx2.Response] = []

        def retry() -> None:
            answers.append(post(gateway, key, body, x_stainless_retry_count="1"))

        host, port = gateway.url.removeprefix("http://").split(":")
        with contextlib.closing(socket.create_connection((host, int(port)), 10)) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\n"
            data = httpx2.Request("POST", "http://x", json=body).content
            connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            connection.recv(64)
            second = threading.Thread(target=retry)
            second.start()
            gateway.wait_until(lambda: gateway.num_listeners() == 2)
        second.join()
        assert answers[0].status_code == 200
        assert "[DONE]" in answers[0].text
        assert episode.num_calls == 1
        assert gateway.engine.num_aborted == 0
        check_recorded(gateway, episode)


def test_budgets_are_kept_and_their_refusals_are_not_retried() -> None:
    with live(minimax()) as gateway:
        for budget, num_good in (
            (Budget(max_calls=2), 2),
            (Budget(max_tokens=20), 2),
            (Budget(max_s=1e-6), 0),
        ):
            episode, key = gateway.episode(budget=budget)
            with connected(gateway, key) as client:
                client.max_retries = 5
                for number in range(num_good):
                    client.completions.create(model="m", prompt=[7, 8, number], max_tokens=16, seed=11)
                with pytest.raises(openai.RateLimitError):
                    client.completions.create(model="m", prompt=[7, 8, 9], max_tokens=16)
            assert episode.num_calls == num_good
            assert budget.max_tokens is None or episode.num_sampled <= budget.max_tokens


def test_a_reward_by_the_id_of_several_choices_says_which() -> None:
    with live(minimax()) as gateway:
        episode, key = gateway.episode()
        post(gateway, key, BODY)
        id = post(gateway, key, BODY | {"n": 3}).json()["id"]
        with httpx2.Client(base_url=gateway.url, headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as client:
            wrong: Any
            for wrong in ({}, {"choice": 3}, {"choice": -1}, {"choice": "0"}, {"call": 1, "choice": 0}):
                received = client.post(f"/episodes/{episode.id}/reward", json={"value": 1, "call": id} | wrong)
                assert received.status_code == 400
                assert received.json()["error"]["param"] == "choice"
            assert not episode.rewards
            client.post(f"/episodes/{episode.id}/reward", json={"value": 1, "call": id, "choice": 2})
        assert [(reward.id, reward.call) for reward in episode.rewards.values()] == [("call-3", 3)]


def test_a_closed_episode_takes_no_calls_and_still_rewards() -> None:
    with live(minimax()) as gateway:
        admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
        with httpx2.Client(base_url=gateway.url, headers=admin) as client:
            made = client.post("/episodes", json={"task_id": "t", "group": "g", "budget": {"max_calls": 5}})
            assert made.status_code == 201
            id, key = made.json()["id"], made.json()["key"]
            answer = post(gateway, key, BODY)
            for _ in range(2):
                assert client.post(f"/episodes/{id}/close", json={"failure": "gave up"}).status_code == 200
            assert post(gateway, key, BODY).status_code == 403
            rewards = [{"value": 1.0, "call": answer.json()["id"]}, {"value": 0.5}, {"value": 2, "id": "judge"}]
            for reward in rewards:
                taken = [client.post(f"/episodes/{id}/reward", json=reward).json()["is_taken"] for _ in range(2)]
                assert taken == [True, False]
            assert client.post(f"/episodes/{id}/reward", json={"value": 0.75}).status_code == 409
            wrong: Any
            for wrong in ({}, {"value": "1"}, {"value": 1, "call": 7}, {"value": 1, "call": "x"}, {"valu": 1}):
                assert client.post(f"/episodes/{id}/reward", json=wrong).status_code == 400
            shown = client.get(f"/episodes/{id}").json()
            assert shown["num_calls"] == 1
            assert [(reward["id"], reward["value"], reward["call"]) for reward in shown["rewards"]] == [
                ("call-0", 1.0, 0),
                ("episode", 0.5, None),
                ("judge", 2.0, None),
            ]
            assert shown["closed"]["failure"] == "gave up"
            assert client.get("/episodes/none").status_code == 404
            for wrong in ({"budget": {"max_calls": 0}}, {"budget": {"max_call": 1}}, {"id": "../x"}, {"task": "x"}):
                assert client.post("/episodes", json=wrong).status_code == 400
            assert client.post("/episodes", json={"id": id}).status_code == 409
