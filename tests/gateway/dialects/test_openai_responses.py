"""Requests of Responses: what the contract of dialects does not cover."""

import json
from typing import cast, get_type_hints

import pytest
from openai.types import responses
from openai.types.responses import response_input_item_param

from m2forge.gateway.dialects.opaque_thinking import encode_thinking
from m2forge.gateway.dialects.openai import responses_input as item_reader
from m2forge.gateway.dialects.openai.responses import OpenAIResponses
from m2forge.gateway.dialects.openai.responses_input import HIDDEN, TOOL_FIELDS, find_items
from m2forge.gateway.dialects.types import (
    BadRequestError,
    CompletionOutput,
    CompletionRequest,
    Ending,
    ReadOptions,
    UnknownItemError,
)
from m2forge.records import JsonValue
from m2forge.text.message import Message, ToolCall
from m2forge.text.parser import CallFinished, Completion
from tests.gateway.anthropic_client import named_events_of
from tests.gateway.dialects.adapter_responses import BODY, CALL, CUSTOM, EVENT, NAMESPACE, RESULT, THOUGHT, TOOL, USER
from tests.gateway.dialects.dialect_contract import USAGE, Body
from tests.gateway.dialects.draw_output import play


def read(**changes: JsonValue) -> CompletionRequest:
    return OpenAIResponses().read(BODY | changes)


def refused(**changes: JsonValue) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        read(**changes)
    return caught.value


def said(*items: Body) -> tuple[Message, ...]:
    return read(input=list(items)).messages


# -- fields -----------------------------------------------------------------------------------------------------------


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
        responses.ResponseInputImageParam: item_reader.IMAGE_FIELDS,
        responses.CustomToolParam: item_reader.CUSTOM_FIELDS,
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
    word: Body = {"encrypted_content": encode_thinking("word")}
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
        {"type": "item_reference", "id": ""},
        {"type": "additional_tools", "tools": []},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": ["message"]},
        {"role": "tool", "content": "x"},
        {"role": None, "content": "x"},
        USER | {"content": [{"type": "input_image", "url": "x"}]},
        USER | {"content": [{"type": "input_file", "file_id": "x"}]},
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
        CALL | {"namespace": 5},
        {"type": "custom_tool_call", "call_id": "call_2", "name": "patch"},
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


# -- tools that are no functions --------------------------------------------------------------------------------------


def offered(name: str, text: str) -> tuple[CompletionRequest, CompletionOutput]:
    request = read(tools=[TOOL, CUSTOM, NAMESPACE])
    call = ToolCall(name, {"input": text} if name.endswith("patch") else {"at": 3}, "call_1")
    return request, CompletionOutput(Completion("", "", (call,), (), closed=True), Ending.TOOL_CALLS)


def test_the_model_is_shown_functions_alone() -> None:
    look, patch, team_look, team_patch = read(tools=[TOOL, CUSTOM, NAMESPACE]).tools
    assert [tool.name for tool in (look, patch, team_look, team_patch)] == ["look", "patch", "team.look", "team.patch"]
    assert (team_look.description, team_patch.description) == ("Helpers.\n\nLooks.", "Patches.")
    properties = patch.parameters["properties"]
    assert isinstance(properties, dict)
    assert properties.keys() == {"input"}
    assert 'start: "x"' in str(properties)
    asked = read(tools=[TOOL, {"type": "web_search"}])
    assert [tool.name for tool in asked.tools] == ["look"]


@pytest.mark.parametrize(
    ("name", "kind", "fields"),
    [
        ("look", "function_call", {"name": "look", "arguments": '{"at": 3}'}),
        ("patch", "custom_tool_call", {"name": "patch", "input": "*** x\n"}),
        ("team.look", "function_call", {"name": "look", "namespace": "team", "arguments": '{"at": 3}'}),
        ("team.patch", "custom_tool_call", {"name": "patch", "namespace": "team", "input": "*** x\n"}),
    ],
)
def test_a_call_has_the_form_of_its_tool(name: str, kind: str, fields: Body) -> None:
    request, output = offered(name, "*** x\n")
    whole = OpenAIResponses().response(request, "resp_1", 5, [output], USAGE)
    (item,) = cast("list[dict[str, JsonValue]]", whole["output"])
    assert item["type"] == kind
    assert fields.items() <= item.items()
    responses.Response.model_validate_json(json.dumps(whole), strict=True)
    stream = OpenAIResponses().stream(request, "resp_1", 5)
    events = named_events_of(
        b"".join(play(stream, [output], [(0, [CallFinished(output.completion.tool_calls[0])], [])], USAGE))
    )
    for event in events:
        EVENT.validate_json(json.dumps(event), strict=True)
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == [item]
    sent_back = said(USER, item, {"type": f"{kind}_output", "call_id": "call_1", "output": "ok"})
    assert sent_back[1] == output.completion.message()


def test_tools_that_change_within_a_conversation_are_refused() -> None:
    error = refused(input=[USER, {"type": "additional_tools", "tools": []}])
    assert "such as 'policy'" in str(error)


# -- references to items ----------------------------------------------------------------------------------------------


def test_references_resolve_to_the_recorded_items() -> None:
    calls = (ToolCall("look", {"at": 3}, "call_1"), ToolCall("team.look", {}, "call_2"))
    completion = Completion("Hm.", "So.", calls, (), closed=True)
    ids = ["rs_resp_1_0", "msg_resp_1_1", "fc_resp_1_0", "msg_resp_1_3", "fc_resp_1_1"]
    references: list[Body] = [{"type": "item_reference", "id": id} for id in ids]
    results = [RESULT, RESULT | {"call_id": "call_2"}]
    body = BODY | {"input": [USER, *references, *results]}
    with pytest.raises(UnknownItemError) as caught:
        OpenAIResponses().read(body)
    assert caught.value.ids == tuple(ids)
    items = find_items(ids, {"resp_1": completion}.get)
    asked = OpenAIResponses().read(body, ReadOptions(items=items))
    assert asked.messages[1] == completion.message()
    assert find_items(["fc_resp_1_2", "rs_resp_2_0", "x", f"fc_resp_1_{'9' * 5000}"], {"resp_1": completion}.get) == {}
    twice = refused(input=[references[0], USER, references[0]])
    assert twice.field == "input[2]"
