"""Calls and their results: all there, each once, in the order of the calls, whatever dialect they came in."""

import pytest

from m2forge.gateway.dialects.types import BadRequestError, order_results
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
    with pytest.raises(BadRequestError, match=reason) as caught:
        order_results(messages, "m")
    assert caught.value.field == field
