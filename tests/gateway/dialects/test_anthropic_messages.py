"""Anthropic's Messages: what the contract of dialects does not cover."""

from typing import Any, get_type_hints

import httpx2
import pytest
from anthropic import types
from hypothesis import given
from hypothesis import strategies as st

from m2forge.gateway.dialects.anthropic import messages as block_reader
from m2forge.gateway.dialects.anthropic.messages import COUNT_FIELDS, TOOL_FIELDS, AnthropicMessages
from m2forge.gateway.dialects.opaque_thinking import encode_thinking, sign
from m2forge.gateway.dialects.types import BadRequestError, CompletionOutput, CompletionRequest, Ending, callable_tools
from m2forge.records import JsonValue
from m2forge.text.message import Message, ToolCall
from m2forge.text.parser import CallFinished, Completion, ContentDelta, Event, ThinkingDelta
from tests.gateway.anthropic_client import connected, named_events_of
from tests.gateway.dialects.adapter_messages import BODY, CALLED, DISPLAYS, IMAGE, RESULT, TOOL, USE, USER
from tests.gateway.dialects.dialect_contract import USAGE, Arrivals, Body
from tests.gateway.dialects.draw_output import arrivals, outputs, play

DIALECT = AnthropicMessages()


def read(**changes: JsonValue) -> CompletionRequest:
    return DIALECT.read(BODY | changes)


def refused(**changes: JsonValue) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        read(**changes)
    return caught.value


def said(*messages: Body) -> tuple[Message, ...]:
    return read(messages=[*messages, USER]).messages[:-1]


def block_refused(role: str, block: JsonValue) -> BadRequestError:
    before: list[JsonValue] = [CALLED] if role == "user" else []
    return refused(messages=[*before, {"role": role, "content": [block]}, USER])


# -- fields -----------------------------------------------------------------------------------------------------------


def test_every_field_of_the_sdks_count_is_decided() -> None:
    assert set(get_type_hints(types.MessageCountTokensParams)) | {"context_management", "mcp_servers"} == COUNT_FIELDS


def test_every_field_of_the_sdks_blocks_is_known() -> None:
    known = {
        types.TextBlockParam: block_reader.TEXT_FIELDS,
        types.ToolUseBlockParam: block_reader.USE_FIELDS,
        types.ToolResultBlockParam: block_reader.RESULT_FIELDS,
        types.ThinkingBlockParam: block_reader.THINKING_FIELDS,
        types.ToolParam: TOOL_FIELDS,
    }
    for params, fields in known.items():
        assert set(get_type_hints(params)) == fields, params
    # What the SDK's answers hold may be sent back.
    assert set(types.TextBlock.model_fields) <= block_reader.TEXT_FIELDS
    assert set(types.ThinkingBlock.model_fields) <= block_reader.THINKING_FIELDS
    assert set(types.ToolUseBlock.model_fields) <= block_reader.USE_FIELDS


def test_a_count_is_of_what_would_be_sent() -> None:
    body: Body = {"model": "m2", "messages": [USER], "system": "Be brief.", "tools": [TOOL]}
    counted = DIALECT.read_count(body)
    sent = DIALECT.read(body | {"max_tokens": 1})
    assert (counted.messages, counted.tools, counted.model) == (sent.messages, sent.tools, sent.model)
    wrongs: list[Body] = [{"max_tokens": 5}, {"messages": []}, {"thinking": {"type": "deep"}}, {"workspace_id": ""}]
    for wrong in wrongs:
        with pytest.raises(BadRequestError):
            DIALECT.read_count(body | wrong)


# -- the conversation -------------------------------------------------------------------------------------------------


def test_blocks_become_messages() -> None:
    assistant: Body = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "someone's"},
            {"type": "text", "text": "Let me "},
            {"type": "text", "text": "see.", "citations": None},
            USE | {"caller": {"type": "direct"}},
        ],
    }
    user: Body = {
        "role": "user",
        "content": [RESULT, {"type": "text", "text": "And "}, {"type": "text", "text": "so?"}],
    }
    assert said(USER, assistant, user) == (
        Message("user", "Hi"),
        Message("assistant", "Let me see.", "Hm.", (ToolCall("look", {"at": 3}, "toolu_1"),)),
        Message("tool", "A cat.", tool_call_id="toolu_1"),
        Message("user", "And so?"),
    )


def test_assistants_in_a_row_are_one_turn() -> None:
    thought: Body = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}]}
    assert said(thought, {"role": "assistant", "content": "I see."}, {"role": "assistant", "content": []}) == (
        Message("assistant", "I see.", "Hm."),
    )
    assert said({"role": "assistant", "content": "I see."}, thought) == (
        Message("assistant", "I see."),
        Message("assistant", "", "Hm."),
    )


def test_a_system_message_may_stand_among_the_messages() -> None:
    assert said({"role": "system", "content": "Be brief."}) == (Message("system", "Be brief."),)


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ({"content": "no such file"}, "no such file"),
        ({"content": "no such file", "is_error": True}, "Error: no such file"),
        ({"content": "ERROR 5", "is_error": True}, "ERROR 5"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "is_error": False}, "ab"),
        ({"content": None, "is_error": True}, "Error"),
        ({"content": None}, ""),
    ],
)
def test_results_are_text_and_errors_say_so(result: Body, content: str) -> None:
    assert said(CALLED, {"role": "user", "content": [RESULT | result]})[-1].content == content


def test_stop_sequences_are_bounded() -> None:
    assert len(read(stop_sequences=["x"] * 256).stop_texts) == 256
    assert refused(stop_sequences=["x"] * 257).field == "stop_sequences"


def test_omitted_thinking_is_read_from_the_signature() -> None:
    block: Body = {"type": "thinking", "thinking": "", "signature": encode_thinking("Hm.")}
    assert said({"role": "assistant", "content": [block]}) == (Message("assistant", "", "Hm."),)
    stripped = block | {"signature": sign("msg_1")}
    assert said({"role": "assistant", "content": [stripped]}) == (Message("assistant"),)
    shown = block | {"thinking": "Well."}
    assert said({"role": "assistant", "content": [shown]}) == (Message("assistant", "", "Well."),)


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image"},
        {"type": "tool_reference", "tool_name": "look"},
        {"type": "document", "source": {"type": "text", "data": "", "media_type": "text/plain"}},
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "x", "citations": [{}]},
        {"type": "text", "text": None},
        {"type": None},
        RESULT | {"tool_use_id": "toolu_2"},
        RESULT | {"tool_use_id": ""},
        RESULT | {"toolset_name": "browser"},
        RESULT | {"is_error": "yes"},
        RESULT | {"content": [{"type": "image"}]},
        "Hi",
    ],
)
def test_blocks_that_users_cannot_send_are_refused(block: JsonValue) -> None:
    assert (block_refused("user", block).field or "").startswith("messages[1].content[0]")


@pytest.mark.parametrize(
    "block",
    [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "thinking", "thinking": "", "signature": "someone's"},
        {"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}},
        USE | {"caller": {"type": "code_execution_20250825", "tool_id": "x"}},
        USE | {"input": "{}"},
        USE | {"id": None},
        USE | {"toolset_name": "browser"},
        RESULT,
    ],
)
def test_blocks_that_assistants_cannot_send_are_refused(block: JsonValue) -> None:
    assert (block_refused("assistant", block).field or "").startswith("messages[0].content[0]")


def test_a_deferred_tool_is_described_where_it_is_referred_to() -> None:
    deferred: Body = {
        "name": "leap",
        "description": "Leaps.",
        "input_schema": {"type": "object"},
        "defer_loading": True,
    }
    reference: Body = {"type": "tool_reference", "tool_name": "leap"}
    found: Body = {"role": "user", "content": [RESULT | {"content": [reference, reference]}]}
    before, after = read(tools=[TOOL]), read(tools=[TOOL, deferred], messages=[USER, CALLED, found])
    assert after.tools == before.tools
    assert [tool.name for tool in callable_tools(after)] == ["look", "leap"]
    assert after.messages[-1].content.count("Leaps.") == 1
    assert after.messages[-1].content.endswith("}\nleap\n")
    unknown = refused(tools=[TOOL], messages=[USER, CALLED, found])
    assert unknown.field == "messages[2].content[0].content[0].tool_name"


def test_an_images_text_stands_where_the_image_was() -> None:
    content: list[JsonValue] = [{"type": "text", "text": "See "}, IMAGE, {"type": "text", "text": "!"}]
    assert said({"role": "user", "content": content}) == (Message("user", "See [image]!"),)
    assert said(CALLED, {"role": "user", "content": [RESULT | {"content": content}]})[-1].content == "See [image]!"
    assert refused(system=[IMAGE]).field == "system[0].type"


def test_a_whole_answers_text_has_no_citations() -> None:
    output = CompletionOutput(Completion("", "So.", (), (), closed=True), Ending.STOP)
    body = DIALECT.response(CompletionRequest(()), "msg_1", 5, [output], USAGE)
    assert body["content"] == [{"type": "text", "text": "So."}]


# -- responses --------------------------------------------------------------------------------------------------------


def test_the_client_reads_a_count() -> None:
    user: types.MessageParam = {"role": "user", "content": "Hi"}
    with connected() as (client, wire):
        wire.handle = lambda body: httpx2.Response(200, json=DIALECT.count(len(DIALECT.read_count(body).messages)))
        assert client.messages.count_tokens(model="m2", messages=[user], system="Be brief.").input_tokens == 2


# -- events -----------------------------------------------------------------------------------------------------------


def stream_of(output: CompletionOutput, pieces: Arrivals, display: str = "summarized") -> list[dict[str, object]]:
    stream = DIALECT.stream(CompletionRequest((), model="m2", echo={"display": display}), "msg_1", 5)
    return named_events_of(b"".join(play(stream, [output], pieces, USAGE)))


@given(st.data(), outputs(), st.sampled_from(DISPLAYS))
def test_blocks_are_told_one_after_the_other(data: st.DataObject, output: CompletionOutput, display: str) -> None:
    events = stream_of(output, data.draw(arrivals([output])), display)
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
    request = CompletionRequest((), echo={"display": display})
    whole: Any = DIALECT.response(request, "msg_1", 5, [output], USAGE)["content"]
    starts: list[Any] = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in starts] == [block["type"] for block in whole]


def test_the_events_of_an_answer() -> None:
    call = ToolCall("look", {"at": 3}, "toolu_1")
    output = CompletionOutput(Completion("Hm.", "So. Yes.", (call,), (), closed=True), Ending.TOOL_CALLS)
    events: list[Event] = [ThinkingDelta("Hm."), ContentDelta("So."), CallFinished(call), ContentDelta(" Yes.")]
    whole = stream_of(output, [(0, [event], []) for event in events])
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
