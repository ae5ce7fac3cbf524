"""The tools of an episode's task as an MCP server: the official client lists and calls them under the key."""

import asyncio

import httpx2
import pytest
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client

from m2forge.gateway.config import GatewayConfig
from m2forge.records import JsonValue
from tests.gateway.dialogue import minimax
from tests.gateway.live import Live, live
from tests.gateway.test_tools import Host, open_episode


def post(gateway: Live, key: str, message: JsonValue) -> httpx2.Response:
    headers = {"Authorization": f"Bearer {key}", "Accept": "application/json, text/event-stream"}
    return httpx2.post(f"{gateway.url}/v1/mcp", json=message, headers=headers, timeout=60)


def test_the_official_client_lists_and_calls_the_tools() -> None:
    async def scene(url: str, key: str) -> tuple[list[str], str, bool]:
        async with (
            httpx2.AsyncClient(headers={"Authorization": f"Bearer {key}"}, trust_env=False) as http,
            streamable_http_client(f"{url}/v1/mcp", http_client=http) as streams,
            ClientSession(*streams[:2]) as session,
        ):
            await session.initialize()
            tools = (await session.list_tools()).tools
            result = await session.call_tool("look", {"key": "3G"})
            return [tool.name for tool in tools], result.content[0].text, bool(result.is_error)  # type: ignore[union-attr]  # text

    with live(minimax(), tool_host=Host()) as gateway:
        found = asyncio.run(scene(gateway.url, open_episode(gateway)))
    assert found == (["look"], "look {'key': '3G'} True", False)


def test_what_is_no_request_or_no_tool_is_answered_as_such() -> None:
    with live(minimax(), config=GatewayConfig(port=0, max_tool_calls=1), tool_host=Host()) as gateway:
        key = open_episode(gateway)
        assert post(gateway, "m2f-wrong", {}).status_code == 401
        assert httpx2.get(f"{gateway.url}/v1/mcp", headers={"x-api-key": key}).status_code == 405
        note = post(gateway, key, {"jsonrpc": "2.0", "method": "notifications/initialized"})
        assert (note.status_code, note.content) == (202, b"")
        assert post(gateway, key, {"jsonrpc": "2.0", "id": 1, "method": "ping"}).json()["result"] == {}
        unknown: JsonValue = {"jsonrpc": "2.0", "id": "a", "method": "resources/list"}
        assert post(gateway, key, unknown).json()["error"]["code"] == -32601
        assert post(gateway, key, {"id": 1, "method": "ping"}).json()["error"]["code"] == -32600
        call: dict[str, JsonValue] = {"jsonrpc": "2.0", "id": 2, "method": "tools/call"}
        call["params"] = {"name": "look", "arguments": {}}
        assert post(gateway, key, call).json()["result"]["isError"] is False
        spent = post(gateway, key, call).json()["result"]
        assert spent["isError"] is True
        assert "its tool call budget of" in spent["content"][0]["text"]
        assert post(gateway, key, call | {"params": {}}).json()["error"]["code"] == -32602


@pytest.mark.parametrize(("asked", "given"), [("2025-06-18", "2025-06-18"), ("1999-01-01", "2025-11-25")])
def test_the_protocol_version_is_agreed_on(asked: str, given: str) -> None:
    message: JsonValue = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": asked}}
    with live(minimax()) as gateway:
        key = open_episode(gateway, task=None)
        assert post(gateway, key, message).json()["result"]["protocolVersion"] == given
        listed = post(gateway, key, {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}).json()
        assert listed["result"] == {"tools": []}
