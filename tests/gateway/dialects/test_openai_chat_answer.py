"""Answers of Chat Completions, whole and streamed, as the real OpenAI client takes them and sends them back."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam
from openai.types.shared import ErrorObject

from m2forge.gateway.dialects.openai.chat import OpenAIChat
from m2forge.gateway.dialects.types import Answer, Ask, Dialect, Ending, TokenLogprob, Usage
from m2forge.records import JsonValue
from m2forge.text.message import Message, ToolCall
from m2forge.text.parser import CallFinished, CallStarted, Completion, ContentDelta, Event, ThinkingDelta
from tests.gateway.dialects.draw_answer import answer_lists, answers, arrivals, play, usages
from tests.gateway.openai_client import Wire, connected, events_of, extras_of, streamed

CHAT: Dialect = OpenAIChat()
ID, CREATED_S = "chatcmpl-1", 1_700_000_000
USAGE = Usage(num_prompt=10, num_cached=4, num_sampled=7, num_thinking=3)
HISTORY: list[JsonValue] = [{"role": "user", "content": "Hi"}]
GREETING: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def connection() -> Iterator[tuple[openai.OpenAI, Wire]]:
    with connected() as pair:
        yield pair


def ask_for(num_samples: int = 1, **changes: JsonValue) -> Ask:
    return CHAT.read({"model": "m2", "messages": HISTORY, "n": num_samples, **changes})


def whole(ask: Ask, answers: Sequence[Answer], usage: Usage = USAGE) -> ChatCompletion:
    """The answer, as it goes over the wire, taken by the SDK's type."""
    text = json.dumps(CHAT.answer(ask, ID, CREATED_S, answers, usage), allow_nan=False)
    return ChatCompletion.model_validate_json(text, strict=True)


def chunks_of(stream: bytes) -> list[ChatCompletionChunk]:
    *events, last = events_of(stream)
    assert last == "[DONE]"
    return [ChatCompletionChunk.model_validate_json(event, strict=True) for event in events]


def plain(text: str, ending: Ending = Ending.STOP) -> Answer:
    return Answer(Completion("", text, (), (), closed=True), ending)


# -- whole ------------------------------------------------------------------------------------------------------------


@given(answers=answer_lists(), usage=usages, has_logprobs=st.booleans())
def test_the_sdks_type_takes_any_answer(answers: list[Answer], usage: Usage, has_logprobs: bool) -> None:
    parsed = whole(ask_for(len(answers), logprobs=has_logprobs), answers, usage)
    assert extras_of(parsed) <= {"reasoning_content"}
    assert [choice.index for choice in parsed.choices] == list(range(len(answers)))
    for choice, answer in zip(parsed.choices, answers, strict=True):
        assert (choice.message.content or "") == answer.completion.content
        assert (choice.finish_reason == "tool_calls") == bool(answer.completion.tool_calls)
        if has_logprobs:
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert [bytes(token.bytes or ()) for token in choice.logprobs.content] == [t.text for t in answer.logprobs]
        else:
            assert choice.logprobs is None


def test_usage_tells_cached_and_thinking_tokens() -> None:
    usage = whole(ask_for(), [plain("Hello")]).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (10, 7, 17)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 4
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 3


@pytest.mark.parametrize(
    ("ending", "finish_reason"),
    [
        (Ending.STOP, "stop"),
        (Ending.STOP_TEXT, "stop"),
        (Ending.LENGTH, "length"),
        (Ending.TOOL_CALLS, "tool_calls"),
        (Ending.ABORT, "length"),
    ],
)
def test_endings_become_finish_reasons(ending: Ending, finish_reason: str) -> None:
    assert whole(ask_for(), [plain("x", ending)]).choices[0].finish_reason == finish_reason
    chunk = json.loads(events_of(CHAT.stream(ask_for(), ID, CREATED_S).end_sample(0, plain("x", ending)))[0])
    assert chunk["choices"][0]["finish_reason"] == finish_reason


def test_metadata_and_tier_are_repeated() -> None:
    parsed = whole(ask_for(metadata={"task": "7"}, service_tier="auto"), [plain("x")])
    assert parsed.metadata == {"task": "7"}
    assert parsed.service_tier == "default"
    assert whole(ask_for(), [plain("x")]).metadata is None


def test_empty_content_is_null_beside_calls_alone() -> None:
    call = ToolCall("look", {"at": "Zürich"}, "call_1")
    message = whole(ask_for(), [Answer(Completion("", "", (call,), (), True), Ending.TOOL_CALLS)]).choices[0].message
    assert message.content is None
    assert message.to_dict()["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "Zürich"}'}}
    ]
    assert whole(ask_for(), [plain("")]).choices[0].message.content == ""


# -- streamed ---------------------------------------------------------------------------------------------------------


@given(data=st.data(), answers=answer_lists(), usage=usages, has_logprobs=st.booleans(), has_usage=st.booleans())
def test_the_client_adds_a_stream_up_to_the_whole_answer(
    connection: tuple[openai.OpenAI, Wire],
    data: st.DataObject,
    answers: list[Answer],
    usage: Usage,
    has_logprobs: bool,
    has_usage: bool,
) -> None:
    client, wire = connection
    arriving = data.draw(arrivals(answers))
    size = data.draw(st.sampled_from([97, 1000, 10**6]))
    seen = []

    def handle(body: Mapping[str, JsonValue]) -> httpx2.Response:
        ask = CHAT.read(body)
        seen.append(ask)
        if not ask.is_streamed:
            return httpx2.Response(200, json=CHAT.answer(ask, ID, CREATED_S, answers, usage))
        stream = b"".join(play(CHAT.stream(ask, ID, CREATED_S), answers, arriving, usage))
        assert all(extras_of(chunk) <= {"reasoning_content"} for chunk in chunks_of(stream))
        # Packets end where they like.
        return streamed(stream[start : start + size] for start in range(0, len(stream), size))

    wire.handle = handle
    completions, num_samples = client.chat.completions, len(answers)
    expected = completions.create(model="m2", messages=GREETING, n=num_samples, logprobs=has_logprobs)
    with completions.stream(
        model="m2",
        messages=GREETING,
        n=num_samples,
        logprobs=has_logprobs,
        stream_options={"include_usage": True} if has_usage else openai.omit,
    ) as stream:
        stream.until_done()
        # The final completion would be the same, but the SDK raises for one that reached its limit.
        added_up = stream.current_completion_snapshot
    assert [ask.is_streamed for ask in seen] == [False, True]
    assert (added_up.usage == expected.usage) if has_usage else added_up.usage is None
    assert (added_up.id, added_up.model, added_up.created) == (expected.id, expected.model, expected.created)
    for got, wanted in zip(added_up.choices, expected.choices, strict=True):
        assert got.finish_reason == wanted.finish_reason
        assert _logprobs(got.logprobs) == _logprobs(wanted.logprobs)
        assert sent_back(got.message.to_dict()) == sent_back(wanted.message.to_dict())
        assert got.message.content == wanted.message.content


def test_a_stream_has_the_order_that_clients_expect() -> None:
    call = ToolCall("look", {"at": 3}, "call_1")
    answer = Answer(Completion("Hm", "So", (call,), (), closed=True), Ending.TOOL_CALLS)
    events: list[Event] = [ThinkingDelta("H"), ThinkingDelta("m"), ContentDelta("So"), CallStarted("look")]
    stream = CHAT.stream(ask_for(stream=True, stream_options={"include_usage": True}), ID, CREATED_S)
    bodies = [
        json.loads(event)
        for event in events_of(
            b"".join(play(stream, [answer], [(0, events, []), (0, [CallFinished(call)], [])], USAGE))
        )[:-1]
    ]
    assert [body["choices"][0]["delta"] for body in bodies[:-1]] == [
        {"role": "assistant", "content": None, "refusal": None},
        {"reasoning_content": "H"},
        {"reasoning_content": "m"},
        {"content": "So"},
        {
            "tool_calls": [
                {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"at": 3}'}}]},
        {},
    ]
    assert [body["choices"][0]["finish_reason"] for body in bodies[:-1]] == [None] * 6 + ["tool_calls"]
    assert all(body["usage"] is None for body in bodies[:-1])
    assert bodies[-1]["choices"] == []
    assert bodies[-1]["usage"]["total_tokens"] == 17


def test_roles_come_first_in_the_order_of_choices() -> None:
    begin = events_of(CHAT.stream(ask_for(3), ID, CREATED_S).begin(10, 4))
    chunks = [ChatCompletionChunk.model_validate_json(event, strict=True) for event in begin]
    assert [chunk.choices[0].index for chunk in chunks] == [0, 1, 2]
    assert {chunk.choices[0].delta.role for chunk in chunks} == {"assistant"}


def test_tokens_without_text_still_tell_their_logprobs() -> None:
    stream = CHAT.stream(ask_for(logprobs=True), ID, CREATED_S)
    token = TokenLogprob(b"\xf0\x9f", -0.5, 9)
    (chunk,) = [
        ChatCompletionChunk.model_validate_json(event, strict=True) for event in events_of(stream.piece(0, [], [token]))
    ]
    assert chunk.choices[0].delta.content is None
    assert chunk.choices[0].logprobs is not None
    assert chunk.choices[0].logprobs.content is not None
    assert chunk.choices[0].logprobs.content[0].to_dict() == {
        "token": "�",
        "bytes": [0xF0, 0x9F],
        "logprob": -0.5,
        "top_logprobs": [],
    }
    assert CHAT.stream(ask_for(), ID, CREATED_S).piece(0, [], [token]) == b""


def test_a_failure_after_the_start_reaches_the_client(connection: tuple[openai.OpenAI, Wire]) -> None:
    client, wire = connection
    stream = CHAT.stream(ask_for(), ID, CREATED_S)
    pieces = [stream.begin(10, 4), stream.piece(0, [ContentDelta("So")], []), stream.fail(503, "the engine failed")]
    wire.handle = lambda body: streamed(iter(pieces))
    with client.chat.completions.create(model="m2", messages=[], stream=True) as got:
        assert [next(got).choices[0].delta.content for _ in range(2)] == [None, "So"]
        with pytest.raises(openai.APIError, match="the engine failed"):
            next(got)


# -- sent back --------------------------------------------------------------------------------------------------------


def sent_back(message: dict[str, object]) -> Message:
    """What is read of a message that the client appends to its history."""
    history = json.loads(json.dumps([*HISTORY, message]))
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": ""} for call in history[-1].get("tool_calls") or ()
    ]
    return CHAT.read({"model": "m2", "messages": [*history, *results]}).messages[1]


@given(answer=answers())
def test_an_answer_sent_back_is_the_message_that_was_sampled(answer: Answer) -> None:
    message = whole(ask_for(), [answer]).choices[0].message
    expected = answer.completion.message()
    assert sent_back(message.model_dump()) == expected
    assert sent_back(message.model_dump(exclude_none=True)) == expected
    assert sent_back(message.to_dict()) == expected


@given(answer=answers(), results=st.lists(st.text(max_size=5), min_size=3, max_size=3), order=st.permutations(range(3)))
def test_the_client_sends_back_what_it_was_given(
    connection: tuple[openai.OpenAI, Wire], answer: Answer, results: list[str], order: list[int]
) -> None:
    client, wire = connection
    seen = []

    def handle(body: Mapping[str, JsonValue]) -> httpx2.Response:
        seen.append(CHAT.read(body))
        return httpx2.Response(200, json=CHAT.answer(seen[-1], ID, CREATED_S, [answer], USAGE))

    wire.handle = handle
    message = client.chat.completions.create(model="m2", messages=GREETING).choices[0].message
    calls = message.tool_calls or []
    answered: list[ChatCompletionMessageParam] = [
        {"role": "tool", "tool_call_id": calls[index].id, "content": results[index]}
        for index in order
        if index < len(calls)
    ]
    # Clients append the message as it came; the SDK writes it out, though its types do not say so.
    came = cast(ChatCompletionMessageParam, message)
    client.chat.completions.create(model="m2", messages=[*GREETING, came, *answered])
    assert seen[-1].messages == (
        Message("user", "Hi"),
        answer.completion.message(),
        *(Message("tool", results[index], tool_call_id=call.id) for index, call in enumerate(calls)),
    )


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind", "type", "code"),
    [
        (400, openai.BadRequestError, "invalid_request_error", None),
        (401, openai.AuthenticationError, "invalid_request_error", "invalid_api_key"),
        (403, openai.PermissionDeniedError, "invalid_request_error", None),
        (404, openai.NotFoundError, "invalid_request_error", None),
        (413, openai.APIStatusError, "invalid_request_error", "request_too_large"),
        (429, openai.RateLimitError, "insufficient_quota", "insufficient_quota"),
        (500, openai.InternalServerError, "server_error", None),
        (503, openai.InternalServerError, "server_error", "service_unavailable"),
    ],
)
def test_the_client_raises_its_own_error(
    connection: tuple[openai.OpenAI, Wire],
    status: int,
    kind: type[openai.APIStatusError],
    type: str,
    code: str | None,
) -> None:
    client, wire = connection
    body = CHAT.error(status, "this cannot be", "messages[0].role")
    ErrorObject.model_validate(body["error"], strict=True)
    wire.handle = lambda _: httpx2.Response(status, json=body)
    with pytest.raises(kind, match="this cannot be") as caught:
        client.chat.completions.create(model="m2", messages=[])
    error = caught.value
    assert (error.status_code, error.type, error.code, error.param) == (status, type, code, "messages[0].role")


def _logprobs(logprobs: object) -> object:
    """A stream without tokens never tells that it would have told of them."""
    content = getattr(logprobs, "content", None)
    return [token.to_dict() for token in content] if content else []
