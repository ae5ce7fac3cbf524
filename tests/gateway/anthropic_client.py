"""The real Anthropic client, its requests answered in this process by whatever a test says."""

import contextlib
import json
from collections.abc import Iterator

import anthropic
import httpx2
from anthropic import types

from tests.gateway.openai_client import Wire


@contextlib.contextmanager
def connected() -> Iterator[tuple[anthropic.Anthropic, Wire]]:
    wire = Wire()
    with (
        httpx2.Client(transport=httpx2.MockTransport(wire.respond)) as http,
        anthropic.Anthropic(base_url="http://gateway", api_key="key", max_retries=0, http_client=http) as client,
    ):
        yield client, wire


def named_events_of(stream: bytes) -> list[dict[str, object]]:
    """The data of each server-sent event, each said to be of the type that it says itself."""
    found = []
    blocks = stream.decode("ascii").split("\n\n")
    assert blocks.pop() == ""
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert data.startswith("data: ")
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def results_of(message: types.Message) -> list[types.MessageParam]:
    """What a user sends back for the calls of a message, if there are any."""
    uses = [block for block in message.content if block.type == "tool_use"]
    results: list[types.ToolResultBlockParam] = [{"type": "tool_result", "tool_use_id": use.id} for use in uses]
    return [{"role": "user", "content": results}] if results else []
