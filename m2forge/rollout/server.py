"""HTTP server of an engine.

    POST /generate   a prompt in (see `wire`), its chunks out: one line of JSON each, as server-sent events if the
                     client accepts those, or {"samples": [...]} at the end if it asks for "stream": false
    POST /weights    {"folder", "version": {"lineage", "step", "branch"}}: load the weights of a folder of this machine
    GET  /health     the version and the number of running requests; 503 once the engine has failed, until `serve` ends
    GET  /metrics    counters, in the text format of Prometheus

Every route requires the server's key and passes the other checks of `guard`. A prompt that cannot be served gets 400
before streaming begins, a failed engine 503. If the client disconnects, its request is aborted.
"""

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from m2forge.errors import EngineError, M2ForgeError, RequestError
from m2forge.listener import listen
from m2forge.observe.prometheus import TEXT_TYPE
from m2forge.protocols import Chunk, Engine
from m2forge.records import JsonValue
from m2forge.rollout import wire
from m2forge.rollout.counts import Outcome, ServerCounts
from m2forge.rollout.guard import Guard
from m2forge.rollout.merge import merge_chunks
from m2forge.rollout.server_config import ServerConfig

T = TypeVar("T")

EVENT_STREAM, LINES = "text/event-stream", "application/x-ndjson"
CLIENT_GONE = 499
"""Logged status of a response to a client that has disconnected."""
GRACE_S = 5
"""Time that requests in flight get to finish after the server is asked to stop."""

_log = logging.getLogger(__name__)


@runtime_checkable
class Measured(Protocol):
    """An engine with its own metrics."""

    async def metrics(self) -> dict[str, float]: ...


class HungUp(Exception):
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
        exception_handlers={M2ForgeError: _on_error, HTTPException: _on_http_error, HungUp: _on_hung_up},
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

    async def generate(self, request: Request) -> Response:
        started_s = time.monotonic()
        try:
            body = wire.read_body(wire.PromptBody, await self._read(request))
            if body.num_samples > self._config.max_samples:
                expected = f"expected at most {self._config.max_samples}"
                raise RequestError(f"num_samples: {expected}, received {body.num_samples}")
            chunks = self._engine.generate(body.prompt())
            if not body.stream:
                return JSONResponse(await _unless_gone(request, self._answer(chunks, body.num_samples, started_s)))
            # Wait for the first chunk: once the stream has begun, an error can no longer set the status.
            first = await _unless_gone(request, anext(chunks))
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
        _log.info("the weights of %s sample as %s, step %d", body.folder, version.lineage, version.step)
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
        try:
            async with contextlib.aclosing(chunks):
                self._counts.note_chunk(first)
                yield line.format(json.dumps(wire.write_chunk(first)))
                async for chunk in chunks:
                    self._counts.note_chunk(chunk)
                    yield line.format(json.dumps(wire.write_chunk(chunk)))
            outcome = Outcome.ANSWERED
        except M2ForgeError as error:
            outcome = Outcome.FAILED
            yield line.format(json.dumps(wire.write_error(error)))
        finally:
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
            raise HungUp from error
        return bytes(body)

    def _note_failure(self, error: Exception) -> None:
        if isinstance(error, HungUp):
            self._counts.note_request(Outcome.HUNG_UP)
        else:
            refused = isinstance(error, M2ForgeError | HTTPException) and not isinstance(error, EngineError)
            self._counts.note_request(Outcome.REFUSED if refused else Outcome.FAILED)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects."""

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HungUp
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, M2ForgeError)
    return JSONResponse(wire.write_error(error), 503 if isinstance(error, EngineError) else 400)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = {"error": {"type": "HTTPException", "message": error.detail}}
    return JSONResponse(body, error.status_code, headers=error.headers)


async def _on_hung_up(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)
