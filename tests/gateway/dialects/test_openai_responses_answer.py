"""What clients of Responses are told: the SDK's types and its real client read every answer and every event."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import responses
from openai.types.responses import ResponseInputParam, ResponseStreamEvent
from pydantic import TypeAdapter

from m2forge.gateway.dialects.opaque_thinking import unseal
from m2forge.gateway.dialects.openai.responses import CUT_OFF, OpenAIResponses, SpokenTokens
from m2forge.gateway.dialects.types import Answer, Ask, Dialect, Ending, TokenLogprob, Usage
from m2forge.records import JsonValue
from m2forge.text.message import Message, ToolCall
from m2forge.text.parser import CallFinished, Completion, ContentDelta, Event, ThinkingDelta
from tests.gateway.anthropic_client import named_events_of
from tests.gateway.dialects.draw_answer import answers, arrivals, play
from tests.gateway.openai_client import Wire, connected, extras_of, results_of, streamed

DIALECT: Dialect = OpenAIResponses()
USER: ResponseInputParam = [{"role": "user", "content": "Hi"}]
USAGE = Usage(num_prompt=30, num_cached=20, num_sampled=9, num_thinking=4)
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
SEALED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
Arrivals = Sequence[tuple[int, list[Event], list[TokenLogprob]]]
settings: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "include": st.sampled_from([[], [SEALED], [SEALED, LOGPROBS]]),
        "reasoning": st.sampled_from([{}, {"summary": "auto"}]),
        "instructions": st.text(max_size=5),
        "metadata": st.just({"task": "7"}),
        "tools": st.just([{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}]),
    },
)


def serve(wire: Wire, answer: Answer, pieces: Arrivals = ()) -> list[Ask]:
    """Answer every request with the one answer; what was asked is told."""
    asks: list[Ask] = []

    def handle(body: Mapping[str, JsonValue]) -> httpx2.Response:
        ask = DIALECT.read(body)
        asks.append(ask)
        if ask.is_streamed:
            return streamed(play(DIALECT.stream(ask, "resp_1", 5), [answer], pieces, USAGE))
        return httpx2.Response(200, json=DIALECT.answer(ask, "resp_1", 5, [answer], USAGE))

    wire.handle = handle
    return asks


def without_logprobs(response: responses.Response) -> dict[str, object]:
    """Random tokens have nothing to do with the words, so where they are found depends on the pieces."""
    body = response.to_dict()
    for item in body["output"]:  # type: ignore[attr-defined]
        for part in item.get("content") or ():
            part.pop("logprobs", None)
            part.pop("parsed", None)
        item.pop("parsed_arguments", None)
    return body


def last_response(events: Sequence[ResponseStreamEvent]) -> responses.Response:
    last = events[-1]
    assert isinstance(last, responses.ResponseCompletedEvent | responses.ResponseIncompleteEvent)
    return last.response


# -- answers ----------------------------------------------------------------------------------------------------------


@given(answers(), settings)
def test_the_client_reads_an_answer(answer: Answer, setting: dict[str, Any]) -> None:
    with connected() as (client, wire):
        serve(wire, answer)
        response = client.responses.create(model="m2", input="Hi", **setting)
    responses.Response.model_validate(response.to_dict())
    assert not extras_of(response)
    completion = answer.completion
    assert response.output_text == completion.content
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.call_id, call.name) for call in calls] == [(call.id, call.name) for call in completion.tool_calls]
    assert response.status == ("incomplete" if answer.ending in CUT_OFF else "completed")
    assert response.metadata == setting.get("metadata", {})
    assert response.instructions == setting.get("instructions")
    thoughts = [item for item in response.output if item.type == "reasoning"]
    assert len(thoughts) == bool(completion.thinking)
    for thought in thoughts:
        parts = thought.summary if "summary" in setting.get("reasoning", {}) else thought.content
        assert [part.text for part in parts or ()] == [completion.thinking]
        word = thought.encrypted_content
        assert (unseal(word) if word else None) == (
            completion.thinking if SEALED in setting.get("include", []) else None
        )


@given(st.data(), answers(), settings)
def test_the_client_accumulates_a_stream_to_the_whole_answer(
    data: st.DataObject, answer: Answer, setting: dict[str, Any]
) -> None:
    pieces = data.draw(arrivals([answer]))
    with connected() as (client, wire):
        serve(wire, answer, pieces)
        whole = client.responses.create(model="m2", input="Hi", **setting)
        events = list(client.responses.create(model="m2", input="Hi", stream=True, **setting))
        with client.responses.stream(model="m2", input="Hi", **setting) as stream:
            received = list(stream)
            final = None if answer.ending in CUT_OFF else stream.get_final_response()
    assert without_logprobs(last_response(events)) == without_logprobs(whole)
    assert final is None or without_logprobs(final) == without_logprobs(whole)
    texts = [event.delta for event in received if event.type == "response.output_text.delta"]
    assert "".join(texts) == answer.completion.content


@given(st.data(), answers(), settings)
def test_what_a_client_sends_back_is_the_sampled_message(
    data: st.DataObject, answer: Answer, setting: dict[str, Any]
) -> None:
    pieces = data.draw(arrivals([answer]))
    with connected() as (client, wire):
        asks = serve(wire, answer, pieces)
        whole = client.responses.create(model="m2", input="Hi", **setting)
        events = list(client.responses.create(model="m2", input="Hi", stream=True, **setting))
        for response in (whole, last_response(events)):
            back: Any = [*USER, *response.output, *results_of(response.output), *USER]
            client.responses.create(model="m2", input=back)
            sent = [message for message in asks[-1].messages if message.role != "tool"]
            assert sent == [Message("user", "Hi"), answer.completion.message(), Message("user", "Hi")]


def test_calls_and_results_may_come_back_in_turns() -> None:
    calls = (ToolCall("look", {"at": 1}, "call_1"), ToolCall("look", {"at": 2}, "call_2"))
    answer = Answer(Completion("Hm.", "", calls, (), closed=True), Ending.TOOL_CALLS)
    with connected() as (client, wire):
        asks = serve(wire, answer)
        turn: list[Any] = list(USER)
        for item in client.responses.create(model="m2", input=USER).output:
            turn.append(item)
            if item.type == "function_call":
                turn.append({"type": "function_call_output", "call_id": item.call_id, "output": item.arguments})
        client.responses.create(model="m2", input=turn)
    assert asks[-1].messages[1:] == (
        answer.completion.message(),
        Message("tool", '{"at": 1}', tool_call_id="call_1"),
        Message("tool", '{"at": 2}', tool_call_id="call_2"),
    )


def test_usage_tells_cached_and_thinking_tokens() -> None:
    answer = Answer(Completion("", "So.", (), (), closed=True), Ending.STOP)
    usage = responses.Response.model_validate(DIALECT.answer(ask(), "resp_1", 5, [answer], USAGE)).usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (30, 9, 39)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (20, 4)


def test_an_answer_that_was_cut_off_says_so() -> None:
    for ending in CUT_OFF:
        answer = Answer(Completion("Hm.", "So", (), (), closed=False), ending)
        response = responses.Response.model_validate(DIALECT.answer(ask(), "resp_1", 5, [answer], USAGE))
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert [getattr(item, "status", None) for item in response.output] == ["completed", "incomplete"]


# -- events -----------------------------------------------------------------------------------------------------------


def ask(**settings: JsonValue) -> Ask:
    return DIALECT.read({"model": "m2", "input": "Hi", **settings})


def stream_of(answer: Answer, pieces: Arrivals, **settings: JsonValue) -> list[dict[str, Any]]:
    stream = DIALECT.stream(ask(**settings), "resp_1", 5)
    return named_events_of(b"".join(play(stream, [answer], pieces, USAGE)))


@given(st.data(), answers(), settings)
def test_the_sdks_types_read_every_event(data: st.DataObject, answer: Answer, setting: dict[str, Any]) -> None:
    for number, event in enumerate(stream_of(answer, data.draw(arrivals([answer])), **setting)):
        read = EVENT.validate_python(event)
        assert read.type == event["type"]
        # The type of a delta's log-probability leaves out what the type of the whole text's has; other releases of the
        # SDK require the name of a call whose arguments are done.
        assert extras_of(read) <= {"bytes", "name"}, event
        assert event["sequence_number"] == number


@given(st.data(), answers(), settings)
def test_items_are_told_one_after_the_other(data: st.DataObject, answer: Answer, setting: dict[str, Any]) -> None:
    events = stream_of(answer, data.draw(arrivals([answer])), **setting)
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


@pytest.mark.parametrize("is_summarised", [False, True])
def test_the_events_of_an_answer(is_summarised: bool) -> None:
    call = ToolCall("look", {"at": 3}, "call_1")
    answer = Answer(Completion("Hm.", "So. Yes.", (call,), (), closed=True), Ending.TOOL_CALLS)
    events: list[Event] = [ThinkingDelta("Hm."), ContentDelta("So."), CallFinished(call), ContentDelta(" Yes.")]
    reasoning: JsonValue = {"summary": "auto"} if is_summarised else None
    received = stream_of(answer, [(0, [event], []) for event in events], reasoning=reasoning)
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
    output = received[-1]["response"]["output"]
    results = [
        {"type": "function_call_output", "call_id": call.id, "output": "ok"} for call in answer.completion.tool_calls
    ]
    back = DIALECT.read({"model": "m2", "input": [*output, *results]})
    assert back.messages[0] == answer.completion.message()


# -- log-probabilities ------------------------------------------------------------------------------------------------


def token(text: str) -> TokenLogprob:
    return TokenLogprob(text.encode(), -0.5, 7)


TOKENS = [token(text) for text in ("Hm", ".", "\n</think>", "\n\n", "So", ". Ye", "s.<", "|end|>")]


def test_log_probabilities_are_those_of_the_words() -> None:
    answer = Answer(Completion("Hm.", "So. Yes.", (), (), closed=True), Ending.STOP, None, tuple(TOKENS))
    pieces: Arrivals = [
        (0, [ThinkingDelta("Hm")], TOKENS[:2]),
        (0, [ThinkingDelta(".")], TOKENS[2:3]),
        (0, [], TOKENS[3:4]),
        (0, [ContentDelta("So")], TOKENS[4:5]),
        (0, [ContentDelta(". Ye"), ContentDelta("s.")], TOKENS[5:]),
    ]
    whole = DIALECT.answer(ask(include=[LOGPROBS]), "resp_1", 5, [answer], USAGE)
    message = responses.Response.model_validate(whole).output[-1]
    assert isinstance(message, responses.ResponseOutputMessage)
    part = message.content[0]
    assert isinstance(part, responses.ResponseOutputText)
    assert [one.token for one in part.logprobs or ()] == ["So", ". Ye", "s.<"]
    received = stream_of(answer, pieces, include=[LOGPROBS])
    deltas = [event for event in received if event["type"] == "response.output_text.delta"]
    assert [[one["token"] for one in event["logprobs"]] for event in deltas] == [["So"], [". Ye"], ["s.<"]]
    assert received[-1]["response"]["output"] == whole["output"]
    assert not any(event.get("logprobs") for event in stream_of(answer, pieces))


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


def test_the_client_raises_the_vendors_errors() -> None:
    for status, raised in [(400, openai.BadRequestError), (429, openai.RateLimitError), (500, openai.APIStatusError)]:
        body = DIALECT.error(status, "input: no", "input")
        with connected() as (client, wire):
            wire.handle = lambda request, status=status, body=body: httpx2.Response(status, json=body)  # type: ignore[misc]
            with pytest.raises(raised) as caught:
                client.responses.create(model="m2", input="Hi")
        assert caught.value.param == "input"


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
    stream = DIALECT.stream(ask(), "resp_1", 5)
    stream.begin(3, 0)
    error, failed = named_events_of(stream.fail(status, "no"))
    assert (error["code"], error["sequence_number"], failed["sequence_number"]) == (code, 2, 3)
    EVENT.validate_python(failed)
