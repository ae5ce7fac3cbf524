"""Calls and their results: all there, each once, in the order of the calls, whatever dialect they came in."""

import pytest

from m2forge.gateway.dialects.anthropic.messages import AnthropicMessages
from m2forge.gateway.dialects.openai.chat import OpenAIChat
from m2forge.gateway.dialects.openai.responses import OpenAIResponses
from m2forge.gateway.dialects.types import AskError, Dialect, order_results
from m2forge.records import JsonValue
from m2forge.text.message import Message, ToolCall

Body = dict[str, JsonValue]
ONE, TWO = ToolCall("look", {}, "call_1"), ToolCall("look", {}, "call_2")
USER, CALLS = Message("user", "Hi"), Message("assistant", tool_calls=(ONE, TWO))
FIRST, SECOND = Message("tool", "one", tool_call_id="call_1"), Message("tool", "two", tool_call_id="call_2")


def test_results_are_put_in_the_order_of_their_calls() -> None:
    other = Message("assistant", tool_calls=(ONE,))
    for messages in ([USER, CALLS, SECOND, FIRST, USER], [USER, CALLS, FIRST, SECOND, USER]):
        assert order_results([*messages, other, FIRST]) == (USER, CALLS, FIRST, SECOND, USER, other, FIRST)


@pytest.mark.parametrize(
    ("messages", "reason", "field"),
    [
        ([USER, CALLS, SECOND], "'call_1' has no result", "m"),
        ([USER, CALLS, FIRST, USER], "'call_2' has no result", "m"),
        ([USER, CALLS, USER], "'call_1' has no result", "m"),
        ([USER, CALLS], "'call_1' has no result", "m"),
        ([USER, Message("assistant", tool_calls=(ONE,)), CALLS, FIRST, SECOND], "'call_1' has no result", "m"),
        ([USER, Message("assistant", tool_calls=(ONE, ONE)), FIRST], "have the same id", "m"),
        ([USER, CALLS, FIRST, FIRST, SECOND], "'call_1', which was answered before", "m[3]"),
        ([USER, CALLS, FIRST, SECOND, Message("tool", tool_call_id="call_3")], "did not make", "m[4]"),
        ([USER, FIRST], "'call_1', which the assistant did not make", "m[1]"),
        ([FIRST], "did not make", "m[0]"),
    ],
)
def test_what_is_missing_or_too_much_is_refused(messages: list[Message], reason: str, field: str) -> None:
    with pytest.raises(AskError, match=reason) as caught:
        order_results(messages, "m")
    assert caught.value.field == field


CHAT_CALL: Body = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
RESPONSES_CALL: Body = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"}
USE: Body = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
SAID: Body = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("dialect", "name", "called", "result"),
    [
        (
            OpenAIChat(),
            "messages",
            [{"role": "assistant", "tool_calls": [CHAT_CALL, CHAT_CALL | {"id": "call_2"}]}],
            {"role": "tool", "tool_call_id": "call_2", "content": "two"},
        ),
        (
            OpenAIResponses(),
            "input",
            [RESPONSES_CALL, RESPONSES_CALL | {"call_id": "call_2"}],
            {"type": "function_call_output", "call_id": "call_2", "output": "two"},
        ),
        (
            AnthropicMessages(),
            "messages",
            [{"role": "assistant", "content": [USE, USE | {"id": "call_2"}]}],
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_2", "content": "two"}]},
        ),
    ],
    ids=["chat", "responses", "messages"],
)
def test_every_dialect_demands_all_results(dialect: Dialect, name: str, called: list[Body], result: Body) -> None:
    body: Body = {"model": "m", "max_tokens": 9} if name == "messages" else {"model": "m"}
    for sent in ([SAID, *called, result], [SAID, *called, SAID], [SAID, *called, result, SAID]):
        with pytest.raises(AskError, match="'call_1' has no result") as caught:
            dialect.read(body | {name: sent})
        assert caught.value.field == name
