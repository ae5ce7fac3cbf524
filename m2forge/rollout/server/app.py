"""The HTTP server of an engine of any kind; it loads no torch (model_server.py serves a model folder).

`Guard`, an ASGI layer around the whole application, controls access:

    421   the Host header names another machine: a site that points its own name here (DNS rebinding)
    403   the Origin header is that of another site
    401   without the key (`Authorization: Bearer KEY`), on every route, `/health` and unknown ones included
    415   a body whose content type is not application/json, which browsers send to other sites without asking first

The body of a rejected request stays unread, so its connection is closed. The routes:

    POST /generate   a prompt in (see `wire`), its chunks out: one line of JSON each, as server-sent events if the
                     client accepts those, or {"samples": [...]} at the end if it asks for "stream": false
    POST /weights    {"folder", "version": {"lineage", "step", "branch"}}: load the weights of a folder of this machine
    GET  /health     the version and the number of running requests; 503 once the engine has failed, until `serve` ends
    GET  /metrics    counters, in the text format of Prometheus

A prompt that cannot be served gets 400 before streaming begins, a failed engine 503. If the client disconnects, its
request is aborted.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from m2forge.errors import EngineError, M2ForgeError, RequestError
from m2forge.listener import LOOPBACK, address, find_loop, host_name, listen
from m2forge.observe.prometheus import TEXT_TYPE, Metric, counter, gauge, labels, metrics_text, summary
from m2forge.protocols import Chunk, Engine, EngineState
from m2forge.records import JsonValue
from m2forge.rollout.config import ServerConfig
from m2forge.rollout.engine import merge_chunks
from m2forge.rollout.server import wire

PREFIX = "m2forge_rollout_"


class Outcome(StrEnum):
    """How a request ended."""

    ANSWERED = "answered"
    REFUSED = "refused"
    HUNG_UP = "hung_up"
    FAILED = "failed"


class ServerCounts:
    def __init__(self) -> None:
        self._num_requests = Counter(dict.fromkeys(Outcome, 0))
        self._num_sampled_tokens = 0
        self._num_first_chunks, self._first_chunk_s = 0, 0.0

    def note_request(self, outcome: Outcome) -> None:
        self._num_requests[outcome] += 1

    def note_chunk(self, chunk: Chunk) -> None:
        self._num_sampled_tokens += chunk.ids.size

    def note_first_chunk(self, duration_s: float) -> None:
        self._num_first_chunks += 1
        self._first_chunk_s += duration_s

    def to_text(self, state: EngineState, engine_metrics: Mapping[str, float]) -> str:
        by_outcome = {labels(outcome=outcome): number for outcome, number in self._num_requests.items()}
        metrics = [
            Metric("requests_total", "counter", "Requests by outcome.", by_outcome),
            counter("sampled_tokens_total", "Tokens sent.", self._num_sampled_tokens),
            summary(
                "first_chunk_seconds",
                "Time from a request until its first chunk.",
                total=self._first_chunk_s,
                count=self._num_first_chunks,
            ),
            gauge("running", "Running completions.", state.num_running),
            gauge("waiting", "Queued completions.", state.num_waiting),
            gauge("policy_step", "Step of the policy version that samples.", state.version.step),
        ]
        for name, value in sorted(engine_metrics.items()):
            # An engine's counters are "total_…" in its metrics and "…_total" in Prometheus.
            counted = name.removeprefix("total_")
            if counted == name:
                metrics.append(gauge(f"engine_{name}", "A gauge of the engine.", value))
            else:
                metrics.append(counter(f"engine_{counted}_total", "A counter of the engine.", value))
        return metrics_text(metrics, prefix=PREFIX)


ANY_ADDRESS = ("0.0.0.0", "::", "")
JSON_TYPE = "application/json"


ErrorBody: TypeAlias = Callable[[int, str], Mapping[str, JsonValue]]
ReadKey: TypeAlias = Callable[[Mapping[bytes, bytes]], str]


def error_body(status: int, message: str) -> dict[str, JsonValue]:
    return {"error": {"type": "HTTPException", "message": message}}


def read_bearer(headers: Mapping[bytes, bytes]) -> str:
    """The key of `Authorization: Bearer KEY`; empty if there is none."""
    scheme, _, sent = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return sent.strip() if scheme.lower() == "bearer" else ""


class Guard:
    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        key: str,
        error_body: ErrorBody = error_body,
        read_key: ReadKey = read_bearer,
    ) -> None:
        """`error_body`: makes the body of a rejection from its status and message. `read_key`: finds the key that a
        request sends in its headers."""
        self._app, self._expected = app, key.encode()
        self._error_body, self._read_key = error_body, read_key
        self._hosts = {_configured_name(entry) for entry in (*LOOPBACK, config.host, *config.hosts)} - {""}
        self._accepts_addresses = config.host in ANY_ADDRESS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        rejection = self._rejection(scope)
        if rejection is None:
            await self._app(scope, receive, send)
            return
        status, message = rejection
        await JSONResponse(self._error_body(status, message), status, headers={"connection": "close"})(
            scope, receive, send
        )

    def _rejection(self, scope: Scope) -> tuple[int, str] | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if not self._names_this_server(host_name(host)):
            return 421, f"the Host header names {host[:200]!r}, not this server; add the name to server.hosts"
        if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
            return 403, f"the Origin header names {origin[:200]!r}; other sites may not use this server"
        # Constant-time comparison.
        sent = self._read_key(dict(scope["headers"]))
        if not hmac.compare_digest(sent.encode("latin-1"), self._expected):
            return 401, "the API key is missing or wrong; send Authorization: Bearer KEY"
        content_type = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and content_type != JSON_TYPE:
            return 415, f"the content type is {content_type[:200]!r}; send JSON as {JSON_TYPE}"
        return None

    def _names_this_server(self, name: str) -> bool:
        return name in self._hosts or (self._accepts_addresses and _is_address(name))


def _configured_name(entry: str) -> str:
    """The name of a configured host in the form that `host_name` gives for a request: without a port, which a proxy may
    change."""
    return entry.lower() if _is_address(entry) else host_name(entry)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


T = TypeVar("T")

SWITCH_S = 0.0005
"""How long a thread that computes keeps the interpreter from one that waits for it: the engine's thread computes
always, and every request and send waits for it several times."""
MOST_CHUNKS_PER_S = 4000.0
"""Chunks a second of all responses together: each send takes the interpreter from the engine's thread. With more open
responses one sends the tokens of several steps at once."""
EVENT_STREAM, LINES = "text/event-stream", "application/x-ndjson"
CLIENT_CLOSED_REQUEST = 499
"""Logged status of a response to a client that has disconnected."""
GRACE_S = 5
"""Time that requests in flight get to finish after the server is asked to stop."""

_log = logging.getLogger(__name__)


@runtime_checkable
class Measured(Protocol):
    """An engine with its own metrics."""

    async def metrics(self) -> dict[str, float]: ...


class ClientDisconnected(Exception):
    """The client has disconnected."""


def make_app(engine: Engine, config: ServerConfig, key: str) -> Guard:
    """The application, for clients that send `key`. The caller closes the engine."""
    service = _Service(engine, config)
    app = Starlette(
        routes=[
            Route("/generate", service.generate, methods=["POST"]),
            Route("/weights", service.load_weights, methods=["POST"]),
            Route("/health", service.show_health),
            Route("/metrics", service.show_metrics),
        ],
        exception_handlers={M2ForgeError: _on_error, HTTPException: _on_http_error, ClientDisconnected: _on_disconnect},
    )
    return Guard(app, config, key)


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket at the configured address."""
    return listen(config.host, config.port, backlog=1024)


def make_server(app: ASGIApp) -> uvicorn.Server:
    """Run it with `serve(sockets=[listener])`."""
    return uvicorn.Server(
        uvicorn.Config(
            app, ws="none", lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=GRACE_S
        )
    )


class _Service:
    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self._engine, self._config, self._counts = engine, config, ServerCounts()
        self._num_streams = 0

    async def generate(self, request: Request) -> Response:
        started_s = time.monotonic()
        try:
            body = wire.read_body(wire.PromptBody, await self._read(request))
            if body.num_samples > self._config.max_samples:
                expected = f"expected at most {self._config.max_samples}"
                raise RequestError(f"num_samples: {expected}, received {body.num_samples}")
            chunks = self._engine.generate(body.prompt())
            if not body.stream:
                return JSONResponse(
                    await _unless_disconnected(request, self._answer(chunks, body.num_samples, started_s))
                )
            # Wait for the first chunk: once the stream has begun, an error can no longer set the status.
            first = await _unless_disconnected(request, anext(chunks))
        except Exception as error:
            self._note_failure(error)
            raise
        self._counts.note_first_chunk(time.monotonic() - started_s)
        events = EVENT_STREAM in request.headers.get("accept", "")
        media_type = EVENT_STREAM if events else LINES
        return StreamingResponse(
            self._stream(first, chunks, "data: {}\n\n" if events else "{}\n"), media_type=media_type
        )

    async def load_weights(self, request: Request) -> Response:
        body = wire.read_body(wire.WeightsBody, await self._read(request))
        version = body.version.version()
        await self._engine.load(Path(body.folder), version)
        _log.info("loaded the weights of %s as policy version %s, step %d", body.folder, version.lineage, version.step)
        return JSONResponse({"version": version.to_dict()})

    async def show_health(self, request: Request) -> Response:
        state = await self._engine.state()
        version = state.version.to_dict()
        return JSONResponse({"version": version, "num_running": state.num_running, "num_waiting": state.num_waiting})

    async def show_metrics(self, request: Request) -> Response:
        figures = await self._engine.metrics() if isinstance(self._engine, Measured) else {}
        return Response(self._counts.to_text(await self._engine.state(), figures), media_type=TEXT_TYPE)

    async def _stream(self, first: Chunk, chunks: AsyncGenerator[Chunk, None], line: str) -> AsyncIterator[str]:
        outcome = Outcome.HUNG_UP
        self._num_streams += 1
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in _after(first, chunks):
                    self._counts.note_chunk(chunk)
                    yield line.format(json.dumps(wire.write_chunk(chunk)))
                    if chunk.finish_reason is None:
                        # The engine merges what it samples meanwhile.
                        await asyncio.sleep(self._num_streams / MOST_CHUNKS_PER_S)
            outcome = Outcome.ANSWERED
        except M2ForgeError as error:
            outcome = Outcome.FAILED
            yield line.format(json.dumps(wire.write_error(error)))
        finally:
            self._num_streams -= 1
            self._counts.note_request(outcome)

    async def _answer(
        self, chunks: AsyncGenerator[Chunk, None], num_samples: int, started_s: float
    ) -> dict[str, JsonValue]:
        samples: list[list[Chunk]] = [[] for _ in range(num_samples)]
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                if not any(samples):
                    self._counts.note_first_chunk(time.monotonic() - started_s)
                self._counts.note_chunk(chunk)
                samples[chunk.sample].append(chunk)
        self._counts.note_request(Outcome.ANSWERED)
        return {"samples": [wire.write_chunk(merge_chunks(found)) for found in samples]}

    async def _read(self, request: Request) -> bytes:
        """Reads the body, up to `max_body_bytes`."""
        body = bytearray()
        try:
            async for piece in request.stream():
                body += piece
                if len(body) > self._config.max_body_bytes:
                    raise HTTPException(413, f"the body exceeds {self._config.max_body_bytes} bytes; send less")
        except ClientDisconnect as error:
            raise ClientDisconnected from error
        return bytes(body)

    def _note_failure(self, error: Exception) -> None:
        if isinstance(error, ClientDisconnected):
            self._counts.note_request(Outcome.HUNG_UP)
        else:
            refused = isinstance(error, M2ForgeError | HTTPException) and not isinstance(error, EngineError)
            self._counts.note_request(Outcome.REFUSED if refused else Outcome.FAILED)


async def _after(first: Chunk, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    yield first
    async for chunk in chunks:
        yield chunk


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait((working, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, disconnected):
            task.cancel()
        await asyncio.gather(working, disconnected, return_exceptions=True)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, M2ForgeError)
    return JSONResponse(wire.write_error(error), 503 if isinstance(error, EngineError) else 400)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = {"error": {"type": "HTTPException", "message": error.detail}}
    return JSONResponse(body, error.status_code, headers=error.headers)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def serve_engine(
    engine: Engine,
    watch: Callable[[], Coroutine[Any, Any, None]],
    open_app: Callable[[], AbstractAsyncContextManager[ASGIApp]],
    listener: socket.socket,
    announce: Callable[[str], None],
) -> None:
    """Serve an application over `engine`, which is closed at the end; calls `announce` with the address once the server
    listens. The application is opened in the server's event loop. `watch`: raises the error of a failed engine, which
    ends the server."""

    async def run() -> None:
        announce(address(listener))
        watching = asyncio.create_task(watch())
        try:
            async with open_app() as app:
                server = make_server(app)

                def stop(task: asyncio.Task[None]) -> None:
                    server.should_exit = True

                watching.add_done_callback(stop)
                await server.serve(sockets=[listener])
            if watching.done():
                watching.result()
        finally:
            watching.cancel()
            await engine.close()

    sys.setswitchinterval(SWITCH_S)
    with asyncio.Runner(loop_factory=find_loop()) as runner:
        runner.run(run())
