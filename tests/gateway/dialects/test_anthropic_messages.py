"""What Messages makes of a request: every field of the SDK is decided, and nothing else gets through."""

import random
from typing import get_type_hints

import pytest
from anthropic import types
from anthropic.types import message_create_params
from hypothesis import given
from hypothesis import strategies as st

from m2forge.gateway.dialects.anthropic import messages as block_reader
from m2forge.gateway.dialects.anthropic.messages import (
    ALLOWED,
    COUNT_FIELDS,
    FIELDS,
    READ,
    REFUSED,
    TOOL_FIELDS,
    AnthropicMessages,
)
from m2forge.gateway.dialects.opaque_thinking import seal, sign
from m2forge.gateway.dialects.types import Ask, AskError
from m2forge.records import JsonValue, Sampling
from m2forge.text.message import Message, Tool, ToolCall
from tests.gateway.dialects.draw_answer import json_values
from tests.gateway.mutate import mutated

Body = dict[str, JsonValue]

USER: Body = {"role": "user", "content": "Hi"}
BODY: Body = {"model": "m2", "max_tokens": 64, "messages": [USER]}
CACHE: Body = {"type": "ephemeral", "ttl": "1h"}
TOOL: Body = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
USE: Body = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 3}}
CALLED: Body = {"role": "assistant", "content": [USE]}
RESULT: Body = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "A cat."}
EXTENSIONS = {"context_management", "mcp_servers", "temperature", "top_k", "top_p"}
"""Fields that the vendor takes, now or in its trials, though the SDK's type has them not."""
GOOD: dict[str, list[JsonValue]] = {
    "cache_control": [CACHE, {"type": "ephemeral"}],
    "context_management": [{}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}],
    "max_tokens": [1, 2**31 - 1],
    "messages": [[USER]],
    "metadata": [{}, {"user_id": "me"}, {"user_id": None}],
    "model": ["m2"],
    "output_config": [{}, {"effort": "high", "format": None}],
    "service_tier": ["auto", "standard_only"],
    "speed": ["standard"],
    "stop_sequences": [[], ["END", "\n"]],
    "stream": [True, False],
    "system": ["", "Be brief.", [], [{"type": "text", "text": "Be brief.", "cache_control": CACHE}]],
    "temperature": [0, 1, 0.5],
    "thinking": [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive", "display": "omitted"}],
    "tool_choice": [{"type": "auto", "disable_parallel_tool_use": False}, {"type": "none"}],
    "tools": [[], [TOOL], [TOOL | {"type": "custom", "cache_control": CACHE, "strict": False, "defer_loading": False}]],
    "top_k": [0, 40],
    "top_p": [1, 0.1],
}
BAD: dict[str, list[JsonValue]] = {
    "cache_control": ["ephemeral", {"type": "forever"}, {"type": "ephemeral", "ttl": "2h"}, {"kind": "ephemeral"}],
    "container": ["box", {"id": "box"}],
    "context_management": [{"edits": [{"type": "clear_tool_uses_20250919"}]}, {"edits": [None]}, {"edit": []}, []],
    "diagnostics": [{"previous_message_id": None}],
    "inference_geo": ["us"],
    "max_tokens": [None, 0, 1.5, "5", True, 2**31],
    "mcp_servers": [[]],
    "messages": [None, [], "Hi", {}, [None], ["Hi"], [USER, {"role": "assistant", "content": "I"}], [{"role": "user"}]],
    "metadata": [[], {"user_id": 5}, {"user": "me"}],
    "model": [None, "", 5],
    "output_config": [{"effort": "low"}, {"format": {"type": "json_schema", "schema": {}}}, {"effort": "most"}, ""],
    "service_tier": ["priority"],
    "speed": ["fast", 1],
    "stop_sequences": ["END", [""], [5]],
    "stream": ["yes", 1],
    "system": [5, {}, [5], [{"type": "image", "source": {}}], [{"type": "text"}]],
    "temperature": [-0.1, 1.1, "0", True],
    "thinking": [
        {"type": "disabled"},
        {"type": "between_tools"},
        {"type": "enabled"},
        {"type": "enabled", "budget_tokens": 5},
        {"type": "adaptive", "budget_tokens": 2048},
        {"type": "adaptive", "display": "all"},
        {"type": "deep"},
        {},
        True,
    ],
    "tool_choice": [
        {"type": "any"},
        {"type": "tool", "name": "look"},
        {"type": "auto", "disable_parallel_tool_use": True},
        {"type": "auto", "name": "look"},
        {"type": "maybe"},
        {},
        "auto",
    ],
    "tools": [
        {},
        [None],
        [TOOL, TOOL],
        [{"type": "web_search_20250305", "name": "web_search"}],
        [{"type": "bash_20250124", "name": "bash"}],
        [{"name": "look"}],
        [TOOL | {"name": ""}],
        [TOOL | {"strict": True}],
        [TOOL | {"defer_loading": True}],
        [TOOL | {"input_examples": [{}]}],
        [TOOL | {"allowed_callers": ["code_execution_20260120"]}],
        [TOOL | {"input_schema": [1]}],
        [TOOL | {"parameters": {}}],
    ],
    "top_k": [-1, 0.5],
    "top_p": [0, 1.1],
    "user_profile_id": ["me"],
    "workspace_id": ["wrkspc_1"],
}


def read(**changes: JsonValue) -> Ask:
    return AnthropicMessages().read(BODY | changes)


def refused(**changes: JsonValue) -> AskError:
    with pytest.raises(AskError) as caught:
        read(**changes)
    return caught.value


def said(*messages: Body) -> tuple[Message, ...]:
    return read(messages=[*messages, USER]).messages[:-1]


def block_refused(role: str, block: JsonValue) -> AskError:
    before: list[JsonValue] = [CALLED] if role == "user" else []
    return refused(messages=[*before, {"role": role, "content": [block]}, USER])


# -- fields -----------------------------------------------------------------------------------------------------------


def test_every_field_of_the_sdk_is_decided_once() -> None:
    params = message_create_params
    sdk = {
        *get_type_hints(params.MessageCreateParamsStreaming),
        *get_type_hints(params.MessageCreateParamsNonStreaming),
    }
    assert sdk | EXTENSIONS == FIELDS
    assert not READ & ALLOWED
    assert not (READ | ALLOWED) & REFUSED.keys()
    assert GOOD.keys() == READ | ALLOWED
    assert BAD.keys() == FIELDS


def test_every_field_of_the_sdks_count_is_decided() -> None:
    assert set(get_type_hints(types.MessageCountTokensParams)) | {"context_management", "mcp_servers"} == COUNT_FIELDS


@pytest.mark.parametrize("name", sorted(READ | ALLOWED))
def test_fields_take_good_values_and_null(name: str) -> None:
    for value in GOOD[name]:
        read(**{name: value})
    if name not in ("model", "messages", "max_tokens"):
        assert read(**{name: None}) == read()


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_fields_refuse_bad_values_by_name(name: str) -> None:
    for value in BAD[name]:
        error = refused(**{name: value})
        assert str(error).startswith(error.field or "?"), (value, str(error))
        assert (error.field or "").startswith(name), (value, str(error))


def test_refused_fields_may_be_null() -> None:
    assert read(**dict.fromkeys(REFUSED)) == read()


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


def test_an_unknown_field_is_refused_with_the_near_name() -> None:
    assert str(refused(max_token=5)) == "max_token: unknown field; did you mean 'max_tokens'?"
    assert refused(messages=[USER | {"contents": "x"}]).field == "messages[0].contents"


def test_a_whole_request_is_read() -> None:
    ask = read(
        system="Be brief.",
        tools=[TOOL],
        stop_sequences=["a", "b"],
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        tool_choice={"type": "none"},
        thinking={"type": "adaptive", "display": "omitted"},
        stream=True,
    )
    assert ask == Ask(
        messages=(Message("system", "Be brief."), Message("user", "Hi")),
        tools=(Tool("look", "Looks.", {"type": "object"}),),
        max_tokens=64,
        sampling=Sampling(temperature=0.5, top_p=0.9, top_k=7),
        stop_texts=("a", "b"),
        is_streamed=True,
        tool_choice="none",
        model="m2",
        echo={"display": "omitted"},
    )


def test_a_count_is_of_what_would_be_sent() -> None:
    body: Body = {"model": "m2", "messages": [USER], "system": "Be brief.", "tools": [TOOL]}
    counted = AnthropicMessages().read_count(body)
    sent = AnthropicMessages().read(body | {"max_tokens": 1})
    assert (counted.messages, counted.tools, counted.model) == (sent.messages, sent.tools, sent.model)
    wrongs: list[Body] = [{"max_tokens": 5}, {"messages": []}, {"thinking": {"type": "disabled"}}, {"workspace_id": ""}]
    for wrong in wrongs:
        with pytest.raises(AskError):
            AnthropicMessages().read_count(body | wrong)


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
    block: Body = {"type": "thinking", "thinking": "", "signature": seal("Hm.")}
    assert said({"role": "assistant", "content": [block]}) == (Message("assistant", "", "Hm."),)
    stripped = block | {"signature": sign("msg_1")}
    assert said({"role": "assistant", "content": [stripped]}) == (Message("assistant"),)
    shown = block | {"thinking": "Well."}
    assert said({"role": "assistant", "content": [shown]}) == (Message("assistant", "", "Well."),)


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}},
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


# -- anything at all --------------------------------------------------------------------------------------------------

WHOLE: Body = BODY | {
    "system": [{"type": "text", "text": "Be brief.", "cache_control": CACHE}],
    "messages": [
        USER,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, USE]},
        {"role": "user", "content": [RESULT | {"is_error": True}, {"type": "text", "text": "So?"}]},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 2048},
    "stop_sequences": ["END"],
    "metadata": {"user_id": "me"},
    "output_config": {"effort": "high"},
    "temperature": 0.5,
    "top_k": 3,
}


def read_anything(body: Body) -> None:
    for read in (AnthropicMessages().read, AnthropicMessages().read_count):
        message = ""
        try:
            read(body)
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
