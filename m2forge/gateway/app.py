"""The gateway as an ASGI application: authenticates requests, routes them and answers errors in the vendor's format.

    POST /v1/chat/completions, /v1/responses, /v1/completions, /v1/messages, /v1/messages/count_tokens
    GET  /v1/models, /v1/models/NAME          with the key of an episode (`Authorization: Bearer KEY` or `x-api-key`)
    GET  /v1/tools, POST /v1/tools/call       with the same key; see `tools`
    /episodes…                                with the admin key; see `admin`
    GET  /health, /metrics                    without a key

An episode's key gives access to that episode only. A vendor's routes use that vendor's error bodies, all others use
OpenAI's. Request text is logged only if the configuration allows it.

Serves the tools of an episode's task at the gateway's address, with the episode's key.

    GET  /v1/tools                                     {"tools": [{"type": "function", "function": {…}}, …]}
    POST /v1/tools/call  {"name": "…", "arguments": …}  {"content": "…"}

A `ToolHost` runs them on the whole task that the episode was created with; an agent sees neither. Each request waits
out its tool's latency here, so the calls of one turn wait concurrently. Tool calls do not count as `max_calls` of the
budget, but are refused beyond `max_tool_calls` per episode, after its time budget, and once it is closed.
"""

import hmac
import logging
import secrets
import time
import traceback
from collections.abc import Mapping

from m2forge.errors import EngineError, M2ForgeError
from m2forge.gateway import admin
from m2forge.gateway import app as tools
from m2forge.gateway.calls.calls import Calls, Route
from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.dialects.anthropic import messages as anthropic_models
from m2forge.gateway.dialects.openai import shared as openai_models
from m2forge.gateway.dialects.route import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from m2forge.gateway.dialects.types import Dialect, Fields, refuse_value
from m2forge.gateway.episodes.episode import BudgetError, ClosedError, Episode
from m2forge.gateway.episodes.registry import Episodes, hash_key
from m2forge.gateway.http.connection import REFUSAL, Owners
from m2forge.gateway.http.limits import (
    Gone,
    Headers,
    Pairs,
    Receive,
    Refusal,
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
from m2forge.observe.prometheus import TEXT_TYPE
from m2forge.protocols import Engine, ToolHost
from m2forge.records import JsonValue, Task
from m2forge.text.format import ChatFormat

PATH = "/v1/tools"
CALL_PATH = f"{PATH}/call"
_CALL_FIELDS = frozenset({"name", "arguments"})


class EpisodeTools:
    def __init__(self, host: ToolHost | None, config: GatewayConfig) -> None:
        self._host, self._config = host, config

    async def list(self, episode: Episode) -> dict[str, JsonValue]:
        host, task = self._find(episode)
        return {"tools": [dict(tool) for tool in await host.tools(task)]}

    async def call(self, episode: Episode, body: bytes) -> dict[str, JsonValue]:
        host, task = self._find(episode)
        if len(body) > self._config.max_tool_bytes:
            raise Refusal(413, f"the body exceeds max_tool_bytes ({self._config.max_tool_bytes}); send less")
        name, arguments = _read(parse_body(body, self._config.max_depth))
        if episode.closed is not None:
            raise ClosedError(f"episode {episode.id} is closed; make another")
        if episode.seconds_left <= 0:
            raise BudgetError(f"episode {episode.id}: its {episode.budget.max_s} seconds are over")
        if episode.num_tool_calls >= self._config.max_tool_calls:
            raise BudgetError(f"episode {episode.id}: its {self._config.max_tool_calls} calls of tools are spent")
        episode.num_tool_calls += 1
        try:
            return {"content": await host.call(task, name, arguments)}
        except EngineError:
            episode.num_failed += 1
            raise

    def _find(self, episode: Episode) -> tuple[ToolHost, Task]:
        if self._host is None or episode.task is None:
            raise Refusal(404, "the episode has no tools; it was made without a task")
        return self._host, episode.task


def _read(body: Mapping[str, JsonValue]) -> tuple[str, JsonValue]:
    fields = Fields(body, _CALL_FIELDS)
    name = fields.text("name")
    if not name:
        refuse_value("name", "the name of a tool", name)
    return name, fields.value("arguments")


_ROUTES = (
    Route("chat", CHAT, "chatcmpl-", "call_"),
    Route("responses", RESPONSES, "resp_", "call_"),
    Route("completions", COMPLETIONS, "cmpl-", "call_"),
    Route("messages", MESSAGES, "msg_", "toolu_"),
)
_TIDY_S = 0.5
"""Maximum seconds of journal compaction per call of `tidy`, after which the gateway can check whether to stop."""
_EPISODE_ACTIONS = ("reward", "close", "take")
"""Actions on an episode that an admin may POST."""

_log = logging.getLogger(__name__)


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
        self._tools = tools.EpisodeTools(tool_host, config)
        self._routes = {route.dialect.path: route for route in _ROUTES}
        self._started_s = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        self.calls.share.num_requests += 1
        try:
            if REFUSAL in scope:
                raise scope[REFUSAL]
            headers = read_headers(scope, self._config.max_header_bytes)
            route = self._routes.get(path)
            if route is not None:
                _require_method(scope, "POST")
                await self.calls.complete(route, self._episode(headers), headers, receive, send)
            else:
                await self._answer_other(scope, path, headers, receive, send)
        except Gone:
            pass
        except M2ForgeError as error:
            body = _dialect_of(scope).error(status_of(error), str(error), field_of(error), code_of(error))
            await respond(send, status_of(error), body, error_headers(error))
        except Exception as error:  # noqa: BLE001  (its body differs from the server's own 500)
            # Leaves out the error message, which may contain prompt text.
            _log.error("%s\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))
            await respond(send, 500, _dialect_of(scope).error(500, "the gateway failed; its log says where"))
        finally:
            self.calls.share.num_requests -= 1

    async def _answer_other(self, scope: Scope, path: str, headers: Headers, receive: Receive, send: Send) -> None:
        if path == MESSAGES.count_path:
            _require_method(scope, "POST")
            await respond(send, 200, await self._count(headers, receive), _request_id())
        elif _is_models(scope):
            _require_method(scope, "GET")
            self._episode(headers)
            await respond(send, 200, self._models(scope, path), _request_id())
        elif path == tools.PATH:
            _require_method(scope, "GET")
            await respond(send, 200, await self._tools.list(self._episode(headers)))
        elif path == tools.CALL_PATH:
            _require_method(scope, "POST")
            episode = self._episode(headers)
            await respond(send, 200, await self._tools.call(episode, await read_body(headers, receive, self._config)))
        elif path == admin.PATH or path.startswith(f"{admin.PATH}/"):
            status, body = await self._administer(scope, path, headers, receive)
            if isinstance(body, bytes):
                await respond_bytes(send, status, body, [(b"content-type", b"application/octet-stream")])
            else:
                await respond(send, status, body)
        elif path == "/health":
            _require_method(scope, "GET")
            await respond(send, 200, await self._health())
        elif path == "/metrics":
            _require_method(scope, "GET")
            text = self.counts.to_text(len(self.episodes), self.calls.num_running)
            await respond_bytes(send, 200, text.encode(), [(b"content-type", TEXT_TYPE.encode())])
        else:
            raise Refusal(404, "there is no such route here")

    async def tidy(self) -> None:
        """Runs every second: closes expired episodes and compacts journals of closed ones."""
        num_expired = self.episodes.expire(self._config.expire_s)
        if num_expired:
            _log.warning(
                "%d episodes were asked for nothing for %g s and are closed", num_expired, self._config.expire_s
            )
        stop_s = time.monotonic() + _TIDY_S
        while time.monotonic() < stop_s and await self.episodes.compact_next():
            pass

    # -- authentication ------------------------------------------------------------------------------------------------

    def _episode(self, headers: Headers) -> Episode:
        key = read_key(headers)
        episode = self.episodes.find(key) if key else None
        if episode is None:
            raise Refusal(401, "the key of an episode is needed: send it as Authorization: Bearer KEY, or x-api-key")
        return episode

    def _require_admin(self, headers: Headers) -> None:
        # Compares hashes in constant time, so that timing reveals neither content nor length of the key.
        sent = hash_key(read_key(headers))
        if self._admin_hash is None:
            raise Refusal(403, "this gateway has no admin key, so it takes no admin requests; start it with one")
        if not hmac.compare_digest(sent, self._admin_hash):
            raise Refusal(401, "the admin key is needed: send Authorization: Bearer KEY")

    # -- the smaller routes --------------------------------------------------------------------------------------------

    async def _administer(
        self, scope: Scope, path: str, headers: Headers, receive: Receive
    ) -> tuple[int, dict[str, JsonValue] | bytes]:
        self._require_admin(headers)
        id, _, action = path.removeprefix(admin.PATH).removeprefix("/").partition("/")
        if id and not action:
            _require_method(scope, "GET", "DELETE")
            return 200, self._admin.show(id) if scope["method"] == "GET" else self._admin.delete(id)
        if id and action == "tree":
            _require_method(scope, "GET")
            return 200, self._admin.tree(id)
        if action not in (_EPISODE_ACTIONS if id else ("",)):
            raise Refusal(404, "there is no such route here")
        _require_method(scope, *(("POST",) if id else ("POST", "DELETE")))
        sent = await read_body(headers, receive, self._config)
        body = parse_body(sent, self._config.max_depth) if sent else {}
        if not id:
            return (201, self._admin.create(body)) if scope["method"] == "POST" else (200, self._admin.delete_all(body))
        if action == "take":
            return 200, self._admin.take(id, body)
        return 200, self._admin.reward(id, body) if action == "reward" else self._admin.close(id, body)

    async def _count(self, headers: Headers, receive: Receive) -> dict[str, JsonValue]:
        episode = self._episode(headers)
        body = await read_body(headers, receive, self._config)
        return MESSAGES.count(await self.calls.count(MESSAGES.count_path, body, episode))

    def _models(self, scope: Scope, path: str) -> dict[str, JsonValue]:
        name = path.removeprefix(openai_models.PATH).removeprefix("/")
        if name and name not in self._config.models:
            raise Refusal(404, "there is no model of that name; GET /v1/models tells them")
        if _is_anthropic(scope):
            tell, tell_all = anthropic_models.model_body, anthropic_models.models_body
        else:
            tell, tell_all = openai_models.model_body, openai_models.models_body
        return tell(name, self._started_s) if name else tell_all(self._config.models, self._started_s)

    async def _health(self) -> dict[str, JsonValue]:
        if self.calls.is_draining:
            raise EngineError("the gateway is stopping")
        state = await self._engine.state()
        return {
            "version": state.version.to_dict(),
            "num_episodes": len(self.episodes),
            "num_requests": self.calls.num_running,
            "num_running": state.num_running,
            "num_waiting": state.num_waiting,
        }


def _require_method(scope: Scope, *methods: str) -> None:
    if scope["method"] not in methods:
        raise Refusal(405, f"the route takes {' and '.join(methods)} alone", allowed=", ".join(methods))


def _dialect_of(scope: Scope) -> Dialect:
    is_messages = scope["path"].startswith(MESSAGES.path)
    return MESSAGES if is_messages or (_is_models(scope) and _is_anthropic(scope)) else CHAT


def _is_models(scope: Scope) -> bool:
    path: str = scope["path"]
    return path == openai_models.PATH or path.startswith(f"{openai_models.PATH}/")


def _is_anthropic(scope: Scope) -> bool:
    """Both vendors have the route; only Anthropic's clients send this header."""
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def _request_id() -> Pairs:
    return id_headers(f"req_{secrets.token_hex(12)}")
