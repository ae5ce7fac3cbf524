"""What Responses makes of a request: every field of the SDK is decided, and nothing else gets through."""

import random
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import responses
from openai.types.responses import response_create_params, response_input_item_param

from m2forge.gateway.dialects.opaque_thinking import seal
from m2forge.gateway.dialects.openai import responses_input as item_reader
from m2forge.gateway.dialects.openai.responses import OpenAIResponses
from m2forge.gateway.dialects.openai.responses_input import ALLOWED, FIELDS, HIDDEN, READ, REFUSED, TOOL_FIELDS
from m2forge.gateway.dialects.types import Ask, AskError
from m2forge.records import JsonValue, Sampling
from m2forge.text.message import Message, Tool, ToolCall
from tests.gateway.dialects.draw_answer import json_values
from tests.gateway.mutate import mutated

Body = dict[str, JsonValue]

BODY: Body = {"model": "m2", "input": "Hi"}
USER: Body = {"role": "user", "content": "Hi"}
TOOL: Body = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}}
CALL: Body = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"at": 3}'}
RESULT: Body = {"type": "function_call_output", "call_id": "call_1", "output": "A cat."}
THOUGHT: Body = {"type": "reasoning", "id": "rs_1", "summary": []}
EXTENSIONS = {"top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
"""Fields that say how tokens are drawn, by the names that they have elsewhere."""
SEALED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
GOOD: dict[str, list[JsonValue]] = {
    "background": [False],
    "context_management": [[]],
    "frequency_penalty": [-2, 0.5],
    "include": [[], [SEALED], [SEALED, LOGPROBS]],
    "input": ["Hi", [USER]],
    "instructions": ["", "Be brief."],
    "max_output_tokens": [1, 2**31 - 1],
    "max_tool_calls": [1],
    "metadata": [{}, {"task": "7"}],
    "min_p": [0, 0.1],
    "model": ["m2"],
    "parallel_tool_calls": [True, False],
    "presence_penalty": [2],
    "prompt_cache_key": ["key"],
    "prompt_cache_options": [{}, {"mode": "explicit", "ttl": "30m", "prewarm": False}],
    "prompt_cache_retention": ["24h"],
    "reasoning": [
        {},
        {"summary": "auto", "mode": "standard", "context": "all_turns"},
        {"generate_summary": "detailed"},
    ],
    "repetition_penalty": [1.1],
    "safety_identifier": ["me"],
    "service_tier": ["auto", "default"],
    "store": [False],
    "stream": [True, False],
    "stream_options": [{}, {"include_obfuscation": False}],
    "temperature": [0, 2, 0.7],
    "text": [{}, {"format": {"type": "text"}, "verbosity": "medium"}],
    "tool_choice": ["auto", "none"],
    "tools": [[], [TOOL], [TOOL | {"strict": True, "defer_loading": False, "allowed_callers": ["direct"]}]],
    "top_k": [-1, 40],
    "top_logprobs": [0],
    "top_p": [1, 0.1],
    "truncation": ["disabled"],
    "user": ["me"],
}
BAD: dict[str, list[JsonValue]] = {
    "access_programs": [{"cyber": "standard"}],
    "background": [True, "no"],
    "context_management": [[{"type": "compaction"}], "auto"],
    "conversation": ["conv_1", {"id": "conv_1"}],
    "frequency_penalty": [2.1, "1"],
    "image": [{"context_compression": "auto"}],
    "include": [["file_search_call.results"], [5], SEALED],
    "input": [None, [], {}, 5, [None], ["Hi"], [{"role": "user"}]],
    "instructions": [5, [USER]],
    "max_output_tokens": [0, 1.5, "5", True, 2**31],
    "max_tool_calls": ["5", -1],
    "metadata": [[], {"a": 1}],
    "min_p": [-0.1],
    "model": [None, "", 5],
    "moderation": [{"model": "omni-moderation-latest"}],
    "parallel_tool_calls": ["no"],
    "presence_penalty": [-3],
    "previous_response_id": ["resp_1"],
    "prompt": [{"id": "pmpt_1"}],
    "prompt_cache_key": [5],
    "prompt_cache_options": ["implicit", {"prewarm": True}, {"comparison_response_id": "resp_1"}, {"mode": "none"}],
    "prompt_cache_retention": ["48h"],
    "reasoning": [
        {"effort": "low"},
        {"effort": "none"},
        {"summary": "concise"},
        {"generate_summary": "concise"},
        {"summary": "long"},
        {"mode": "pro"},
        {"context": "current_turn"},
        {"depth": 1},
        "auto",
    ],
    "repetition_penalty": [0],
    "safety_identifier": [5],
    "service_tier": ["priority", "flex"],
    "store": [True],
    "stream": ["yes"],
    "stream_options": [{"include_obfuscation": True}, {"include_usage": True}],
    "temperature": [-0.1, 2.1, "0"],
    "text": [{"format": {"type": "json_schema", "name": "a", "schema": {}}}, {"verbosity": "low"}, {"format": {}}, "x"],
    "tool_choice": [
        "required",
        {"type": "function", "name": "look"},
        {"type": "allowed_tools", "mode": "auto", "tools": []},
        {},
        5,
    ],
    "tools": [
        {},
        [None],
        [TOOL, TOOL],
        [{"type": "web_search"}],
        [{"type": "custom", "name": "look"}],
        [{"name": "look"}],
        [TOOL | {"name": ""}],
        [TOOL | {"strict": "yes"}],
        [TOOL | {"async": True}],
        [TOOL | {"defer_loading": True}],
        [TOOL | {"output_schema": {}}],
        [TOOL | {"allowed_callers": ["programmatic"]}],
        [TOOL | {"parameters": "{}"}],
        [TOOL | {"function": {}}],
    ],
    "top_k": [-2],
    "top_logprobs": [1, -1, True],
    "top_p": [0, 1.1],
    "truncation": ["auto"],
    "user": [5],
}


def read(**changes: JsonValue) -> Ask:
    return OpenAIResponses().read(BODY | changes)


def refused(**changes: JsonValue) -> AskError:
    with pytest.raises(AskError) as caught:
        read(**changes)
    return caught.value


def said(*items: Body) -> tuple[Message, ...]:
    return read(input=list(items)).messages


# -- fields -----------------------------------------------------------------------------------------------------------


def test_every_field_of_the_sdk_is_decided_once() -> None:
    params = response_create_params
    sdk = {
        *get_type_hints(params.ResponseCreateParamsStreaming),
        *get_type_hints(params.ResponseCreateParamsNonStreaming),
    }
    assert sdk | EXTENSIONS == FIELDS
    assert not READ & ALLOWED
    assert not (READ | ALLOWED) & REFUSED.keys()
    assert GOOD.keys() == READ | ALLOWED
    assert BAD.keys() == FIELDS


@pytest.mark.parametrize("name", sorted(READ | ALLOWED))
def test_fields_take_good_values_and_null(name: str) -> None:
    for value in GOOD[name]:
        read(**{name: value})
    if name not in ("model", "input"):
        assert read(**{name: None}) == read()


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_fields_refuse_bad_values_by_name(name: str) -> None:
    for value in BAD[name]:
        error = refused(**{name: value})
        assert (error.field or "").startswith(name), (value, str(error))
        assert str(error).startswith(error.field or "?") or name in str(error), (value, str(error))


def test_refused_fields_may_be_null() -> None:
    assert read(**dict.fromkeys(REFUSED)) == read()


def test_calls_cannot_be_kept_from_being_parallel() -> None:
    assert refused(parallel_tool_calls=False, tools=[TOOL]).field == "parallel_tool_calls"


def test_every_field_of_the_sdks_items_is_known() -> None:
    known = {
        responses.EasyInputMessageParam: item_reader.MESSAGE_FIELDS,
        response_input_item_param.Message: item_reader.MESSAGE_FIELDS,
        responses.ResponseOutputMessageParam: item_reader.MESSAGE_FIELDS,
        responses.ResponseReasoningItemParam: item_reader.REASONING_FIELDS,
        responses.ResponseFunctionToolCallParam: item_reader.CALL_FIELDS,
        response_input_item_param.FunctionCallOutput: item_reader.RESULT_FIELDS,
        responses.ResponseInputTextParam: item_reader.PART_FIELDS,
        responses.ResponseOutputTextParam: item_reader.PART_FIELDS,
        responses.FunctionToolParam: TOOL_FIELDS,
    }
    for params, fields in known.items():
        assert set(get_type_hints(params)) <= fields, params
    # What the SDK's answers hold may be sent back.
    assert set(responses.ResponseOutputMessage.model_fields) <= item_reader.MESSAGE_FIELDS
    assert set(responses.ResponseReasoningItem.model_fields) <= item_reader.REASONING_FIELDS
    assert set(responses.ResponseOutputText.model_fields) <= item_reader.PART_FIELDS


def test_an_unknown_field_is_refused_with_the_near_name() -> None:
    error = refused(max_output_token=5)
    assert str(error) == "max_output_token: unknown field; did you mean 'max_output_tokens'?"
    assert refused(input=[USER | {"contents": "x"}]).field == "input[0].contents"


def test_a_whole_request_is_read() -> None:
    ask = read(
        instructions="Be brief.",
        tools=[TOOL | {"strict": True}],
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        tool_choice="none",
        include=[LOGPROBS],
        metadata={"task": "7"},
        stream=True,
    )
    assert (ask.messages, ask.tools) == (
        (Message("system", "Be brief."), Message("user", "Hi")),
        (Tool("look", "Looks.", {"type": "object"}),),
    )
    assert (ask.max_tokens, ask.sampling) == (9, Sampling(temperature=0.5, top_p=0.9))
    assert (ask.tool_choice, ask.num_top_logprobs, ask.is_streamed, ask.model) == ("none", 0, True, "m2")
    assert (ask.echo["instructions"], ask.echo["metadata"]) == ("Be brief.", {"task": "7"})
    assert read().num_top_logprobs is None


def test_what_is_repeated_has_its_place_in_the_sdks_response() -> None:
    assert read().echo.keys() - HIDDEN <= set(responses.Response.model_fields)


# -- items ------------------------------------------------------------------------------------------------------------


def test_items_become_messages() -> None:
    assert said(
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}], "status": "completed"},
        THOUGHT | {"content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}],
        },
        CALL | {"id": "fc_1", "status": "completed"},
        RESULT | {"output": [{"type": "input_text", "text": "A "}, {"type": "input_text", "text": "cat."}]},
        {"role": "assistant", "content": "A cat."},
        {"role": "assistant", "content": "It sleeps."},
    ) == (
        Message("system", "Be brief."),
        Message("user", "Hi"),
        Message("assistant", "Let me see.", "Hm.", (ToolCall("look", {"at": 3}, "call_1"),)),
        Message("tool", "A cat.", tool_call_id="call_1"),
        Message("assistant", "A cat."),
        Message("assistant", "It sleeps."),
    )


def test_instructions_and_a_system_message_are_one() -> None:
    asked = read(instructions="Be brief.", input=[{"role": "system", "content": "Be kind."}, USER])
    assert asked.messages == (Message("system", "Be brief.\n\nBe kind."), Message("user", "Hi"))


def test_items_of_one_answer_are_one_turn_across_results() -> None:
    first, second = CALL | {"id": "fc_resp_1_0"}, CALL | {"id": "fc_resp_1_1", "call_id": "call_2"}
    messages = said(first, RESULT, second, RESULT | {"call_id": "call_2"})
    assert [len(message.tool_calls) for message in messages] == [2, 0, 0]
    strangers = said(first, RESULT, second | {"id": "fc_resp_2_0"}, RESULT | {"call_id": "call_2"})
    assert [len(message.tool_calls) for message in strangers] == [1, 0, 1, 0]


def test_thinking_is_the_content_or_the_word_or_the_summary() -> None:
    content: Body = {"content": [{"type": "reasoning_text", "text": "content"}]}
    summary: Body = {"summary": [{"type": "summary_text", "text": "summary"}]}
    word: Body = {"encrypted_content": seal("word")}
    cases: list[tuple[Body, str]] = [
        (content | summary | word, "content"),
        (summary | word, "word"),
        (summary, "summary"),
        (summary | {"encrypted_content": "someone's"}, "summary"),
        ({"content": None, "encrypted_content": None}, ""),
    ]
    for item, thinking in cases:
        assert said(THOUGHT | item)[0].thinking == thinking


@pytest.mark.parametrize(
    "item",
    [
        {"type": "item_reference", "id": "msg_1"},
        {"id": "msg_1"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": ["message"]},
        {"role": "tool", "content": "x"},
        {"role": None, "content": "x"},
        USER | {"content": [{"type": "input_image", "image_url": "x"}]},
        USER | {"content": [{"type": "input_text"}]},
        USER | {"content": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": "x", "phase": "commentary"},
        THOUGHT | {"encrypted_content": "someone's"},
        THOUGHT | {"summary": [{"type": "reasoning_text", "text": "x"}]},
        CALL | {"arguments": "{"},
        CALL | {"arguments": "[]"},
        CALL | {"arguments": {}},
        CALL | {"call_id": ""},
        CALL | {"namespace": "x"},
        CALL | {"async": True},
        CALL | {"async_": True},
        CALL | {"caller": {"type": "program", "caller_id": "x"}},
        RESULT | {"call_id": "call_2"},
        RESULT | {"output": None},
    ],
)
def test_items_that_cannot_be_shown_to_the_model_are_refused(item: Body) -> None:
    error = refused(input=[CALL, item])
    assert (error.field or "").startswith("input[1]"), str(error)


def test_a_call_sent_back_as_python_names_it_is_read() -> None:
    assert said(CALL | {"async_": False}, RESULT) == said(CALL, RESULT)


def test_a_result_is_answered_once() -> None:
    assert refused(input=[CALL, RESULT, RESULT]).field == "input[2]"


# -- anything at all --------------------------------------------------------------------------------------------------

WHOLE: Body = {
    "model": "m2",
    "instructions": "Be brief.",
    "input": [
        USER,
        THOUGHT | {"content": [{"type": "reasoning_text", "text": "Hm."}], "encrypted_content": seal("Hm.")},
        {"role": "assistant", "id": "msg_1_0", "content": [{"type": "output_text", "text": "So.", "annotations": []}]},
        CALL | {"id": "fc_1_1"},
        RESULT,
    ],
    "tools": [TOOL],
    "include": [SEALED, LOGPROBS],
    "reasoning": {"summary": "auto"},
    "text": {"format": {"type": "text"}},
    "metadata": {"task": "7"},
    "max_output_tokens": 9,
    "temperature": 0.5,
}


def read_anything(body: Body) -> None:
    message = ""
    try:
        OpenAIResponses().read(body)
    except AskError as error:
        message = str(error)
    assert len(message.encode()) < 1000


@given(st.integers(0, 2**32))
def test_requests_that_are_nearly_right_are_read_or_refused(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(40):
        read_anything(mutated(WHOLE, chance))


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), json_values))
def test_requests_of_anything_are_read_or_refused(body: Body) -> None:
    read_anything(body)
    read_anything(BODY | body)
