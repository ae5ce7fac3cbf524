"""The output of Responses: what the contract of dialects does not cover."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import responses
from openai.types.responses import ResponseInputParam

from m2forge.gateway.dialects.opaque_thinking import decode_thinking
from m2forge.gateway.dialects.openai.responses import CUT_OFF, OpenAIResponses, SpokenTokens
from m2forge.gateway.dialects.types import CompletionOutput, CompletionRequest, Dialect, Ending, TokenLogprob, Usage
from m2forge.records import JsonValue
from m2forge.text.message import Message, ToolCall
from m2forge.text.parser import CallFinished, Completion, ContentDelta, Event, ThinkingDelta
from tests.gateway.anthropic_client import named_events_of
from tests.gateway.dialects.adapter_responses import EVENT, LOGPROBS, SEALED, SETTINGS
from tests.gateway.dialects.draw_output import arrivals, outputs, play
from tests.gateway.openai_client import connected, streamed

DIALECT: Dialect = OpenAIResponses()
USER: ResponseInputParam = [{"role": "user", "content": "Hi"}]
USAGE = Usage(num_prompt=30, num_cached=20, num_sampled=9, num_thinking=4)
Arrivals = Sequence[tuple[int, list[Event], list[TokenLogprob]]]


# -- outputs ----------------------------------------------------------------------------------------------------------


@given(outputs(), SETTINGS)
def test_settings_shape_the_response(output: CompletionOutput, setting: dict[str, Any]) -> None:
    response = responses.Response.model_validate(DIALECT.response(request_for(**setting), "resp_1", 5, [output], USAGE))
    assert response.metadata == setting.get("metadata", {})
    assert response.instructions == setting.get("instructions")
    thoughts = [item for item in response.output if item.type == "reasoning"]
    assert len(thoughts) == bool(output.completion.thinking)
    for thought in thoughts:
        parts = thought.summary if "summary" in setting.get("reasoning", {}) else thought.content
        assert [part.text for part in parts or ()] == [output.completion.thinking]
        word, is_sealed = thought.encrypted_content, SEALED in setting.get("include", [])
        assert (decode_thinking(word) if word else None) == (output.completion.thinking if is_sealed else None)


def test_calls_and_results_may_come_back_in_turns() -> None:
    calls = (ToolCall("look", {"at": 1}, "call_1"), ToolCall("look", {"at": 2}, "call_2"))
    output = CompletionOutput(Completion("Hm.", "", calls, (), closed=True), Ending.TOOL_CALLS)
    requests: list[CompletionRequest] = []

    def handle(body: Mapping[str, JsonValue]) -> httpx2.Response:
        requests.append(DIALECT.read(body))
        return httpx2.Response(200, json=DIALECT.response(requests[-1], "resp_1", 5, [output], USAGE))

    with connected() as (client, wire):
        wire.handle = handle
        turn: list[Any] = list(USER)
        for item in client.responses.create(model="m2", input=USER).output:
            turn.append(item)
            if item.type == "function_call":
                turn.append({"type": "function_call_output", "call_id": item.call_id, "output": item.arguments})
        client.responses.create(model="m2", input=turn)
    assert requests[-1].messages[1:] == (
        output.completion.message(),
        Message("tool", '{"at": 1}', tool_call_id="call_1"),
        Message("tool", '{"at": 2}', tool_call_id="call_2"),
    )


def test_an_answer_that_was_cut_off_says_so() -> None:
    for ending in CUT_OFF:
        output = CompletionOutput(Completion("Hm.", "So", (), (), closed=False), ending)
        response = responses.Response.model_validate(DIALECT.response(request_for(), "resp_1", 5, [output], USAGE))
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert [getattr(item, "status", None) for item in response.output] == ["completed", "incomplete"]


# -- events -----------------------------------------------------------------------------------------------------------


def request_for(**settings: JsonValue) -> CompletionRequest:
    return DIALECT.read({"model": "m2", "input": "Hi", **settings})


def stream_of(output: CompletionOutput, pieces: Arrivals, **settings: JsonValue) -> list[dict[str, Any]]:
    stream = DIALECT.stream(request_for(**settings), "resp_1", 5)
    return named_events_of(b"".join(play(stream, [output], pieces, USAGE)))


def without_logprobs(response: dict[str, Any]) -> dict[str, Any]:
    """Random tokens have nothing to do with the text, so where they are found depends on the pieces."""
    for item in response["output"]:
        for part in item.get("content") or ():
            part.pop("logprobs", None)
    return response


@given(st.data(), outputs(), SETTINGS)
def test_items_are_told_one_after_the_other(
    data: st.DataObject, output: CompletionOutput, setting: dict[str, Any]
) -> None:
    events = stream_of(output, data.draw(arrivals([output])), **setting)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    index, id = -1, None
    done = []
    for event in events[2:-1]:
        if event["type"] == "response.output_item.added":
            assert id is None
            index, id = index + 1, event["item"]["id"]
        assert event["output_index"] == index
        assert event.get("item_id", id) == id
        if event["type"] == "response.output_item.done":
            assert event["item"]["id"] == id
            done.append(event["item"])
            id = None
    assert id is None
    assert events[-1]["response"]["output"] == done
    whole = DIALECT.response(request_for(**setting), "resp_1", 5, [output], USAGE)
    assert without_logprobs(events[-1]["response"]) == without_logprobs(json.loads(json.dumps(whole)))


@pytest.mark.parametrize("is_summarised", [False, True])
def test_the_events_of_an_answer(is_summarised: bool) -> None:
    call = ToolCall("look", {"at": 3}, "call_1")
    output = CompletionOutput(Completion("Hm.", "So. Yes.", (call,), (), closed=True), Ending.TOOL_CALLS)
    events: list[Event] = [ThinkingDelta("Hm."), ContentDelta("So."), CallFinished(call), ContentDelta(" Yes.")]
    reasoning: JsonValue = {"summary": "auto"} if is_summarised else None
    received = stream_of(output, [(0, [event], []) for event in events], reasoning=reasoning)
    thought = (
        ["reasoning_summary_part", "reasoning_summary_text"] if is_summarised else ["content_part", "reasoning_text"]
    )
    words = [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert [event["type"].removeprefix("response.") for event in received] == [
        "created",
        "in_progress",
        "output_item.added",
        f"{thought[0]}.added",
        f"{thought[1]}.delta",
        f"{thought[1]}.done",
        f"{thought[0]}.done",
        "output_item.done",
        *words,
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        *words,
        "completed",
    ]
    items = received[-1]["response"]["output"]
    results = [
        {"type": "function_call_output", "call_id": call.id, "output": "ok"} for call in output.completion.tool_calls
    ]
    back = DIALECT.read({"model": "m2", "input": [*items, *results]})
    assert back.messages[0] == output.completion.message()


# -- log-probabilities ------------------------------------------------------------------------------------------------


def token(text: str) -> TokenLogprob:
    return TokenLogprob(text.encode(), -0.5, 7)


TOKENS = [token(text) for text in ("Hm", ".", "\n</think>", "\n\n", "So", ". Ye", "s.<", "|end|>")]


def test_log_probabilities_are_those_of_the_words() -> None:
    output = CompletionOutput(Completion("Hm.", "So. Yes.", (), (), closed=True), Ending.STOP, None, tuple(TOKENS))
    pieces: Arrivals = [
        (0, [ThinkingDelta("Hm")], TOKENS[:2]),
        (0, [ThinkingDelta(".")], TOKENS[2:3]),
        (0, [], TOKENS[3:4]),
        (0, [ContentDelta("So")], TOKENS[4:5]),
        (0, [ContentDelta(". Ye"), ContentDelta("s.")], TOKENS[5:]),
    ]
    whole = DIALECT.response(request_for(include=[LOGPROBS]), "resp_1", 5, [output], USAGE)
    message = responses.Response.model_validate(whole).output[-1]
    assert isinstance(message, responses.ResponseOutputMessage)
    part = message.content[0]
    assert isinstance(part, responses.ResponseOutputText)
    assert [one.token for one in part.logprobs or ()] == ["So", ". Ye", "s.<"]
    received = stream_of(output, pieces, include=[LOGPROBS])
    deltas = [event for event in received if event["type"] == "response.output_text.delta"]
    assert [[one["token"] for one in event["logprobs"]] for event in deltas] == [["So"], [". Ye"], ["s.<"]]
    assert received[-1]["response"]["output"] == whole["output"]
    assert not any(event.get("logprobs") for event in stream_of(output, pieces))


@given(st.lists(st.text(max_size=3)), st.data())
def test_every_token_is_found_once(texts: list[str], data: st.DataObject) -> None:
    spoken = SpokenTokens()
    spoken.add(map(token, texts))
    whole = "".join(texts)
    ends = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    stretches = [whole[start:end] for start, end in zip([0, *ends], [*ends, len(whole)], strict=True)]
    found = [one.text.decode() for stretch in stretches for one in spoken.take(stretch)]
    assert [text for text in found if text] == [text for text in texts if text]


def test_text_without_its_tokens_has_none() -> None:
    spoken = SpokenTokens()
    spoken.add([TokenLogprob(b"\xff", -0.5, 7), token("So")])
    assert spoken.take("\ufffd") == []
    assert spoken.take("So") == [token("So")]


# -- errors -----------------------------------------------------------------------------------------------------------


def test_an_error_in_the_middle_of_a_stream_is_told_twice() -> None:
    def broken(body: Mapping[str, JsonValue]) -> httpx2.Response:
        stream = DIALECT.stream(DIALECT.read(body), "resp_1", 5)

        def pieces() -> Iterator[bytes]:
            yield stream.begin(3, 0)
            yield stream.piece(0, [ContentDelta("So")], [])
            yield stream.fail(500, "the engine is gone")

        return streamed(pieces())

    with connected() as (client, wire):
        wire.handle = broken
        error, failed = list(client.responses.create(model="m2", input="Hi", stream=True))[-2:]
    assert isinstance(error, responses.ResponseErrorEvent)
    assert (error.code, error.message) == ("server_error", "the engine is gone")
    assert isinstance(failed, responses.ResponseFailedEvent)
    assert failed.response.status == "failed"
    assert failed.response.error is not None
    assert responses.ResponseError.model_validate(failed.response.error.to_dict()).code == "server_error"


@pytest.mark.parametrize(
    ("status", "code"), [(400, "invalid_prompt"), (429, "rate_limit_exceeded"), (503, "server_error")]
)
def test_errors_in_a_stream_have_the_vendors_codes(status: int, code: str) -> None:
    stream = DIALECT.stream(request_for(), "resp_1", 5)
    stream.begin(3, 0)
    error, failed = named_events_of(stream.fail(status, "no"))
    assert (error["code"], error["sequence_number"], failed["sequence_number"]) == (code, 2, 3)
    EVENT.validate_python(failed)
