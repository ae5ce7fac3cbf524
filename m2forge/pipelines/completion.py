"""Completions of models: a request in, a stored response out.

    key = SHA-256(model, messages, tools, sampling parameters, draw)

A response is committed to the store before a stage receives it, and a stored one is never requested again, so a killed
run repeats no finished request. With `replay` there is no endpoint: a request without a stored response ends the run.
Prompt texts that may differ between executions are stored in the same way (`remember`).

A request that fails is retried; after `max_retries` retries the item is failed. After `MAX_FAILED` such requests in a
row the endpoint counts as down, and further requests of this process fail at once.
"""

import asyncio
import hashlib
import itertools
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeVar

from m2forge.errors import ConfigError, EngineError, RunError, suggest
from m2forge.http_client import BrokenOffError, HttpClient, Response, encode_json
from m2forge.key import check_key, make_key
from m2forge.loop_thread import LoopThread
from m2forge.pipelines.config import EndpointConfig
from m2forge.pipelines.stage import Completion, Context, Messages
from m2forge.pipelines.store import Store
from m2forge.records import JsonValue

T = TypeVar("T")
RETRIED = frozenset({408, 409, 429})
"""Statuses below 500 after which a request is retried."""
MAX_DELAY_S = 60.0
MAX_RESPONSE_BYTES = 64 << 20
MAX_FAILED = 10
MAX_SHOWN = 300
MAX_OPENINGS = 100
"""Opening brackets of a text at which JSON may begin."""

_log = logging.getLogger(__name__)


class EndpointError(EngineError):
    """No usable completion, after all retries."""

    def __init__(self, reason: str, text: str) -> None:
        """`reason`: the label under which reports count the failure."""
        super().__init__(reason, text)
        self.reason, self._text = reason, text

    def __str__(self) -> str:
        return self._text


@dataclass(slots=True)
class _Endpoint:
    config: EndpointConfig
    url: str
    client: HttpClient
    num_failed: int = 0
    """Requests in a row that failed after all retries."""


class Completions:
    """Thread-safe; requests run in the event loop of `loop`."""

    def __init__(
        self,
        models: Mapping[str, EndpointConfig],
        store: Store,
        loop: LoopThread,
        *,
        is_replay: bool = False,
        earlier: Sequence[Store] = (),
        served: Mapping[str, "Served"] | None = None,
    ) -> None:
        """`earlier`: stores of other runs, whose completions are copied on demand. `served`: servers of the models that
        have a folder."""
        self._earlier = tuple(earlier)
        self._models, self._store, self._loop, self._is_replay = models, store, loop, is_replay
        self._endpoints = (
            {} if is_replay else {name: _connect(name, config, served or {}) for name, config in models.items()}
        )
        self._guard, self._in_flight = threading.Lock(), dict[str, tuple[threading.Lock, int]]()
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End the delays before retries."""
        self._stopped.set()

    def close(self) -> None:
        async def close_clients() -> None:
            for endpoint in self._endpoints.values():
                endpoint.client.close()

        self._loop.run(close_clients())

    def ask(
        self,
        stage: str,
        model: str,
        messages: Messages,
        tools: Sequence[Mapping[str, JsonValue]],
        draw: int,
        sampling: Mapping[str, JsonValue],
    ) -> tuple[Completion, bool]:
        """The completion, and whether it was stored."""
        if model not in self._models:
            raise RunError(f"stage {stage} asks the model {model!r}; {suggest(model, self._models)}")
        config = self._models[model]
        body: dict[str, JsonValue] = {"model": config.model, "messages": messages, **_sampling(config), **sampling}
        if tools:
            body["tools"] = tools
        request = json.dumps({**body, "draw": draw}, sort_keys=True, separators=(",", ":"), allow_nan=False)
        key = hashlib.sha256(request.encode()).hexdigest()
        with self._only_one(key):
            if (stored := self._store.completion(key)) is not None:
                return stored, True
            for other in self._earlier:
                if (stored := other.completion(key)) is not None:
                    self._store.add_completion(key, stage, request, stored, 0, 0.0)
                    return stored, True
            if self._is_replay:
                raise RunError(
                    f"replay: stage {stage} asks {config.model} for a completion that is not stored (key {key[:16]}); "
                    "set replay = false to ask the endpoint"
                )
            started_s = time.perf_counter()
            completion, num_requests = self._request(self._endpoints[model], encode_json(body))
            seconds = time.perf_counter() - started_s
            self._store.add_completion(key, stage, request, completion, num_requests, seconds)
            return completion, False

    def remember(self, stage: str, key: JsonValue, text: str) -> str:
        """The first text stored for a key of a stage, in this run or an earlier one."""
        digest = hashlib.sha256(json.dumps([stage, key], sort_keys=True).encode()).hexdigest()
        for store in (self._store, *self._earlier):
            if stored := store.fact(f"text-{digest}", ""):
                text = str(json.loads(stored))
                break
        self._store.set_fact(f"text-{digest}", json.dumps(text))
        return text

    @contextmanager
    def _only_one(self, key: str) -> Iterator[None]:
        """Concurrent requests for the same completion share one HTTP request."""
        with self._guard:
            lock, num_users = self._in_flight.get(key, (threading.Lock(), 0))
            self._in_flight[key] = (lock, num_users + 1)
        try:
            with lock:
                yield
        finally:
            with self._guard:
                lock, num_users = self._in_flight.pop(key)
                if num_users > 1:
                    self._in_flight[key] = (lock, num_users - 1)

    def _request(self, endpoint: _Endpoint, body: bytes) -> tuple[Completion, int]:
        """The completion, and the number of requests that it took."""
        config = endpoint.config
        if endpoint.num_failed >= MAX_FAILED:
            raise EndpointError("endpoint down", f"{endpoint.url}: the last {MAX_FAILED} completions failed")
        reason, text = "", ""
        for number in range(config.max_retries + 1):
            if number and self._stopped.wait(min(MAX_DELAY_S, config.retry_s * 2 ** (number - 1))):
                break
            try:
                response = self._loop.run(_post(endpoint.client, body, config.timeout_s))
            except OSError as error:
                reason, text = "endpoint unreachable", f"{type(error).__name__}: {error}"
                continue
            if response.status >= 400:
                reason = f"status {response.status}"
                text = response.text[:MAX_SHOWN]
                if response.status < 500 and response.status not in RETRIED:
                    break
                continue
            try:
                completion = read_completion(response.content)
            except ValueError as error:
                reason, text = "no chat completion", str(error)
                continue
            endpoint.num_failed = 0
            return completion, number + 1
        raise self._failed(endpoint, reason, text)

    def _failed(self, endpoint: _Endpoint, reason: str, text: str) -> EndpointError:
        endpoint.num_failed += 1
        if endpoint.num_failed == MAX_FAILED:
            _log.error("%s: %d completions in a row failed; the items that need it fail", endpoint.url, MAX_FAILED)
        return EndpointError(reason, f"{endpoint.url}: {reason}: {text}")


def _connect(name: str, config: EndpointConfig, served: Mapping[str, "Served"]) -> _Endpoint:
    if config.url is None:
        return _Endpoint(config, served[name].url, HttpClient(served[name].url, key=served[name].key))
    key = None
    if config.key_env is not None:
        if config.key_env not in os.environ:
            raise ConfigError(f"models.{name}.key_env: the environment variable {config.key_env} is not set")
        key = check_key(os.environ[config.key_env].strip(), config.key_env)
    return _Endpoint(config, config.url, HttpClient(config.url, key=key))


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    key: str = field(repr=False)


@contextmanager
def serve_folder(name: str, config: EndpointConfig, log_folder: Path) -> Iterator[Served]:
    """Serve a model in a child process, which also ends with this thread. Raises with the last line of its log if it
    cannot be served."""
    assert config.folder is not None
    key, log_path = make_key(), log_folder / f"{name}.log"
    options = [word for setting in config.serve for word in ("--set", setting)]
    command = ("serve", config.folder, "--port", "0", "--key-file", "/dev/stdin", *options)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "m2forge.cluster.local", str(os.getpid()), "m2forge", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(f"{key}\n".encode())
        process.stdin.close()
        announced = process.stdout.readline().decode(errors="replace").rpartition(" on ")[2].strip()
        if not announced.startswith("http"):
            process.wait()
            lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
            raise ConfigError(f"models.{name}.folder: {lines[-1] if lines else 'it could not be served'}")
        yield Served(f"{announced}/v1", key)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _sampling(config: EndpointConfig) -> dict[str, JsonValue]:
    options = {"temperature": config.temperature, "top_p": config.top_p, "max_tokens": config.max_tokens}
    return {name: value for name, value in options.items() if value is not None}


async def _post(client: HttpClient, body: bytes, timeout_s: float) -> Response:
    async with asyncio.timeout(timeout_s):
        connection = await client.connect()
        try:
            client.send(connection, "POST", "/chat/completions", body)
            status, parts, size = await connection.receive_status(), [], 0
            while part := await connection.read():
                parts.append(part)
                size += len(part)
                if size > MAX_RESPONSE_BYTES:
                    raise BrokenOffError(f"a response of more than {MAX_RESPONSE_BYTES >> 20} MiB")
            return Response(status, b"".join(parts))
        finally:
            client.release(connection)


def read_completion(content: bytes) -> Completion:
    """Raises ValueError unless it is a chat completion."""
    try:
        data = json.loads(content, parse_constant=_refuse_constant)
        choice = data["choices"][0]
        message, usage = choice["message"], data.get("usage") or {}
        text, calls = message.get("content"), message.get("tool_calls")
        if not (isinstance(text, str) or (text is None and isinstance(calls, list) and calls)):
            raise ValueError("a message without content and tool calls")
        return Completion(
            message={"role": "assistant", **message},
            finish_reason=str(choice.get("finish_reason") or "stop"),
            num_prompt=_read_count(usage.get("prompt_tokens")),
            num_sampled=_read_count(usage.get("completion_tokens")),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        shown = content[:MAX_SHOWN].decode(errors="replace")
        raise ValueError(f"{type(error).__name__}: {error}; received {shown!r}") from error


def _read_count(value: JsonValue) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or not 0 <= value < 1 << 53:
        raise ValueError(f"expected a number of tokens, received {str(value)[:40]}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def ask_json(
    context: Context,
    model: str,
    messages: Messages,
    read: Callable[[JsonValue], T],
    *,
    draw: int = 0,
    max_draws: int = 3,
) -> T:
    """The JSON in a model's response, through `read`, which raises ValueError for an unusable one: then the next draw
    is requested; after `max_draws` draws the item fails."""
    problem = ""
    for number in range(max_draws):
        content = context.ask(model, messages, draw=draw * max_draws + number).content
        try:
            return read(find_json(content))
        except (ValueError, RecursionError) as error:
            problem = f"{error}; received {content[:MAX_SHOWN]!r}"
    raise EndpointError("unusable response", f"{model}: no usable response in {max_draws} draws: {problem}")


def find_json(content: str) -> JsonValue:
    """The first JSON object or array in a text, also among words or in a code block."""
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    for opening in itertools.islice(re.finditer(r"[{\[]", content), MAX_OPENINGS):
        try:
            found: JsonValue = decoder.raw_decode(content, opening.start())[0]
        except ValueError:
            continue
        return found
    raise ValueError("no JSON object or array")


_TEMPORARY = "|".join(dict.fromkeys(("/tmp", re.escape(tempfile.gettempdir()))))
_UNSTABLE = (
    (r"\b0x[0-9a-fA-F]{6,}", "0x…"),
    (r"\b\d+\.\d+ ?s(?:econds)?\b", "… s"),
    (rf"(?:{_TEMPORARY})/[\w.-]+", "/tmp/…"),
)


def stable(text: str) -> str:
    """The text without run-specific parts, so that stored completions of another run match."""
    for pattern, shown in _UNSTABLE:
        text = re.sub(pattern, shown, text)
    return text
