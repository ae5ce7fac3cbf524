"""The client asks again where a server was away for a moment, says so, and tells what cannot be helped."""

import asyncio
import json
from collections.abc import Iterator, Sequence

import pytest

from m2forge.agents.client import ChatClient, Reply
from m2forge.errors import EngineError, M2ForgeError, RequestError
from m2forge.protocols import Endpoint
from m2forge.text.message import Message, ToolCall
from tests.text.draw import TOOLS

ANSWER = {
    "id": "chatcmpl-1",
    "choices": [
        {
            "finish_reason": "tool_calls",
            "message": {
                "role": "assistant",
                "content": None,
                "reasoning_content": "Hm.",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "stop", "arguments": "{}"}}],
            },
        }
    ],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3},
}


def response(status: int, body: object) -> bytes:
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (status, len(data), data)


async def ask(answers: Sequence[bytes]) -> tuple[Reply | M2ForgeError, list[dict[str, str]], list[object]]:
    """The reply or the error, and headers and bodies of all requests. An empty answer hangs up."""
    left: Iterator[bytes] = iter(answers)
    headers: list[dict[str, str]] = []
    bodies: list[object] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()[1:-1]
        headers.append({name.lower(): value for name, value in (line.split(": ", 1) for line in head)})
        bodies.append(json.loads(await reader.readexactly(int(headers[-1]["content-length"]))))
        writer.write(next(left))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        client = ChatClient(Endpoint(f"http://127.0.0.1:{port}", "m2f-key", "nano"), max_tokens=5)
        received: Reply | M2ForgeError
        try:
            received = await client.complete([Message("user", "Hi")], TOOLS[:1])
        except M2ForgeError as error:
            received = error
        await client.close()
    return received, headers, bodies


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2forge.agents.client.RETRY_S", 0.001)


def test_a_server_that_was_away_is_asked_again() -> None:
    received, headers, bodies = asyncio.run(ask([b"", response(503, "stopping"), response(200, ANSWER)]))
    call = ToolCall("stop", {}, "c")
    assert received == Reply("chatcmpl-1", Message("assistant", "", "Hm.", (call,)), False, 7, 3)
    assert [one["x-stainless-retry-count"] for one in headers] == ["0", "1", "2"]
    assert all(one["authorization"] == "Bearer m2f-key" for one in headers)
    assert bodies[0] == bodies[1] == bodies[2]
    assert isinstance(bodies[0], dict)
    assert bodies[0]["max_tokens"] == 5
    assert [tool["function"]["name"] for tool in bodies[0]["tools"]] == ["search"]


def test_what_is_refused_is_not_asked_again() -> None:
    received, headers, _ = asyncio.run(ask([response(429, {"error": {"message": "budget is spent"}})]))
    assert isinstance(received, RequestError)
    assert "budget is spent" in str(received)
    assert len(headers) == 1


@pytest.mark.parametrize(
    "body", ["no JSON", [], {}, {"choices": []}, ANSWER | {"usage": None}, ANSWER | {"choices": [1]}]
)
def test_an_answer_that_cannot_be_read_is_told(body: object) -> None:
    received, _, _ = asyncio.run(ask([response(200, body)]))
    assert isinstance(received, EngineError)


def test_a_server_that_stays_away_is_told() -> None:
    received, headers, _ = asyncio.run(ask([response(500, "broken")] * 5))
    assert isinstance(received, EngineError)
    assert "5 attempts; the last: status 500: broken" in str(received)
    assert len(headers) == 5
