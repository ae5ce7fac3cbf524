"""Serves the tools of an episode's task at the gateway's address, with the episode's key.

    GET  /v1/tools                                     {"tools": [{"type": "function", "function": {…}}, …]}
    POST /v1/tools/call  {"name": "…", "arguments": …}  {"content": "…"}

A `ToolHost` runs them on the whole task that the episode was created with; an agent sees neither. Each request waits
out its tool's latency here, so the calls of one turn wait concurrently. Tool calls do not count as `max_calls` of the
budget, but are refused beyond `max_tool_calls` per episode, after its time budget, and once it is closed.
"""

from collections.abc import Mapping

from m2forge.errors import EngineError
from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.episode import BudgetError, ClosedError, Episode
from m2forge.gateway.limits import Refusal, parse_body
from m2forge.gateway.reading import Fields, refuse_value
from m2forge.protocols import ToolHost
from m2forge.records import JsonValue, Task

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
