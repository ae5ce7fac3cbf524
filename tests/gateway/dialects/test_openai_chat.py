"""What Chat Completions makes of a request: every field of the SDK is decided, and nothing else gets through."""

import contextlib
import random
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import chat
from openai.types.chat import completion_create_params
from openai.types.chat.chat_completion_message_function_tool_call_param import Function as CallFunction
from openai.types.shared_params import FunctionDefinition

from m2forge.gateway.dialects.openai import chat as openai_message
from m2forge.gateway.dialects.openai.chat import ALLOWED, FIELDS, READ, REFUSED, OpenAIChat
from m2forge.gateway.dialects.types import Ask, AskError
from m2forge.records import JsonValue, Sampling
from m2forge.text.message import Message, Tool, ToolCall
from tests.gateway.dialects.draw_answer import json_values
from tests.gateway.mutate import mutated

Body = dict[str, JsonValue]

USER: Body = {"role": "user", "content": "Hi"}
BODY: Body = {"model": "m2", "messages": [USER]}
TOOL: Body = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": True},
}
CALL: Body = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 3}'}}
EXTENSIONS = {"top_k", "min_p", "repetition_penalty"}
"""Fields that open servers added to OpenAI's."""
GOOD: dict[str, list[JsonValue]] = {
    "frequency_penalty": [-2, 0.5],
    "logit_bias": [{}],
    "logprobs": [True, False],
    "max_completion_tokens": [1, 100],
    "max_tokens": [1, 100],
    "messages": [[USER]],
    "metadata": [{}, {"task": "7"}],
    "modalities": [["text"]],
    "model": ["m2"],
    "n": [1, 500],
    "parallel_tool_calls": [True, False],
    "presence_penalty": [2, -0.5],
    "prompt_cache_key": ["key"],
    "prompt_cache_options": [{}, {"mode": "implicit", "ttl": "30m"}],
    "prompt_cache_retention": ["in_memory", "24h"],
    "response_format": [{"type": "text"}],
    "safety_identifier": ["me"],
    "seed": [0, -5, 2**63 - 1],
    "service_tier": ["auto", "default"],
    "stop": ["END", ["a", "b", "c", "d"], []],
    "store": [False],
    "stream": [True, False],
    "temperature": [0, 2, 0.7],
    "tool_choice": ["auto", "none"],
    "tools": [[], [TOOL]],
    "top_p": [1, 0.1],
    "user": ["me"],
    "top_k": [-1, 0, 40],
    "min_p": [0, 0.1],
    "repetition_penalty": [1, 1.1],
}
NEEDS: dict[str, Body] = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}
GOOD_WITH: dict[str, list[JsonValue]] = {
    "stream_options": [{}, {"include_usage": True, "include_obfuscation": False}],
    "top_logprobs": [0],
}
BAD: dict[str, list[JsonValue]] = {
    "audio": [{"voice": "alloy", "format": "wav"}],
    "frequency_penalty": [2.1, "1", True],
    "function_call": ["auto"],
    "functions": [[{"name": "look"}]],
    "logit_bias": [{"5": 10}, []],
    "logprobs": ["yes", 1],
    "max_completion_tokens": [0, 1.5, -1, True, 2**31],
    "max_tokens": [0, "5"],
    "messages": [None, [], "Hi", {}, [None], ["Hi"]],
    "metadata": [[], {"a": 1}, {"k" * 65: ""}, {"k": "v" * 513}, {str(key): "" for key in range(17)}],
    "modalities": [["audio"], ["text", "audio"], "text"],
    "model": [None, "", 5],
    "moderation": [{"model": "omni-moderation-latest"}],
    "n": [0, 2**31, "2"],
    "parallel_tool_calls": ["no"],
    "prediction": [{"type": "content", "content": "x"}],
    "presence_penalty": [-3],
    "prompt_cache_key": [5],
    "prompt_cache_options": ["implicit", {"mode": "none"}, {"size": 1}],
    "prompt_cache_retention": ["48h"],
    "reasoning_effort": ["low", "none"],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a"}}, "text", {}],
    "safety_identifier": [5],
    "seed": [0.5, 2**63],
    "service_tier": ["priority", "flex"],
    "stop": [[""], "", ["a"] * 5, 5, [5]],
    "store": [True],
    "stream": ["yes"],
    "stream_options": [{"include_usage": True}],
    "temperature": [-0.1, 2.1, "0"],
    "tool_choice": [
        "required",
        {"type": "function", "function": {"name": "look"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
    ],
    "tools": [
        [{"type": "custom", "custom": {"name": "x"}}],
        [{"type": "function"}],
        [{"type": "function", "function": {"name": ""}}],
        [{"function": {"name": "x"}}],
        [TOOL, TOOL],
        {},
    ],
    "top_logprobs": [0],
    "top_p": [0, 1.1],
    "user": [5],
    "verbosity": ["low"],
    "web_search_options": [{}],
    "top_k": [-2, 0.5],
    "min_p": [-0.1],
    "repetition_penalty": [0],
}


def read(**changes: JsonValue) -> Ask:
    return OpenAIChat().read(BODY | changes)


def said(message: Body, *after: Body) -> Message:
    return read(messages=[message, *after]).messages[0]


def refused(**changes: JsonValue) -> AskError:
    with pytest.raises(AskError) as caught:
        read(**changes)
    return caught.value


# -- fields -----------------------------------------------------------------------------------------------------------


def sdk_fields() -> set[str]:
    params = completion_create_params
    return {
        *get_type_hints(params.CompletionCreateParamsStreaming),
        *get_type_hints(params.CompletionCreateParamsNonStreaming),
    }


def test_every_field_of_the_sdk_is_decided_once() -> None:
    assert sdk_fields() | EXTENSIONS == FIELDS
    assert not READ & ALLOWED
    assert not (READ | ALLOWED) & REFUSED.keys()
    assert GOOD.keys() | GOOD_WITH.keys() == READ | ALLOWED
    assert BAD.keys() == FIELDS


@pytest.mark.parametrize("name", sorted(READ | ALLOWED))
def test_fields_take_good_values_and_null(name: str) -> None:
    for value in [*GOOD.get(name, []), *GOOD_WITH.get(name, [])]:
        read(**NEEDS.get(name, {}), **{name: value})
    if name not in ("model", "messages"):
        assert read(**{name: None}) == read()


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_fields_refuse_bad_values_by_name(name: str) -> None:
    for value in BAD[name]:
        error = refused(**{name: value})
        assert str(error).startswith(error.field or "?"), (value, str(error))
        assert (error.field or "").startswith(name), (value, str(error))


def test_refused_fields_may_be_null() -> None:
    assert read(**dict.fromkeys(REFUSED)) == read()


def test_every_field_of_the_sdks_messages_is_known() -> None:
    known = {
        chat.ChatCompletionSystemMessageParam: openai_message.SYSTEM_FIELDS,
        chat.ChatCompletionDeveloperMessageParam: openai_message.SYSTEM_FIELDS,
        chat.ChatCompletionUserMessageParam: openai_message.SYSTEM_FIELDS,
        chat.ChatCompletionAssistantMessageParam: openai_message.ASSISTANT_FIELDS,
        chat.ChatCompletionToolMessageParam: openai_message.RESULT_FIELDS,
        chat.ChatCompletionContentPartTextParam: openai_message.PART_FIELDS,
        chat.ChatCompletionMessageFunctionToolCallParam: openai_message.CALL_FIELDS,
        CallFunction: openai_message.CALL_FUNCTION_FIELDS,
        chat.ChatCompletionFunctionToolParam: openai_message.TOOL_FIELDS,
        FunctionDefinition: openai_message.FUNCTION_FIELDS,
    }
    for params, fields in known.items():
        assert set(get_type_hints(params)) <= fields, params
    # What the SDK's answers hold may be sent back.
    assert set(chat.ChatCompletionMessage.model_fields) <= openai_message.ASSISTANT_FIELDS


def test_an_unknown_field_is_refused_with_the_near_name() -> None:
    assert str(refused(temprature=0)) == "temprature: unknown field; did you mean 'temperature'?"
    error = refused(messages=[USER | {"contents": "x"}])
    assert error.field == "messages[0].contents"
    assert "did you mean 'content'?" in str(error)


def test_a_whole_request_is_read() -> None:
    ask = read(
        tools=[TOOL],
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.3,
        stop=["a", "b"],
        seed=4,
        n=3,
        stream=True,
        stream_options={"include_usage": True},
        tool_choice="none",
        logprobs=True,
        metadata={"task": "7"},
        service_tier="auto",
    )
    assert ask == Ask(
        messages=(Message("user", "Hi"),),
        tools=(Tool("look", "Looks.", {"type": "object"}),),
        max_tokens=9,
        sampling=Sampling(0.5, 0.9, 7, 0.1, 0.1, 0.2, 1.3),
        stop_texts=("a", "b"),
        seed=4,
        num_samples=3,
        is_streamed=True,
        tool_choice="none",
        num_top_logprobs=0,
        model="m2",
        echo={"include_usage": True, "metadata": {"task": "7"}, "service_tier": "default"},
    )


def test_two_names_of_the_limit_must_agree() -> None:
    assert read(max_tokens=5, max_completion_tokens=5).max_tokens == 5
    assert read(max_tokens=6).max_tokens == 6
    assert refused(max_tokens=5, max_completion_tokens=6).field == "max_tokens"


def test_one_call_at_a_time_cannot_be_promised() -> None:
    assert refused(parallel_tool_calls=False, tools=[TOOL]).field == "parallel_tool_calls"


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
    result: Body = {"role": "tool", "tool_call_id": "call_1", "content": "A cat."}
    assert said(whole, result) == said(whole | clutter, result) == expected
    assert said({"role": "assistant", "content": None, "reasoning": "Hm"}) == Message("assistant", "", "Hm")
    assert said({"role": "assistant", "content": [{"type": "text", "text": "a"}]}).content == "a"
    assert said({"role": "assistant", "tool_calls": None}) == Message("assistant")


def test_results_stand_in_the_order_of_their_calls() -> None:
    calls: Body = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL | {"id": "call_2"}]}
    first: Body = {"role": "tool", "tool_call_id": "call_1", "content": "one", "name": "look"}
    second: Body = {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "two"}]}
    ordered = read(messages=[USER, calls, first, second, USER]).messages
    assert ordered == read(messages=[USER, calls, second, first, USER]).messages
    assert [message.content for message in ordered[2:4]] == ["one", "two"]
    assert ordered[3].tool_call_id == "call_2"
    for wrong in ([USER, first], [USER, calls, first, first], [USER, calls, USER, first], [first]):
        assert (refused(messages=wrong).field or "").startswith("messages")


def test_systems_in_a_row_are_one_message() -> None:
    system: Body = {"role": "system", "content": "Be brief."}
    developer: Body = {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]}
    joined = Message("system", "Be brief.\n\nBe kind.")
    assert read(messages=[system, developer, USER]).messages == (joined, Message("user", "Hi"))
    assert read(messages=[USER, system, developer]).messages == (Message("user", "Hi"), joined)
    assert len(read(messages=[system, USER, developer]).messages) == 3


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
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "content[0].type"),
        ({"role": "user", "content": "x", "name": "Bob"}, "name"),
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


@pytest.mark.parametrize("arguments", ["{", "5", "[]", "{} x", '{"a": NaN}', '{"a": 1e999}', None, {}, "[" * 5000])
def test_arguments_that_are_no_object_are_refused(arguments: JsonValue) -> None:
    call = CALL | {"function": {"name": "look", "arguments": arguments}}
    error = refused(messages=[USER, {"role": "assistant", "tool_calls": [call]}])
    assert error.field == "messages[1].tool_calls[0].function.arguments"
    assert len(str(error)) < 300


def test_an_error_stays_short_whatever_was_sent() -> None:
    huge: list[JsonValue] = ["x" * 10**5, 10**5000, ["x" * 10**5] * 9, {"x": "y" * 10**5}]
    for value in huge:
        for name in FIELDS - {"stop", "model", "user", "safety_identifier", "prompt_cache_key"}:
            assert len(str(refused(**{name: value}))) < 500, name
    assert len(str(refused(**{"x" * 10**5: 1}))) < 1000


# -- anything ---------------------------------------------------------------------------------------------------------


@given(body=st.dictionaries(st.sampled_from(sorted(FIELDS)) | st.text(max_size=5), json_values))
def test_any_object_is_read_or_refused(body: Body) -> None:
    for changed in (body, BODY | body):
        with contextlib.suppress(AskError):
            OpenAIChat().read(changed)


@given(seed=st.integers(0, 2**32))
def test_any_change_of_a_good_request_is_read_or_refused(seed: int) -> None:
    assistant: Body = {"role": "assistant", "content": None, "reasoning_content": "Hm", "tool_calls": [CALL]}
    result: Body = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "x"}]}
    taken = {name: values[-1] for name, values in (GOOD | GOOD_WITH).items()}
    body: Body = taken | {"messages": [USER, assistant, result], "stream": True, "logprobs": True}
    OpenAIChat().read(body | {"parallel_tool_calls": True})
    chance = random.Random(seed)
    for _ in range(200):
        with contextlib.suppress(AskError):
            OpenAIChat().read(mutated(body, chance))
