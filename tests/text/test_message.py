"""Messages and tools in OpenAI's form: read back as written, and refused with the place of the mistake."""

from typing import Any

import pytest
from hypothesis import given

from m2forge.errors import FormatError
from m2forge.text.message import (
    Message,
    Tool,
    ToolCall,
    message_from_openai,
    message_to_openai,
    tool_from_openai,
    tool_to_openai,
)
from tests.text.draw import TOOLS, assistants, nested


@given(assistants((), (), ()))
def test_an_assistant_message_survives_openai_form(message: Message) -> None:
    assert message_from_openai(message_to_openai(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Message("system", "s"),
        Message("user", ""),
        Message("tool", "result", tool_call_id="call_1"),
        Message("assistant", tool_calls=(ToolCall("f", {"a": [1, None]}, "call_1"),)),
    ],
)
def test_other_messages_survive_openai_form(message: Message) -> None:
    assert message_from_openai(message_to_openai(message)) == message


def test_what_clients_write_differently_is_understood() -> None:
    data: Any = {
        "role": "assistant",
        "content": None,
        "reasoning": "why",
        "refusal": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
            {"id": "2", "type": "function", "function": {"name": "g", "arguments": ""}},
        ],
    }
    calls = (ToolCall("f", {"a": 1}, "1"), ToolCall("g", {}, "2"))
    assert message_from_openai(data) == Message("assistant", "", "why", calls)
    parts: Any = {"role": "developer", "content": [{"type": "text", "text": "a"}, "b"], "name": "x"}
    assert message_from_openai(parts) == Message("system", "ab")


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_survives_openai_form(tool: Tool) -> None:
    assert tool_from_openai(tool_to_openai(tool)) == tool
    function: Any = tool_to_openai(tool)["function"]
    assert tool_from_openai(function) == tool


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], r"message: expected an object, received \[\]"),
        ({"content": "x"}, "role: expected one of .* received None"),
        ({"role": "ai"}, "role: expected one of .* received 'ai'"),
        ({"role": "user", "content": 5}, "content: expected text, null or a list of text parts, received 5"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"content\[0\]: expected a part of type text"),
        ({"role": "user", "tool_calls": [{"name": "f"}]}, "only assistants have"),
        ({"role": "assistant", "reasoning_content": 1}, "reasoning_content: expected text"),
        ({"role": "assistant", "tool_calls": {}}, "tool_calls: expected a list"),
        ({"role": "assistant", "tool_calls": [3]}, r"tool_calls\[0\]: expected an object, received 3"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, r"tool_calls\[0\].name: expected text"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            r"tool_calls\[0\].arguments: not JSON .* received '{'",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a":' * 50_000}}]},
            r"tool_calls\[0\].arguments: not JSON \(nested deeper than 100\)",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            r"tool_calls\[0\].arguments: expected an object",
        ),
        ({"role": "tool", "tool_call_id": 7}, "tool_call_id: expected text, received 7"),
    ],
)
def test_a_message_that_is_none_is_refused(data: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        message_from_openai(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "tool: expected an object"),
        ({"type": "web_search"}, "type: expected 'function', received 'web_search'"),
        ({"type": "function", "function": []}, "function: expected an object"),
        ({"type": "function", "function": {"name": ""}}, "name: expected text"),
        ({"name": "f", "parameters": "x"}, "tool f: parameters: expected a JSON schema"),
        ({"name": "f", "parameters": {"maximum": float("inf")}}, "tool f: parameters: not a JSON value"),
        ({"name": "f", "parameters": {"a": nested(101)}}, "tool f: parameters: nested deeper than 100"),
        ({"name": "f", "parameters": {"a": nested(50_000)}}, "tool f: parameters: nested deeper than 100"),
    ],
)
def test_a_tool_that_is_none_is_refused(data: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        tool_from_openai(data)


def test_a_message_made_by_hand_is_checked_too() -> None:
    with pytest.raises(FormatError, match="received 'robot'"):
        Message("robot")  # type: ignore[arg-type]  # a user's mistake
    with pytest.raises(FormatError, match="only results of tools have"):
        Message("user", "x", tool_call_id="1")
