"""Chat Completions: what the contract of dialects does not cover."""

import json
from collections.abc import Sequence
from typing import get_type_hints

import pytest
from hypothesis import given
from openai.types import chat
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion_message_function_tool_call_param import Function as CallFunction
from openai.types.shared_params import FunctionDefinition

from m2forge.gateway.dialects.openai import chat as openai_message
from m2forge.gateway.dialects.openai.chat import OpenAIChat
from m2forge.gateway.dialects.types import (
    BadRequestError,
    CompletionOutput,
    CompletionRequest,
    Dialect,
    Ending,
    ReadOptions,
    TokenLogprob,
    Usage,
)
from m2forge.records import JsonValue
from m2forge.text.message import Message, ToolCall
from m2forge.text.parser import CallFinished, CallStarted, Completion, ContentDelta, Event, ThinkingDelta
from tests.gateway.dialects.adapter_chat import BODY, CALL, FORMAT, IMAGE, SCHEMA, USER
from tests.gateway.dialects.dialect_contract import Body
from tests.gateway.dialects.draw_output import outputs, play
from tests.gateway.openai_client import events_of

CHAT: Dialect = OpenAIChat()
ID, CREATED_S = "chatcmpl-1", 1_700_000_000
USAGE = Usage(num_prompt=10, num_cached=4, num_sampled=7, num_thinking=3)


def read(**changes: JsonValue) -> CompletionRequest:
    return OpenAIChat().read(BODY | changes)


def said(message: Body, *after: Body) -> Message:
    return read(messages=[message, *after]).messages[0]


def refused(**changes: JsonValue) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        read(**changes)
    return caught.value


# -- fields -----------------------------------------------------------------------------------------------------------


def test_every_field_of_the_sdks_messages_is_known() -> None:
    known = {
        chat.ChatCompletionSystemMessageParam: openai_message.SYSTEM_FIELDS,
        chat.ChatCompletionDeveloperMessageParam: openai_message.SYSTEM_FIELDS,
        chat.ChatCompletionUserMessageParam: openai_message.SYSTEM_FIELDS,
        chat.ChatCompletionAssistantMessageParam: openai_message.ASSISTANT_FIELDS,
        chat.ChatCompletionToolMessageParam: openai_message.RESULT_FIELDS,
        chat.ChatCompletionContentPartTextParam: openai_message.PART_FIELDS,
        chat.ChatCompletionContentPartImageParam: openai_message.IMAGE_FIELDS,
        chat.ChatCompletionMessageFunctionToolCallParam: openai_message.CALL_FIELDS,
        CallFunction: openai_message.CALL_FUNCTION_FIELDS,
        chat.ChatCompletionFunctionToolParam: openai_message.TOOL_FIELDS,
        FunctionDefinition: openai_message.FUNCTION_FIELDS,
    }
    for params, fields in known.items():
        assert set(get_type_hints(params)) <= fields, params
    # What the SDK's answers hold may be sent back.
    assert set(chat.ChatCompletionMessage.model_fields) <= openai_message.ASSISTANT_FIELDS


def test_two_names_of_the_limit_must_agree() -> None:
    assert read(max_tokens=5, max_completion_tokens=5).max_tokens == 5
    assert read(max_tokens=6).max_tokens == 6
    assert refused(max_tokens=5, max_completion_tokens=6).field == "max_tokens"


def test_padded_chunks_cannot_be_had() -> None:
    error = refused(stream=True, stream_options={"include_obfuscation": True})
    assert error.field == "stream_options.include_obfuscation"


def test_other_tokens_logprobs_cannot_be_had() -> None:
    assert "expected 0, received 5" in str(refused(logprobs=True, top_logprobs=5))
    assert read(logprobs=True, top_logprobs=0).num_top_logprobs == 0
    assert read(logprobs=False).num_top_logprobs is None


# -- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("role", "becomes"), [("system", "system"), ("developer", "system"), ("user", "user")])
def test_texts_and_their_parts_are_read(role: str, becomes: str) -> None:
    cached: Body = {"type": "text", "text": "b", "prompt_cache_breakpoint": {"mode": "explicit"}}
    message = said({"role": role, "content": [{"type": "text", "text": "a"}, cached], "name": None})
    assert (message.role, message.content) == (becomes, "ab")
    assert said({"role": role, "content": "ab"}) == message


def test_an_assistants_turn_is_read() -> None:
    whole: Body = {"role": "assistant", "content": "So.", "reasoning_content": "Hm", "tool_calls": [CALL]}
    expected = Message("assistant", "So.", "Hm", (ToolCall("look", {"at": 3}, "call_1"),))
    clutter: Body = {
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "parsed": None,
        "provider_specific_fields": {"refusal": None},
    }
    parts: list[JsonValue] = [{"type": "text", "text": "A "}, {"type": "text", "text": "cat."}]
    result: Body = {"role": "tool", "tool_call_id": "call_1", "content": parts, "name": "look"}
    answered = Message("tool", "A cat.", tool_call_id="call_1")
    assert read(messages=[whole, result]).messages == (expected, answered)
    assert said(whole, result) == said(whole | clutter, result) == expected
    assert said({"role": "assistant", "content": None, "reasoning": "Hm"}) == Message("assistant", "", "Hm")
    assert said({"role": "assistant", "content": [{"type": "text", "text": "a"}]}).content == "a"
    assert said({"role": "assistant", "tool_calls": None}) == Message("assistant")


def test_systems_in_a_row_are_one_message() -> None:
    system: Body = {"role": "system", "content": "Be brief."}
    developer: Body = {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]}
    joined = Message("system", "Be brief.\n\nBe kind.")
    assert read(messages=[system, developer, USER]).messages == (joined, Message("user", "Hi"))
    assert [message.role for message in read(messages=[USER, system, developer]).messages] == ["user"] * 3
    assert [message.role for message in read(messages=[system, USER, developer]).messages] == ["system", "user", "user"]


def test_a_participants_name_is_written_before_the_content() -> None:
    assert said({"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "Bob"}).content == "Bob: Hi"
    assert said({"role": "system", "content": "Be brief.", "name": "chair"}).content == "chair: Be brief."
    assert said({"role": "assistant", "content": "So.", "name": "Eve"}).content == "So."


def test_an_image_becomes_the_configured_text() -> None:
    message: Body = {"role": "user", "content": [{"type": "text", "text": "See "}, IMAGE]}
    assert said(message).content == "See [image]"
    body = BODY | {"messages": [message]}
    assert (
        OpenAIChat().read(body, ReadOptions(image_placeholder="(a picture)")).messages[0].content == "See (a picture)"
    )


def test_a_response_format_is_written_into_the_prompt_once() -> None:
    later: list[JsonValue] = [USER, {"role": "assistant", "content": "{}"}, USER]
    first, second = (read(messages=list(messages), response_format=FORMAT) for messages in ([USER], later))
    assert json.dumps(SCHEMA) in first.messages[0].content
    assert second.messages[0] == first.messages[0]
    assert [message.content for message in second.messages[1:]] == ["{}", "Hi"]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"content": "x"}, "role"),
        ({"role": "critic", "content": "x"}, "role"),
        ({"role": "function", "name": "look", "content": "x"}, "role"),
        ({"role": ["user"], "content": "x"}, "role"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": None}, "content"),
        ({"role": "user", "content": 5}, "content"),
        ({"role": "user", "content": ["x"]}, "content[0]"),
        ({"role": "user", "content": [{"text": "x"}]}, "content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"link": "x"}}]}, "content[0].image_url.link"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "content[0].type"),
        ({"role": "user", "content": "x", "name": 5}, "name"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "tool_calls"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "content[0].type"),
        ({"role": "assistant", "refusal": "no"}, "refusal"),
        ({"role": "assistant", "audio": {"id": "x"}}, "audio"),
        ({"role": "assistant", "function_call": {"name": "look", "arguments": "{}"}}, "function_call"),
        ({"role": "assistant", "reasoning": "a", "reasoning_content": "b"}, "reasoning_content"),
        ({"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}, "tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [CALL | {"id": ""}]}, "tool_calls[0].id"),
        ({"role": "assistant", "tool_calls": [CALL | {"function": None}]}, "tool_calls[0].function"),
        ({"role": "tool", "content": "x"}, "tool_call_id"),
        ({"role": "tool", "tool_call_id": "call_1"}, "content"),
    ],
)
def test_messages_that_cannot_be_shown_are_refused(message: Body, field: str) -> None:
    assert refused(messages=[USER, message]).field == f"messages[1].{field}"


def request_for(num_samples: int = 1, **changes: JsonValue) -> CompletionRequest:
    return CHAT.read({"model": "m2", "messages": [USER], "n": num_samples, **changes})


def whole(request: CompletionRequest, outputs: Sequence[CompletionOutput], usage: Usage = USAGE) -> ChatCompletion:
    """The answer, as it goes over the wire, taken by the SDK's type."""
    text = json.dumps(CHAT.response(request, ID, CREATED_S, outputs, usage), allow_nan=False)
    return ChatCompletion.model_validate_json(text, strict=True)


def plain(text: str, ending: Ending = Ending.STOP) -> CompletionOutput:
    return CompletionOutput(Completion("", text, (), (), closed=True), ending)


# -- responses --------------------------------------------------------------------------------------------------------


def test_metadata_and_tier_are_repeated() -> None:
    parsed = whole(request_for(metadata={"task": "7"}, service_tier="auto"), [plain("x")])
    assert parsed.metadata == {"task": "7"}
    assert parsed.service_tier == "default"
    assert whole(request_for(), [plain("x")]).metadata is None


def test_empty_content_is_null_beside_calls_alone() -> None:
    call = ToolCall("look", {"at": "Zürich"}, "call_1")
    output = CompletionOutput(Completion("", "", (call,), (), True), Ending.TOOL_CALLS)
    message = whole(request_for(), [output]).choices[0].message
    assert message.content is None
    assert message.to_dict()["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "Zürich"}'}}
    ]
    assert whole(request_for(), [plain("")]).choices[0].message.content == ""


# -- streamed ---------------------------------------------------------------------------------------------------------


def test_a_stream_has_the_order_that_clients_expect() -> None:
    call = ToolCall("look", {"at": 3}, "call_1")
    output = CompletionOutput(Completion("Hm", "So", (call,), (), closed=True), Ending.TOOL_CALLS)
    events: list[Event] = [ThinkingDelta("H"), ThinkingDelta("m"), ContentDelta("So"), CallStarted("look")]
    stream = CHAT.stream(request_for(stream=True, stream_options={"include_usage": True}), ID, CREATED_S)
    bodies = [
        json.loads(event)
        for event in events_of(
            b"".join(play(stream, [output], [(0, events, []), (0, [CallFinished(call)], [])], USAGE))
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
    begin = events_of(CHAT.stream(request_for(3), ID, CREATED_S).begin(10, 4))
    chunks = [ChatCompletionChunk.model_validate_json(event, strict=True) for event in begin]
    assert [chunk.choices[0].index for chunk in chunks] == [0, 1, 2]
    assert {chunk.choices[0].delta.role for chunk in chunks} == {"assistant"}


def test_tokens_without_text_still_tell_their_logprobs() -> None:
    stream = CHAT.stream(request_for(logprobs=True), ID, CREATED_S)
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
    assert CHAT.stream(request_for(), ID, CREATED_S).piece(0, [], [token]) == b""


# -- sent back --------------------------------------------------------------------------------------------------------


def sent_back(message: dict[str, object]) -> Message:
    """What is read of a message that the client appends to its history."""
    history = json.loads(json.dumps([USER, message]))
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": ""} for call in history[-1].get("tool_calls") or ()
    ]
    return CHAT.read({"model": "m2", "messages": [*history, *results]}).messages[1]


@given(output=outputs())
def test_any_dump_of_a_message_may_be_sent_back(output: CompletionOutput) -> None:
    message = whole(request_for(), [output]).choices[0].message
    expected = output.completion.message()
    assert sent_back(message.model_dump()) == expected
    assert sent_back(message.model_dump(exclude_none=True)) == expected
    assert sent_back(message.to_dict()) == expected
