"""The real OpenAI client, its requests answered in this process by whatever a test says."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import httpx2
import openai
import pydantic
from openai.types import responses
from openai.types.responses.response_input_item_param import FunctionCallOutput

from m2forge.records import JsonValue

Handler = Callable[[Mapping[str, JsonValue]], "httpx2.Response"]


class Wire:
    """What answers the client; `handle` gets each request's body."""

    def __init__(self) -> None:
        self.handle: Handler = lambda body: httpx2.Response(500)

    def respond(self, request: httpx2.Request) -> httpx2.Response:
        return self.handle(json.loads(request.content) if request.content else {})


@contextlib.contextmanager
def connected() -> Iterator[tuple[openai.OpenAI, Wire]]:
    wire = Wire()
    with (
        httpx2.Client(transport=httpx2.MockTransport(wire.respond)) as http,
        openai.OpenAI(base_url="http://gateway/v1", api_key="key", max_retries=0, http_client=http) as client,
    ):
        yield client, wire


def streamed(pieces: Iterator[bytes]) -> httpx2.Response:
    return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=pieces)


def events_of(stream: bytes) -> list[str]:
    """The data of each server-sent event."""
    events = stream.decode("ascii").split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


def extras_of(model: pydantic.BaseModel) -> set[str]:
    """Names of fields, at any depth, that the SDK's type does not have."""
    found = set(model.model_extra or {})
    for name in type(model).model_fields:
        value = getattr(model, name)
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, pydantic.BaseModel):
                found |= extras_of(inner)
    return found


def results_of(output: Sequence[object]) -> list[FunctionCallOutput]:
    """What is sent back for the calls of a response."""
    calls = [item for item in output if isinstance(item, responses.ResponseFunctionToolCall)]
    return [{"type": "function_call_output", "call_id": call.call_id, "output": "ok"} for call in calls]
