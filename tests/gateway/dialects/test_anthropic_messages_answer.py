"""What clients of Messages are told: the SDK's types and its real client read every answer and every event."""

import json
from collections.abc import Iterator, Mapping, Sequence

import anthropic
import httpx2
import pytest
from anthropic import types
from anthropic.types.shared import ErrorResponse
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from m2forge.gateway.dialects.anthropic.messages import AnthropicMessages
from m2forge.gateway.dialects.types import Answer, Ask, Dialect, Ending, TokenLogprob, Usage
from m2forge.records import JsonValue
from m2forge.text.message import Message, ToolCall
from m2forge.text.parser import CallFinished, Completion, ContentDelta, Event, ThinkingDelta
from tests.gateway.anthropic_client import connected, named_events_of, results_of
from tests.gateway.dialects.draw_answer import answers, arrivals, play
from tests.gateway.openai_client import Wire, extras_of, streamed

DIALECT = AnthropicMessages()
USER: types.MessageParam = {"role": "user", "content": "Hi"}
USAGE = Usage(num_prompt=30, num_cached=20, num_sampled=9, num_thinking=4)
EVENT: TypeAdapter[types.RawMessageStreamEvent] = TypeAdapter(types.RawMessageStreamEvent)
DISPLAYS = st.sampled_from(["summarized", "omitted"])
Arrivals = Sequence[tuple[int, list[Event], list[TokenLogprob]]]


def read(body: Mapping[str, JsonValue], dialect: Dialect = DIALECT) -> Ask:
    return dialect.read(body)


def serve(wire: Wire, answer: Answer, pieces: Arrivals = ()) -> list[Ask]:
    """Answer every request with the one answer; what was asked is told."""
    asks: list[Ask] = []

    def handle(body: Mapping[str, JsonValue]) -> httpx2.Response:
        ask = read(body)
        asks.append(ask)
        if ask.is_streamed:
            return streamed(play(DIALECT.stream(ask, "msg_1", 5), [answer], pieces, USAGE))
        return httpx2.Response(200, json=DIALECT.answer(ask, "msg_1", 5, [answer], USAGE))

    wire.handle = handle
    return asks


def content_of(message: types.Message) -> dict[str, object]:
    """What was said, words after a call joined to those before."""
    blocks = message.content
    return {
        "id": message.id,
        "model": message.model,
        "stop": (message.stop_reason, message.stop_sequence),
        "usage": message.usage.to_dict(),
        "thinking": [(block.thinking, block.signature) for block in blocks if block.type == "thinking"],
        "text": "".join(block.text for block in blocks if block.type == "text"),
        "calls": [(block.id, block.name, block.input) for block in blocks if block.type == "tool_use"],
    }


def expected(answer: Answer) -> tuple[str, str, list[tuple[str, str, Mapping[str, JsonValue]]]]:
    completion = answer.completion
    return completion.thinking, completion.content, [(c.id, c.name, c.arguments) for c in completion.tool_calls]


# -- answers ----------------------------------------------------------------------------------------------------------


@given(answers())
def test_the_client_reads_an_answer(answer: Answer) -> None:
    with connected() as (client, wire):
        serve(wire, answer)
        message = client.messages.create(model="m2", max_tokens=9, messages=[USER])
    types.Message.model_validate(message.to_dict())
    assert not extras_of(message)
    thinking, content, calls = expected(answer)
    assert "".join(thought for thought, _ in content_of(message)["thinking"]) == thinking  # type: ignore[attr-defined]
    assert content_of(message)["text"] == content
    assert content_of(message)["calls"] == calls
    assert [block.type for block in message.content] == sorted(
        [block.type for block in message.content], key=["thinking", "text", "tool_use"].index
    )


@given(st.data(), answers(), DISPLAYS)
def test_the_client_accumulates_a_stream_to_the_whole_answer(data: st.DataObject, answer: Answer, display: str) -> None:
    pieces = data.draw(arrivals([answer]))
    with connected() as (client, wire):
        serve(wire, answer, pieces)
        thinking: types.ThinkingConfigParam = {"type": "adaptive", "display": display}  # type: ignore[typeddict-item]
        whole = client.messages.create(model="m2", max_tokens=9, messages=[USER], thinking=thinking)
        with client.messages.stream(model="m2", max_tokens=9, messages=[USER], thinking=thinking) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
    assert content_of(final) == content_of(whole)
    assert [block.type for block in final.content] == [block.type for block in whole.content]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]


@given(st.data(), answers(), DISPLAYS)
def test_what_a_client_sends_back_is_the_sampled_message(data: st.DataObject, answer: Answer, display: str) -> None:
    pieces = data.draw(arrivals([answer]))
    with connected() as (client, wire):
        asks = serve(wire, answer, pieces)
        thinking: types.ThinkingConfigParam = {"type": "adaptive", "display": display}  # type: ignore[typeddict-item]
        whole = client.messages.create(model="m2", max_tokens=9, messages=[USER], thinking=thinking)
        with client.messages.stream(model="m2", max_tokens=9, messages=[USER], thinking=thinking) as stream:
            final = stream.get_final_message()
        for message in (whole, final):
            back: types.MessageParam = {"role": "assistant", "content": message.content}
            client.messages.create(model="m2", max_tokens=9, messages=[USER, back, *results_of(message), USER])
            sent = [message for message in asks[-1].messages if message.role != "tool"]
            assert sent == [Message("user", "Hi"), answer.completion.message(), Message("user", "Hi")]


def test_results_of_calls_go_back_by_their_ids() -> None:
    calls = (ToolCall("look", {"at": 1}, "toolu_1"), ToolCall("look", {"at": 2}, "toolu_2"))
    answer = Answer(Completion("Hm.", "", calls, (), closed=True), Ending.TOOL_CALLS)
    with connected() as (client, wire):
        asks = serve(wire, answer)
        message = client.messages.create(model="m2", max_tokens=9, messages=[USER])
        results: list[types.ToolResultBlockParam] = [
            {"type": "tool_result", "tool_use_id": block.id, "content": f"saw {block.input['at']}"}
            for block in reversed(message.content)
            if block.type == "tool_use"
        ]
        turns: list[types.MessageParam] = [USER, message.to_param(), {"role": "user", "content": results}]
        client.messages.create(model="m2", max_tokens=9, messages=turns)
    assert asks[-1].messages[2:] == (
        Message("tool", "saw 1", tool_call_id="toolu_1"),
        Message("tool", "saw 2", tool_call_id="toolu_2"),
    )


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        (Ending.STOP, "end_turn"),
        (Ending.STOP_TEXT, "stop_sequence"),
        (Ending.LENGTH, "max_tokens"),
        (Ending.TOOL_CALLS, "tool_use"),
        (Ending.ABORT, "max_tokens"),
    ],
)
def test_endings_have_the_vendors_names(ending: Ending, reason: str) -> None:
    stop_text = "END" if ending is Ending.STOP_TEXT else None
    answer = Answer(Completion("", "So.", (), (), closed=True), ending, stop_text)
    body = DIALECT.answer(Ask(()), "msg_1", 5, [answer], USAGE)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, stop_text)


def test_cached_tokens_are_counted_apart() -> None:
    answer = Answer(Completion("", "So.", (), (), closed=True), Ending.STOP)
    usage = types.Message.model_validate(DIALECT.answer(Ask(()), "msg_1", 5, [answer], USAGE)).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (10, 20, 9)
    assert usage.output_tokens_details is not None
    assert usage.output_tokens_details.thinking_tokens == 4


def test_the_client_reads_a_count() -> None:
    with connected() as (client, wire):
        wire.handle = lambda body: httpx2.Response(200, json=DIALECT.count(len(DIALECT.read_count(body).messages)))
        assert client.messages.count_tokens(model="m2", messages=[USER], system="Be brief.").input_tokens == 2


# -- events -----------------------------------------------------------------------------------------------------------


def stream_of(answer: Answer, pieces: Arrivals, display: str = "summarized") -> list[dict[str, object]]:
    stream = DIALECT.stream(Ask((), model="m2", echo={"display": display}), "msg_1", 5)
    return named_events_of(b"".join(play(stream, [answer], pieces, USAGE)))


@given(st.data(), answers(), DISPLAYS)
def test_the_sdks_types_read_every_event(data: st.DataObject, answer: Answer, display: str) -> None:
    for event in stream_of(answer, data.draw(arrivals([answer])), display):
        read = EVENT.validate_python(event, strict=True)
        assert read.type == event["type"]
        assert not extras_of(read), event


@given(st.data(), answers(), DISPLAYS)
def test_blocks_are_told_one_after_the_other(data: st.DataObject, answer: Answer, display: str) -> None:
    events = stream_of(answer, data.draw(arrivals([answer])), display)
    started = -1
    is_open = False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            started, is_open = started + 1, True
        assert is_open
        assert event["index"] == started
        is_open = event["type"] != "content_block_stop"
    assert not is_open


def test_the_events_of_an_answer() -> None:
    call = ToolCall("look", {"at": 3}, "toolu_1")
    answer = Answer(Completion("Hm.", "So. Yes.", (call,), (), closed=True), Ending.TOOL_CALLS)
    events: list[Event] = [ThinkingDelta("Hm."), ContentDelta("So."), CallFinished(call), ContentDelta(" Yes.")]
    whole = stream_of(answer, [(0, [event], []) for event in events])
    assert [
        (event["type"], *(event[key] for key in ("index", "content_block", "delta") if key in event))
        for event in whole[1:]
    ] == [
        ("content_block_start", 0, {"type": "thinking", "thinking": "", "signature": ""}),
        ("content_block_delta", 0, {"type": "thinking_delta", "thinking": "Hm."}),
        ("content_block_delta", 0, {"type": "signature_delta", "signature": "m2f0.msg_1"}),
        ("content_block_stop", 0),
        ("content_block_start", 1, {"type": "text", "text": ""}),
        ("content_block_delta", 1, {"type": "text_delta", "text": "So."}),
        ("content_block_stop", 1),
        ("content_block_start", 2, {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}),
        ("content_block_delta", 2, {"type": "input_json_delta", "partial_json": '{"at":3}'}),
        ("content_block_stop", 2),
        ("content_block_start", 3, {"type": "text", "text": ""}),
        ("content_block_delta", 3, {"type": "text_delta", "text": " Yes."}),
        ("content_block_stop", 3),
        ("message_delta", {"stop_reason": "tool_use", "stop_sequence": None}),
        ("message_stop",),
    ]


def test_words_after_a_call_come_back_as_one_content() -> None:
    call = ToolCall("look", {"at": 3}, "toolu_1")
    answer = Answer(Completion("", "So. Yes.", (call,), (), closed=True), Ending.TOOL_CALLS)
    events: list[Event] = [ContentDelta("So."), CallFinished(call), ContentDelta(" Yes.")]
    with connected() as (client, wire):
        asks = serve(wire, answer, [(0, events, [])])
        with client.messages.stream(model="m2", max_tokens=9, messages=[USER]) as stream:
            final = stream.get_final_message()
        assert [block.type for block in final.content] == ["text", "tool_use", "text"]
        client.messages.create(model="m2", max_tokens=9, messages=[USER, final.to_param(), *results_of(final), USER])
    assert asks[-1].messages[1] == answer.completion.message()


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind", "raised"),
    [
        (400, "invalid_request_error", anthropic.BadRequestError),
        (401, "authentication_error", anthropic.AuthenticationError),
        (403, "permission_error", anthropic.PermissionDeniedError),
        (404, "not_found_error", anthropic.NotFoundError),
        (405, "invalid_request_error", anthropic.APIStatusError),
        (413, "request_too_large", anthropic.APIStatusError),
        (429, "rate_limit_error", anthropic.RateLimitError),
        (500, "api_error", anthropic.InternalServerError),
        (503, "overloaded_error", anthropic.InternalServerError),
        (529, "overloaded_error", anthropic.InternalServerError),
    ],
)
def test_errors_have_the_vendors_body(status: int, kind: str, raised: type[anthropic.APIStatusError]) -> None:
    body = DIALECT.error(status, "messages: no", "messages")
    assert body == {"type": "error", "error": {"type": kind, "message": "messages: no"}}
    if kind != "request_too_large":  # The SDK has no type for it.
        assert ErrorResponse.model_validate(body).error.type == kind
    with connected() as (client, wire):
        wire.handle = lambda request: httpx2.Response(status, json=body)
        with pytest.raises(raised) as caught:
            client.messages.create(model="m2", max_tokens=9, messages=[USER])
    assert caught.value.body == body


def test_the_client_raises_an_error_in_the_middle_of_a_stream() -> None:
    def broken(body: Mapping[str, JsonValue]) -> httpx2.Response:
        stream = DIALECT.stream(read(body), "msg_1", 5)

        def pieces() -> Iterator[bytes]:
            yield stream.begin(3, 0)
            yield stream.piece(0, [ContentDelta("So")], [])
            yield stream.fail(500, "the engine is gone")

        return streamed(pieces())

    with connected() as (client, wire):
        wire.handle = broken
        with (
            pytest.raises(anthropic.APIStatusError, match="the engine is gone") as caught,
            client.messages.stream(model="m2", max_tokens=9, messages=[USER]) as stream,
        ):
            stream.until_done()
    assert json.loads(json.dumps(caught.value.body))["error"]["type"] == "api_error"
