"""The tools of an episode's task as an MCP server over streamable HTTP, so that unmodified agents can call them.

    POST /v1/mcp      one JSON-RPC message, with the episode's key (`Authorization: Bearer KEY` or `x-api-key`)

The server is stateless: it opens no session and sends nothing by itself, so every request is answered with one JSON
object, and a notification with 202. GET, by which a client would open a stream of the server's messages, is refused
with 405, as the protocol provides.

    initialize     the protocol version that the client asks for, if it is known here; else the newest known
    tools/list     the tools as the task's family describes them
    tools/call     the tool's result as text; `isError` where it is an error line or the episode's limits are spent
    ping           an empty result
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from m2forge.errors import EngineError, M2ForgeError
from m2forge.records import JsonValue

PATH = "/v1/mcp"
VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Protocol versions whose messages are the same as far as they are used here, newest first."""
SERVER = {"name": "m2forge", "version": "1"}
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


async def answer(
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
        return {"jsonrpc": "2.0", "id": id, "result": await _serve(method, params, list_tools, call_tool)}
    except RpcError as error:
        known = id if isinstance(id, str | int) else None
        return {"jsonrpc": "2.0", "id": known, "error": {"code": error.code, "message": str(error)}}


async def _serve(
    method: str, params: Mapping[str, JsonValue], list_tools: ListTools, call_tool: CallTool
) -> dict[str, JsonValue]:
    match method:
        case "initialize":
            asked = params.get("protocolVersion")
            version = asked if isinstance(asked, str) and asked in VERSIONS else VERSIONS[0]
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": dict(SERVER)}
        case "ping":
            return {}
        case "tools/list":
            return {"tools": [_describe(tool) for tool in await list_tools()]}
        case "tools/call":
            return await _call(params, call_tool)
    raise RpcError(METHOD_NOT_FOUND, f"there is no method {method!r} here")


def _describe(tool: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    function = tool["function"]
    assert isinstance(function, Mapping)
    schema = function.get("parameters")
    return {
        "name": function["name"],
        "description": function.get("description", ""),
        "inputSchema": {"type": "object", **(schema if isinstance(schema, Mapping) else {})},
    }


async def _call(params: Mapping[str, JsonValue], call_tool: CallTool) -> dict[str, JsonValue]:
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
