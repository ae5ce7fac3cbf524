"""What a parser makes of any completion, well formed or not, reaches the real clients and comes back as it was."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx2
from anthropic.types import MessageParam
from hypothesis import given
from hypothesis import strategies as st

from m2forge.gateway.dialects.anthropic.messages import AnthropicMessages
from m2forge.gateway.dialects.openai.responses import OpenAIResponses
from m2forge.gateway.dialects.types import CompletionOutput, Dialect, Ending, Usage
from m2forge.records import JsonValue
from m2forge.text.message import Message, Tool
from m2forge.text.minimax_m2 import XmlCallParser
from m2forge.text.parser import CallFinished, Completion, Event
from tests.gateway import anthropic_client, openai_client
from tests.gateway.dialects.draw_output import play

TOOL = Tool("look", "Looks.", {"type": "object", "properties": {"at": {"type": "integer"}}})
CALL = '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">3</parameter>\n</invoke>\n</minimax:tool_call>'
BITS = [
    "Hm.",
    " ",
    "\n",
    "</think>",
    "\n</think>\n\n",
    "<think>",
    CALL,
    CALL[:40],
    CALL[-40:],
    "</invoke>",
    "[e~[",
    "ß💥",
]
completions = st.lists(st.sampled_from(BITS) | st.text(max_size=3), max_size=8).map(lambda bits: "".join(bits).encode())
USAGE = Usage(num_prompt=30, num_cached=20, num_sampled=9, num_thinking=4)
USER: MessageParam = {"role": "user", "content": "Hi"}
Pieces = list[tuple[int, list[Event], list[Any]]]


def parsed(data: bytes, size: int) -> tuple[CompletionOutput, Pieces]:
    """Fed in pieces of `size` bytes, calls given their ids as the gateway gives them."""
    parser = XmlCallParser([TOOL], end_marker="[e~[", starts_thinking=True)
    fed = [parser.feed(data[start : start + size]) for start in range(0, len(data), size)]
    completion = parser.finish()
    fed.append(list(completion.final_events))
    calls = iter(numbered(completion))
    pieces: Pieces = [
        (0, [CallFinished(next(calls)) if isinstance(event, CallFinished) else event for event in events], [])
        for events in fed
    ]
    whole = replace(completion, tool_calls=tuple(numbered(completion)), final_events=())
    return CompletionOutput(whole, Ending.TOOL_CALLS if whole.tool_calls else Ending.STOP), pieces


def numbered(completion: Completion) -> list[Any]:
    return [replace(call, id=f"call_{number}") for number, call in enumerate(completion.tool_calls)]


def serve(
    wire: openai_client.Wire, dialect: Dialect, output: CompletionOutput, pieces: Pieces
) -> list[Sequence[Message]]:
    """Stream the answer to every request; which conversations were sent is told."""
    sent: list[Sequence[Message]] = []

    def handle(body: Mapping[str, JsonValue]) -> httpx2.Response:
        request = dialect.read(body)
        sent.append(request.messages)
        return openai_client.streamed(play(dialect.stream(request, "id_1", 5), [output], pieces, USAGE))

    wire.handle = handle
    return sent


@given(completions, st.integers(1, 9))
def test_messages_carries_what_was_parsed(data: bytes, size: int) -> None:
    output, pieces = parsed(data, size)
    with anthropic_client.connected() as (client, wire):
        sent = serve(wire, AnthropicMessages(), output, pieces)
        turns: list[MessageParam] = [USER]
        for _ in range(2):
            with client.messages.stream(model="m2", max_tokens=9, messages=turns) as stream:
                message = stream.get_final_message()
                turns += [message.to_param(), *anthropic_client.results_of(message), USER]
    assert sent[1][1] == output.completion.message()


@given(completions, st.integers(1, 9))
def test_responses_carries_what_was_parsed(data: bytes, size: int) -> None:
    output, pieces = parsed(data, size)
    with openai_client.connected() as (client, wire):
        sent = serve(wire, OpenAIResponses(), output, pieces)
        turns: list[Any] = [USER]
        for _ in range(2):
            with client.responses.stream(model="m2", input=turns) as stream:
                items = stream.get_final_response().output
                turns += [*items, *openai_client.results_of(items), USER]
    assert sent[1][1] == output.completion.message()
