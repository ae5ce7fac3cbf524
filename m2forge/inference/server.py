"""The model server behind `m2forge serve`: the rollout routes and the vendors' APIs, over one native engine.

    POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens
    GET  /v1/models, /v1/models/NAME
    POST /generate, /weights, GET /health, /metrics          token ids in and out: rollout/server/app.py

Every route requires the server's key, as `Authorization: Bearer KEY` or, under /v1, as `x-api-key: KEY`. The routes
under /v1 are the gateway's, whose dialects read requests and write responses, streams and errors. Unlike the gateway,
the server keeps nothing: each request is a conversation of its own, rendered and tokenized whole, and dropped once it
is answered. The prefix cache makes a repeated history cheap.

A model without a tokenizer is served to the rollout routes alone, and a warning says so.
"""

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from m2forge.errors import FormatError, M2ForgeError
from m2forge.gateway.app import GatewayApp
from m2forge.gateway.config import Budget, GatewayConfig
from m2forge.gateway.dialects.anthropic.messages import MESSAGES
from m2forge.gateway.dialects.openai.chat import CHAT
from m2forge.gateway.episodes.episode import Episode
from m2forge.gateway.episodes.journal import Created
from m2forge.gateway.episodes.registry import Episodes
from m2forge.gateway.http.limits import read_key
from m2forge.inference.config import ModelServerConfig
from m2forge.inference.model import context_of, find_format
from m2forge.model.hub import find_model
from m2forge.protocols import Engine
from m2forge.rollout.config import ServerConfig
from m2forge.rollout.engine import NativeEngine
from m2forge.rollout.server.app import Guard, bind, make_app, serve_engine
from m2forge.rollout.server.model_server import make_core, spare_collector
from m2forge.text.format import ChatFormat

VENDOR_PREFIX = "/v1/"
"""Paths of the vendors' APIs."""

_log = logging.getLogger(__name__)


def serve(
    model: str, config: ModelServerConfig, key: str, announce: Callable[[str], None], revision: str | None = None
) -> None:
    """Serve a model folder, a GGUF file or a hub model to clients that send `key`, until the process is asked to stop.
    Calls `announce` with the address once the server listens. Raises the `EngineError` of a failed engine."""
    # Bind before loading the weights, so that an address in use fails at once.
    with bind(config.server) as listener:
        path, name = find_model(model, revision), Path(model).absolute().name
        core = make_core(path, config, name)
        format = _find_format(path, config)
        engine = NativeEngine(core)
        spare_collector()
        names = config.models or (name,)
        context, vocab_size = context_of(core), core.model.config.vocab_size
        open_app = partial(open_server_app, engine, format, config, key, names, context, vocab_size)
        serve_engine(engine, engine.watch, open_app, listener, announce)


@contextlib.asynccontextmanager
async def open_server_app(
    engine: Engine,
    format: ChatFormat | None,
    config: ModelServerConfig,
    key: str,
    models: tuple[str, ...],
    context: int,
    vocab_size: int,
) -> AsyncIterator[ASGIApp]:
    """The application of a model server. `format`: None serves the rollout routes alone. `models`: names that
    /v1/models lists. `context`: maximum tokens of prompt plus completion. The caller closes the engine."""
    server = config.server
    rollout = make_app(engine, server, key)
    if format is None:
        yield _Routes(rollout, _refuse_vendors, server, key)
        return
    gateway_config = GatewayConfig(models=models, max_body_bytes=server.max_body_bytes, max_samples=server.max_samples)
    conversations = _Conversations(format, vocab_size)
    gateway = GatewayApp(engine, format, gateway_config, conversations, context=context)
    try:
        yield _Routes(rollout, gateway, server, key)
    finally:
        gateway.calls.abort_all()
        await gateway.calls.close()


class _Routes:
    """An ASGI application: the vendors' paths go to one application, all others to another. A key for the vendors'
    paths is taken, and a wrong one refused, as the vendor's clients expect."""

    def __init__(self, rollout: ASGIApp, vendors: ASGIApp, server: ServerConfig, key: str) -> None:
        self._rollout = rollout
        self._openai, self._anthropic = (
            Guard(vendors, server, key, dialect.error, read_key) for dialect in (CHAT, MESSAGES)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        app = self._anthropic if path.startswith(MESSAGES.path) else self._openai
        await (app if path.startswith(VENDOR_PREFIX) else self._rollout)(scope, receive, send)


class _Conversations(Episodes):
    """Gives each request an episode of its own, which nothing refers to after the response. `Guard` checks the key."""

    def __init__(self, format: ChatFormat, vocab_size: int) -> None:
        super().__init__(format)
        self._make = partial(Episode, format=format, vocab_size=vocab_size)

    def find(self, key: str) -> Episode:
        return self._make(Created("serve", "", "", "", time.time(), Budget()))


async def _refuse_vendors(scope: Scope, receive: Receive, send: Send) -> None:
    message = "this model has no tokenizer that can be used, so the server takes token ids alone, at /generate"
    await JSONResponse(CHAT.error(404, message), 404)(scope, receive, send)


def _find_format(model: Path, config: ModelServerConfig) -> ChatFormat | None:
    try:
        return find_format(model, config.format, config.prefix_rewrites)
    except FormatError:
        raise
    except M2ForgeError as error:
        _log.warning("%s is off, /generate takes token ids: %s", VENDOR_PREFIX, error)
        return None
