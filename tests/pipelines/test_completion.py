"""Completions: asked once, stored before use, retried, replayed; whatever the endpoint sends."""

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from m2forge.errors import ConfigError, RunError
from m2forge.loop_thread import LoopThread
from m2forge.pipelines.completion import MAX_FAILED, Completions, EndpointError, ask_json, read_completion, stable
from m2forge.pipelines.config import EndpointConfig, PipelineConfig, QuestionsConfig
from m2forge.pipelines.run import run_stages
from m2forge.pipelines.stage import Completion, Context, Item, Passed, Pipeline, Rejection, Source, Stage
from m2forge.pipelines.store import Store
from tests.pipelines.endpoint import Endpoint, completion, serving

MESSAGES = [{"role": "user", "content": "hello"}]
GARBAGE = [
    b"",
    b"<html>busy</html>",
    b"[]",
    b'{"choices": []}',
    b'{"choices": [{"message": {"content": null}}]}',
    b'{"choices": [{"message": {"content": 3}}]}',
    b'{"choices": [{"message": {"content": "a"}}], "usage": {"prompt_tokens": 1e999}}',
    b'{"choices": [{"message": {"content": "a"}}], "usage": {"prompt_tokens": -1}}',
    b'{"choices": [{"message": {"content": NaN}}]}',
    b"[" * 100_000,
    b"\xff\xfe",
]


class Asked:
    """Completions over a store, as a stage asks them."""

    def __init__(self, folder: Path, url: str, *, is_replay: bool = False, **keys: Any) -> None:
        self.store, self.loop = Store(folder / "pipeline.db"), LoopThread("test")
        models = {"m": EndpointConfig(url=url, model="model", retry_s=0.001, **keys)}
        self.completions = Completions(models, self.store, self.loop, is_replay=is_replay)

    def ask(self, content: str = "hello", draw: int = 0, **sampling: Any) -> tuple[Completion, bool]:
        messages = [{"role": "user", "content": content}]
        return self.completions.ask("stage", "m", messages, (), draw, sampling)


@contextmanager
def asking(folder: Path, url: str, **keys: Any) -> Iterator[Asked]:
    asked = Asked(folder, url, **keys)
    with asked.store, asked.loop:
        yield asked
        asked.completions.close()


def echo(body: dict[str, Any], number: int) -> tuple[int, bytes]:
    return completion(f"{body['messages'][-1]['content']}, {number}")


def test_a_completion_is_asked_for_once(tmp_path: Path) -> None:
    with serving(echo) as endpoint:
        with asking(tmp_path, endpoint.url, temperature=0.5) as asked:
            first, is_cached = asked.ask()
            assert (first.content, first.num_prompt, first.num_sampled, is_cached) == ("hello, 0", 7, 3, False)
            # Committed before a stage receives it: another process sees it.
            with closing(sqlite3.connect(tmp_path / "pipeline.db")) as connection:
                assert connection.execute("SELECT COUNT(*) FROM completion").fetchone() == (1,)
            assert asked.ask() == (first, True)
            others = [asked.ask(draw=1), asked.ask("other"), asked.ask(temperature=0.7)]
            assert [found.content for found, _ in others] == ["hello, 1", "other, 2", "hello, 3"]
        sent = endpoint.requests[0]
        assert (sent["path"], sent["model"], sent["temperature"]) == ("/v1/chat/completions", "model", 0.5)
        assert "draw" not in sent
        # Another process, and another address of the same model.
        with asking(tmp_path, "http://127.0.0.1:9/v1", temperature=0.5) as asked:
            assert asked.ask() == (first, True)
        with asking(tmp_path, endpoint.url, temperature=0.6) as asked:
            assert not asked.ask()[1]


def test_workers_that_ask_the_same_wait_for_one_request(tmp_path: Path) -> None:
    def slow(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        time.sleep(0.05)
        return echo(body, number)

    with serving(slow) as endpoint, asking(tmp_path, endpoint.url) as asked, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: asked.ask(), range(8)))
        assert {one.content for one, _ in found} == {"hello, 0"}
        assert sum(not is_cached for _, is_cached in found) == len(endpoint.requests) == 1


def test_failed_requests_are_retried(tmp_path: Path) -> None:
    replies = [(429, b"slow down"), (503, b""), *((200, body) for body in GARBAGE)]

    def respond(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        return echo(body, number) if number % 2 else replies[number // 2]

    with serving(respond) as endpoint, asking(tmp_path, endpoint.url, max_retries=1) as asked:
        for number in range(len(replies)):
            assert asked.ask(str(number))[0].content == f"{number}, {2 * number + 1}"
        assert len(endpoint.requests) == 2 * len(replies)


@pytest.mark.parametrize(
    ("status", "body", "reason", "num_requests"),
    [(401, b"no key", "status 401", 1), (429, b"", "status 429", 3), (200, b"<html>", "no chat completion", 3)],
)
def test_a_request_that_stays_refused_fails(
    tmp_path: Path, status: int, body: bytes, reason: str, num_requests: int
) -> None:
    with serving(lambda *_: (status, body)) as endpoint, asking(tmp_path, endpoint.url, max_retries=2) as asked:
        with pytest.raises(EndpointError, match=reason) as caught:
            asked.ask()
        assert (caught.value.reason, len(endpoint.requests)) == (reason, num_requests)
        endpoint.respond = echo
        assert not asked.ask()[1], "a failure is not stored"


def test_an_endpoint_that_hangs_or_is_down_fails(tmp_path: Path) -> None:
    released = threading.Event()

    def hang(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        released.wait(5)
        return echo(body, number)

    with serving(hang) as endpoint, asking(tmp_path, endpoint.url, max_retries=1, timeout_s=0.05) as asked:
        for number in range(MAX_FAILED):
            with pytest.raises(EndpointError, match="endpoint unreachable: TimeoutError"):
                asked.ask(str(number))
        with pytest.raises(EndpointError, match=f"the last {MAX_FAILED} completions failed"):
            asked.ask("another")
        # A busy endpoint may not have read a request by the time it is given up.
        assert MAX_FAILED < len(endpoint.requests) <= 2 * MAX_FAILED
        assert "another" not in {request["messages"][-1]["content"] for request in endpoint.requests}
        released.set()


def test_replay_needs_no_endpoint_and_refuses_a_miss(tmp_path: Path) -> None:
    with serving(echo) as endpoint, asking(tmp_path, endpoint.url) as asked:
        first, _ = asked.ask()
    with asking(tmp_path, "http://127.0.0.1:9/v1", is_replay=True, key_env="M2FORGE_NO_SUCH_KEY") as asked:
        assert asked.ask() == (first, True)
        with pytest.raises(RunError, match="replay: stage stage asks model for a completion that is not stored"):
            asked.ask("another")


def test_models_and_keys_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"models\.m\.key_env: .* M2FORGE_NO_SUCH_KEY is not set"):
        Asked(tmp_path, "http://127.0.0.1:9/v1", key_env="M2FORGE_NO_SUCH_KEY")
    monkeypatch.setenv("M2FORGE_TEST_KEY", "secret")
    with serving(echo) as endpoint, asking(tmp_path, endpoint.url, key_env="M2FORGE_TEST_KEY") as asked:
        asked.ask()
        assert endpoint.requests[0]["key"] == "Bearer secret"
        with pytest.raises(RunError, match="asks the model 'n'; known: m"):
            asked.completions.ask("stage", "n", MESSAGES, (), 0, {})


def test_tool_calls_are_a_completion() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = {"choices": [{"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}]}
    found = read_completion(json.dumps(body).encode())
    assert (found.content, found.finish_reason, found.message["tool_calls"]) == ("", "tool_calls", [call])


class One(Source):
    def fingerprint(self) -> str:
        return "one"

    def read(self, context: Context) -> Iterator[Item | Rejection]:
        yield from (Item(f"i{number}", {"text": f"t{number}"}) for number in range(3))


class Asking(Stage):
    name = "asking"
    runs_in = "threads"

    def __init__(self, ask: Callable[[Item, Context], str]) -> None:
        self.ask = ask

    def process(self, item: Item, context: Context) -> Passed | Rejection:
        return item.adding(answer=self.ask(item, context))


def run_asking(folder: Path, endpoint: Endpoint, ask: Callable[[Item, Context], str], **keys: Any) -> Any:
    models = {"m": EndpointConfig(url=endpoint.url, model="model", retry_s=0.001, max_retries=1)}
    config = PipelineConfig(name="run", models=models, questions=QuestionsConfig(source="counters"), **keys)
    return run_stages(Pipeline(One(), (Asking(ask),)), config, folder)[1]


def test_items_of_a_broken_endpoint_fail_until_it_works(tmp_path: Path) -> None:
    def ask(item: Item, context: Context) -> str:
        return context.ask("m", [{"role": "user", "content": item.text("text")}]).content

    def broken(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        return echo(body, number) if body["messages"][0]["content"] == "t1" else (200, b"garbage")

    with serving(broken) as endpoint:
        first = run_asking(tmp_path, endpoint, ask)
        assert (first.num_passed, first.failed, first.num_asked) == (1, {"no chat completion": 2}, 1)
        endpoint.respond = echo
        endpoint.requests.clear()
        again = run_asking(tmp_path, endpoint, ask)
        assert (again.num_passed, again.failed, again.num_asked, again.num_prompt) == (3, {}, 3, 21)
        assert len(endpoint.requests) == 2


def test_json_is_found_in_words_or_asked_for_again(tmp_path: Path) -> None:
    replies = ["I refuse", '{"a": ', 'Here:\n```json\n{"a": [1, "x"]}\n```', "[" * 5000, "no", "none"]

    def respond(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        return completion(replies[number])

    def ask(item: Item, context: Context) -> str:
        return ask_json(context, "m", [{"role": "user", "content": item.text("text")}], read) if item.id < "i2" else ""

    def read(value: Any) -> str:
        if not isinstance(value, dict):
            raise ValueError("no object")
        return str(value["a"])

    with serving(respond) as endpoint:
        found = run_asking(tmp_path, endpoint, ask, workers=1)
        assert (found.num_passed, found.failed, found.num_asked) == (2, {"unusable response": 1}, 6)


def test_output_of_two_runs_is_the_same_text() -> None:
    first = "<Sums object at 0x7f12ab34cd56> in /tmp/pytest-of-a/x: 1 failed in 0.12s"
    second = "<Sums object at 0x7fffab34cd99> in /tmp/tmpk3j_x/x: 1 failed in 13.02s"
    assert stable(first) == stable(second)
    assert stable("1 failed, 12 passed") == "1 failed, 12 passed"
