"""Requests of Responses: what the contract of dialects does not cover."""

from typing import get_type_hints

import pytest
from openai.types import responses
from openai.types.responses import response_input_item_param

from m2forge.gateway.dialects.opaque_thinking import seal
from m2forge.gateway.dialects.openai import responses_input as item_reader
from m2forge.gateway.dialects.openai.responses import OpenAIResponses
from m2forge.gateway.dialects.openai.responses_input import HIDDEN, TOOL_FIELDS
from m2forge.gateway.dialects.types import Ask, AskError
from m2forge.records import JsonValue
from m2forge.text.message import Message, ToolCall
from tests.gateway.dialects.adapter_responses import BODY, CALL, RESULT, THOUGHT, TOOL, USER
from tests.gateway.dialects.dialect_contract import Body


def read(**changes: JsonValue) -> Ask:
    return OpenAIResponses().read(BODY | changes)


def refused(**changes: JsonValue) -> AskError:
    with pytest.raises(AskError) as caught:
        read(**changes)
    return caught.value


def said(*items: Body) -> tuple[Message, ...]:
    return read(input=list(items)).messages


# -- fields -----------------------------------------------------------------------------------------------------------


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
