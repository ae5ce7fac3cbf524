"""The gateway as an ASGI application: authenticates requests, routes them and answers errors in the vendor's format.

    POST /v1/chat/completions, /v1/responses, /v1/completions, /v1/messages, /v1/messages/count_tokens
    GET  /v1/models, /v1/models/NAME          with the key of an episode (`Authorization: Bearer KEY` or `x-api-key`)
    GET  /v1/tools, POST /v1/tools/call       with the same key; see `EpisodeTools`
    POST /v1/mcp                              the same tools as an MCP server, with the same key
    /episodes…                                with the admin key; see `admin`
    GET  /health, /metrics                    without a key on loopback, else with the admin key

An episode's key gives access to that episode only. A vendor's routes use that vendor's error bodies, all others use
OpenAI's. Request text is logged only if the configuration allows it.

The MCP server, over streamable HTTP, lets unmodified agents call an episode's tools. A request is one JSON-RPC message.
The server is stateless: it opens no session and sends nothing by itself, so every request is answered with one JSON
object, and a notification with 202. GET, by which a client would open a stream of the server's messages, is refused
with 405, as the protocol provides.

    initialize     the protocol version that the client asks for, if it is known here; else the newest known
    tools/list     the tools as the task's family describes them
    tools/call     the tool's result as text; `isError` where it is an error line or the episode's limits are spent
    ping           an empty result
"""

# Reading path: chat. A chat completion until it is in the pool.
# The files that run, in reading order; dev/paths.py compares this list with a trace:
#     gateway/http/connection.py        the socket: HTTP, and limits on connections
#     gateway/app.py                    routes and keys
#     gateway/http/limits.py            headers and body within limits; the response
#     gateway/episodes/registry.py      the episode of a key
#     gateway/calls/calls.py            the request, from body to response
#     gateway/calls/body.py             the body, off the event loop if it is large
#     gateway/dialects/openai/chat.py   OpenAI's JSON in and out
#     gateway/dialects/types.py         the neutral request and answer
#     text/message.py                   messages, tools, JSON values
#     gateway/episodes/episode.py       budget, retries, what is recorded
#     gateway/history/history.py        messages to recorded tokens
#     gateway/history/turn.py           one recorded message; the ids that follow it
#     text/minimax_m2.py                the chat format
#     text/tokenizer.py                 text to ids
#     gateway/calls/generation.py       sampling, shared by the request's connections
#     gateway/calls/sample.py           chunks to a completion
#     text/parser.py                    ids to thinking, content and tool calls
#     gateway/episodes/journal.py       the completion on disk, before the client has its end
#     gateway/metrics.py                counters
#     tree/token_tree.py                the episode's calls as a tree, as the loop fetches it
#     pool/stored.py                    a call as the pool stores it
#     pool/pool.py                      the pool, and its writer for asyncio
#     pool/dialect.py                   SQLite and PostgreSQL
#     pool/record.py                    an attempt's calls and outcome in one transaction

import asyncio
import hmac
import logging
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from m2forge.errors import EngineError, M2ForgeError
from m2forge.gateway import admin
from m2forge.gateway.calls.calls import Calls, Route
from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.dialects.anthropic import messages as anthropic
from m2forge.gateway.dialects.anthropic.messages import MESSAGES
from m2forge.gateway.dialects.openai import chat as openai
from m2forge.gateway.dialects.openai.chat import CHAT, MODELS_PATH
from m2forge.gateway.dialects.openai.completions import COMPLETIONS
from m2forge.gateway.dialects.openai.responses import RESPONSES
from m2forge.gateway.dialects.types import Dialect, Fields, notice_headers, refuse_value
from m2forge.gateway.episodes.episode import BudgetError, ClosedError, Episode
from m2forge.gateway.episodes.registry import Episodes, hash_key
from m2forge.gateway.http.connection import HTTP_ERROR, Owners
from m2forge.gateway.http.limits import (
    ClientDisconnected,
    Headers,
    HTTPError,
    Pairs,
    Receive,
    Scope,
    Send,
    code_of,
    error_headers,
    field_of,
    id_headers,
    parse_body,
    read_body,
    read_headers,
    read_key,
    respond,
    respond_bytes,
    status_of,
)
from m2forge.gateway.metrics import GatewayCounts
from m2forge.listener import LOOPBACK
from m2forge.observe.prometheus import TEXT_TYPE
from m2forge.protocols import Engine, EngineState, Replicated, ToolHost
from m2forge.records import JsonValue, Task
from m2forge.text.format import ChatFormat

_HEALTH_PATH, _METRICS_PATH = "/health", "/metrics"
_OPEN_PATHS = (_HEALTH_PATH, _METRICS_PATH)
"""Routes that need no key on loopback."""
_TOOLS_PATH = "/v1/tools"
_CALL_FIELDS = frozenset({"name", "arguments"})
_DIALECTS = (
    Route("chat", CHAT, "chatcmpl-", "call_"),
    Route("responses", RESPONSES, "resp_", "call_"),
    Route("completions", COMPLETIONS, "cmpl-", "call_"),
    Route("messages", MESSAGES, "msg_", "toolu_"),
)
_TIDY_S = 0.5
"""Maximum seconds of journal compaction per call of `tidy`, after which the gateway can check whether to stop."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Incoming:
    """One HTTP request."""

    scope: Scope
    headers: Headers
    name: str
    """The NAME or ID in its path; empty if its route has none."""
    receive: Receive
    send: Send


Handler: TypeAlias = Callable[[Incoming], Awaitable[None]]


class GatewayApp:
    def __init__(
        self,
        engine: Engine,
        format: ChatFormat,
        config: GatewayConfig,
        episodes: Episodes,
        *,
        context: int,
        admin_key: str | None = None,
        tool_host: ToolHost | None = None,
    ) -> None:
        self.episodes, self.counts = episodes, GatewayCounts()
        self.calls = Calls(engine, format, config, context, self.counts)
        self._engine, self._config = engine, config
        self._admin_hash = None if admin_key is None else hash_key(admin_key)
        self.owners = Owners(hash_key, self._admin_hash, episodes.is_key)
        self._admin = admin.Admin(episodes, self.counts, config.max_reward)
        self._tools = EpisodeTools(tool_host, config)
        self._started_s = int(time.time())
        self._asking: set[asyncio.Future[EngineState]] = set()
        """Health checks that wait for the engine."""
        self._routes = self._make_routes()

    def _make_routes(self) -> dict[str, dict[str, Handler]]:
        """The handler of each method of each route."""
        act, control = self._act, self._admin
        return {
            **{route.dialect.path: {"POST": partial(self._complete, route)} for route in _DIALECTS},
            MESSAGES.count_path: {"POST": self._count},
            MODELS_PATH: {"GET": self._list_models},
            f"{MODELS_PATH}/NAME": {"GET": self._list_models},
            _TOOLS_PATH: {"GET": self._list_tools},
            f"{_TOOLS_PATH}/call": {"POST": self._call_tool},
            MCP_PATH: {"POST": self._answer_mcp},
            _HEALTH_PATH: {"GET": self._health},
            _METRICS_PATH: {"GET": self._metrics},
            admin.PATH: {
                "POST": partial(act, lambda _, body: control.create(body), status=201),
                "DELETE": partial(act, lambda _, body: control.delete_all(body)),
            },
            f"{admin.PATH}/ID": {
                "GET": partial(act, lambda id, _: control.show(id), takes_body=False),
                "DELETE": partial(act, lambda id, _: control.delete(id), takes_body=False),
            },
            f"{admin.PATH}/ID/tree": {"GET": partial(act, lambda id, _: control.tree(id), takes_body=False)},
            f"{admin.PATH}/ID/reward": {"POST": partial(act, control.reward)},
            f"{admin.PATH}/ID/close": {"POST": partial(act, control.close)},
            f"{admin.PATH}/ID/take": {"POST": partial(act, control.take)},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self.calls.share.num_requests += 1
        try:
            if HTTP_ERROR in scope:
                raise scope[HTTP_ERROR]
            headers = read_headers(scope, self._config.max_header_bytes)
            path, name = _match(scope["path"])
            is_admin = path == admin.PATH or path.startswith(f"{admin.PATH}/")
            if is_admin or (path in _OPEN_PATHS and self._config.host not in LOOPBACK):
                self._require_admin(headers)
            handlers = self._routes.get(path, {})
            if not handlers:
                raise HTTPError(404, "there is no such route here")
            handle = handlers.get(scope["method"])
            if handle is None:
                methods = f"the route accepts only {' and '.join(handlers)}"
                raise HTTPError(405, methods, allowed=", ".join(handlers))
            await handle(Incoming(scope, headers, name, receive, send))
        except ClientDisconnected:
            pass
        except M2ForgeError as error:
            body = _dialect_of(scope).error(status_of(error), str(error), field_of(error), code_of(error))
            await respond(send, status_of(error), body, error_headers(error))
        except Exception as error:  # noqa: BLE001  (its body differs from the server's own 500)
            # Leaves out the error message, which may contain prompt text.
            _log.error("%s\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))
            await respond(send, 500, _dialect_of(scope).error(500, "the gateway failed; see its log"))
        finally:
            self.calls.share.num_requests -= 1

    def drain(self) -> None:
        """Refuse new requests, and health checks that wait: an engine that is starting may not respond for long."""
        self.calls.is_draining = True
        for asking in self._asking:
            asking.cancel()

    async def tidy(self) -> None:
        """Runs every second: closes expired episodes and compacts journals of closed ones."""
        num_expired = self.episodes.expire(self._config.expire_s)
        if num_expired:
            _log.warning("closed %d episodes that received no request for %g s", num_expired, self._config.expire_s)
        stop_s = time.monotonic() + _TIDY_S
        while time.monotonic() < stop_s and await self.episodes.compact_next():
            pass

    # -- authentication ------------------------------------------------------------------------------------------------

    def _episode(self, headers: Headers) -> Episode:
        key = read_key(headers)
        episode = self.episodes.find(key) if key else None
        if episode is None:
            raise HTTPError(401, "the key of an episode is needed: send it as Authorization: Bearer KEY, or x-api-key")
        return episode

    def _require_admin(self, headers: Headers) -> None:
        # Compares hashes in constant time, so that timing reveals neither content nor length of the key.
        sent = hash_key(read_key(headers))
        if self._admin_hash is None:
            raise HTTPError(403, "this gateway has no admin key, so it takes no admin requests; start it with one")
        if not hmac.compare_digest(sent, self._admin_hash):
            raise HTTPError(401, "the admin key is needed: send Authorization: Bearer KEY")

    # -- the routes of an episode's key --------------------------------------------------------------------------------

    async def _complete(self, route: Route, incoming: Incoming) -> None:
        headers = incoming.headers
        await self.calls.complete(route, self._episode(headers), headers, incoming.receive, incoming.send)

    async def _count(self, incoming: Incoming) -> None:
        episode = self._episode(incoming.headers)
        num_tokens, notices = await self.calls.count(MESSAGES.count_path, await self._read(incoming), episode)
        await respond(incoming.send, 200, MESSAGES.count(num_tokens), [*_request_id(), *notice_headers(notices)])

    async def _list_models(self, incoming: Incoming) -> None:
        self._episode(incoming.headers)
        name, names = incoming.name, self._config.models
        if name and name not in names:
            raise HTTPError(404, "there is no model of that name; GET /v1/models lists them")
        vendor = anthropic if _is_anthropic(incoming.scope) else openai
        body = vendor.model_body(name, self._started_s) if name else vendor.models_body(names, self._started_s)
        await respond(incoming.send, 200, body, _request_id())

    async def _list_tools(self, incoming: Incoming) -> None:
        await respond(incoming.send, 200, await self._tools.list(self._episode(incoming.headers)))

    async def _call_tool(self, incoming: Incoming) -> None:
        episode = self._episode(incoming.headers)
        await respond(incoming.send, 200, await self._tools.call(episode, await self._read(incoming)))

    async def _answer_mcp(self, incoming: Incoming) -> None:
        episode = self._episode(incoming.headers)
        message = self._tools.parse(await self._read(incoming))
        call = partial(self._tools.use, episode)
        answer = await answer_mcp(message, partial(self._tools.describe, episode), call)
        if answer is None:
            await respond_bytes(incoming.send, 202, b"", [])
        else:
            await respond(incoming.send, 200, answer)

    async def _read(self, incoming: Incoming) -> bytes:
        return await read_body(incoming.headers, incoming.receive, self._config)

    # -- other routes --------------------------------------------------------------------------------------------------

    async def _act(
        self,
        action: Callable[[str, Mapping[str, JsonValue]], dict[str, JsonValue] | bytes],
        incoming: Incoming,
        *,
        status: int = 200,
        takes_body: bool = True,
    ) -> None:
        """Answer an admin's request with what `action` returns for the episode's id and the body."""
        sent = await self._read(incoming) if takes_body else b""
        result = action(incoming.name, parse_body(sent, self._config.max_depth) if sent else {})
        if isinstance(result, bytes):
            await respond_bytes(incoming.send, status, result, [(b"content-type", b"application/octet-stream")])
        else:
            await respond(incoming.send, status, result)

    async def _health(self, incoming: Incoming) -> None:
        if self.calls.is_draining:
            raise EngineError("the gateway is stopping")
        asking = asyncio.ensure_future(self._engine.state())
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        try:
            state = await asking
        except asyncio.CancelledError:
            if not self.calls.is_draining:
                raise
            raise EngineError("the gateway is stopping") from None
        body: dict[str, JsonValue] = {
            "version": state.version.to_dict(),
            "num_episodes": len(self.episodes),
            "num_requests": self.calls.num_running,
            "num_running": state.num_running,
            "num_waiting": state.num_waiting,
        }
        await respond(incoming.send, 200, body)

    async def _metrics(self, incoming: Incoming) -> None:
        replicas = self._engine.replicas() if isinstance(self._engine, Replicated) else ()
        text = self.counts.to_text(len(self.episodes), self.calls.num_running, replicas)
        await respond_bytes(incoming.send, 200, text.encode(), [(b"content-type", TEXT_TYPE.encode())])


def _match(path: str) -> tuple[str, str]:
    """The route of a path, and the NAME or ID in it. A model's name may contain slashes."""
    if path.startswith(f"{MODELS_PATH}/"):
        name = path.removeprefix(f"{MODELS_PATH}/")
        return f"{MODELS_PATH}/NAME" if name else MODELS_PATH, name
    if path.startswith(f"{admin.PATH}/"):
        id, _, action = path.removeprefix(f"{admin.PATH}/").partition("/")
        return f"{admin.PATH}{'/ID' if id else ''}{f'/{action}' if action else ''}", id
    return path, ""


def _dialect_of(scope: Scope) -> Dialect:
    is_messages = scope["path"].startswith(MESSAGES.path)
    return MESSAGES if is_messages or (_is_models(scope) and _is_anthropic(scope)) else CHAT


def _is_models(scope: Scope) -> bool:
    path: str = scope["path"]
    return path == MODELS_PATH or path.startswith(f"{MODELS_PATH}/")


def _is_anthropic(scope: Scope) -> bool:
    """Both vendors have the route; only Anthropic's clients send this header."""
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def _request_id() -> Pairs:
    return id_headers(f"req_{secrets.token_hex(12)}")


# -- tools -------------------------------------------------------------------------------------------------------------


class EpisodeTools:
    """Serves the tools of an episode's task, with the episode's key.

        GET  /v1/tools                                       {"tools": [{"type": "function", "function": {…}}, …]}
        POST /v1/tools/call  {"name": "…", "arguments": …}   {"content": "…"}

    A `ToolHost` runs them on the complete task that the episode was created with; an agent sees neither. Each request
    waits out its tool's latency here, so the calls of one turn wait concurrently. Tool calls do not count as
    `max_calls` of the budget, but are refused beyond `max_tool_calls` per episode, after its time budget, and once it
    is closed.
    """

    def __init__(self, host: ToolHost | None, config: GatewayConfig) -> None:
        self._host, self._config = host, config

    async def list(self, episode: Episode) -> dict[str, JsonValue]:
        host, task = self._find(episode)
        return {"tools": [dict(tool) for tool in await host.tools(task)]}

    async def describe(self, episode: Episode) -> Sequence[Mapping[str, JsonValue]]:
        """The tools; none where the episode was made without a task."""
        return () if self._host is None or episode.task is None else await self._host.tools(episode.task)

    async def call(self, episode: Episode, body: bytes) -> dict[str, JsonValue]:
        self._find(episode)
        return {"content": await self.use(episode, *_read_call(self.parse(body)))}

    def parse(self, body: bytes) -> Mapping[str, JsonValue]:
        if len(body) > self._config.max_tool_bytes:
            raise HTTPError(413, f"the body exceeds max_tool_bytes ({self._config.max_tool_bytes}); send less")
        return parse_body(body, self._config.max_depth)

    async def use(self, episode: Episode, name: str, arguments: JsonValue) -> str:
        """The result of a tool call that the episode's limits allow."""
        host, task = self._find(episode)
        if episode.closed is not None:
            raise ClosedError(f"episode {episode.id} is closed; create another")
        if episode.seconds_left <= 0:
            raise BudgetError(f"episode {episode.id}: its time budget of {episode.budget.max_s} s is exhausted")
        if episode.num_tool_calls >= self._config.max_tool_calls:
            raise BudgetError(
                f"episode {episode.id}: its tool call budget of {self._config.max_tool_calls} is exhausted"
            )
        episode.num_tool_calls += 1
        try:
            return await host.call(task, name, arguments)
        except EngineError:
            episode.num_failed += 1
            raise

    def _find(self, episode: Episode) -> tuple[ToolHost, Task]:
        if self._host is None or episode.task is None:
            raise HTTPError(404, "the episode has no tools; it was made without a task")
        return self._host, episode.task


def _read_call(body: Mapping[str, JsonValue]) -> tuple[str, JsonValue]:
    fields = Fields(body, _CALL_FIELDS)
    name = fields.text("name")
    if not name:
        refuse_value("name", "the name of a tool", name)
    return name, fields.value("arguments")


MCP_PATH = "/v1/mcp"
MCP_VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Protocol versions whose messages are the same as far as they are used here, newest first."""
MCP_SERVER = {"name": "m2forge", "version": "1"}
INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR = -32600, -32601, -32602, -32603
ERROR_PREFIX = "error:"
"""Begins the result of a call that a tool could not serve."""

ListTools = Callable[[], Awaitable[Sequence[Mapping[str, JsonValue]]]]
"""Lists the episode's tools in OpenAI's function format."""
CallTool = Callable[[str, JsonValue], Awaitable[str]]


class RpcError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


async def answer_mcp(
    message: Mapping[str, JsonValue], list_tools: ListTools, call_tool: CallTool
) -> dict[str, JsonValue] | None:
    """The response to one message; None for a notification or a client's response, which have none."""
    id, method = message.get("id"), message.get("method")
    if "method" in message and "id" not in message:
        return None
    if "method" not in message and ("result" in message or "error" in message):
        return None
    try:
        if message.get("jsonrpc") != "2.0" or not isinstance(method, str) or not isinstance(id, str | int):
            raise RpcError(INVALID_REQUEST, "expected a JSON-RPC 2.0 request with id and method")
        params = message.get("params") or {}
        if not isinstance(params, Mapping):
            raise RpcError(INVALID_PARAMS, "params: expected an object")
        return {"jsonrpc": "2.0", "id": id, "result": await _serve_mcp(method, params, list_tools, call_tool)}
    except RpcError as error:
        known = id if isinstance(id, str | int) else None
        return {"jsonrpc": "2.0", "id": known, "error": {"code": error.code, "message": str(error)}}


async def _serve_mcp(
    method: str, params: Mapping[str, JsonValue], list_tools: ListTools, call_tool: CallTool
) -> dict[str, JsonValue]:
    match method:
        case "initialize":
            asked = params.get("protocolVersion")
            version = asked if isinstance(asked, str) and asked in MCP_VERSIONS else MCP_VERSIONS[0]
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": dict(MCP_SERVER)}
        case "ping":
            return {}
        case "tools/list":
            return {"tools": [_describe_tool(tool) for tool in await list_tools()]}
        case "tools/call":
            return await _call_tool(params, call_tool)
    raise RpcError(METHOD_NOT_FOUND, f"there is no method {method!r} here")


def _describe_tool(tool: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    function = tool["function"]
    assert isinstance(function, Mapping)
    schema = function.get("parameters")
    return {
        "name": function["name"],
        "description": function.get("description", ""),
        "inputSchema": {"type": "object", **(schema if isinstance(schema, Mapping) else {})},
    }


async def _call_tool(params: Mapping[str, JsonValue], call_tool: CallTool) -> dict[str, JsonValue]:
    name = params.get("name")
    if not isinstance(name, str) or not name:
        raise RpcError(INVALID_PARAMS, "name: expected the name of a tool")
    try:
        text = await call_tool(name, params.get("arguments") or {})
    except EngineError as error:
        raise RpcError(INTERNAL_ERROR, str(error)) from error
    except M2ForgeError as error:
        text = f"{ERROR_PREFIX} {error}"
    return {"content": [{"type": "text", "text": text}], "isError": text.startswith(ERROR_PREFIX)}
