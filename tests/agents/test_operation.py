"""Operations keep the task and every result with its call, are pure, and change nothing when applied twice."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.agents.client import Reply
from m2forge.agents.config import DropToolOutputConfig, OperationConfig, SlidingWindowConfig, SummariseConfig
from m2forge.agents.operation import (
    NOTES_HEAD,
    DropToolOutput,
    Operation,
    SlidingWindow,
    Summarise,
    View,
    find_operation,
    make_operation,
    require_valid,
    split_turns,
    task_messages,
)
from m2forge.config import build
from m2forge.errors import ConfigError, NotFoundError, RecordError
from m2forge.text.message import Message, ToolCall

CONFIGS: list[OperationConfig] = [
    SlidingWindowConfig(max_turns=3, keep_turns=2),
    SlidingWindowConfig(max_turns=1, keep_turns=1),
    SummariseConfig(threshold=0.2),
    SummariseConfig(threshold=0.1, keep_turns=3),
    DropToolOutputConfig(),
    DropToolOutputConfig(max_share=0.1, keep_share=0.01),
]
operations = st.sampled_from(CONFIGS).map(make_operation)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Message, ...]:
    """As a loop makes them: turns of calls with all their results, or of words with a user's message."""
    messages = [Message("system", "s")] if draw(st.booleans()) else []
    messages.append(Message("user", "task"))
    messages += [Message("user", f"{NOTES_HEAD}old")] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(0, 6))):
        ids = [f"{turn}-{number}" for number in range(draw(st.integers(0, 3)))]
        calls = tuple(ToolCall("f", {"x": 1}, id) for id in ids)
        messages.append(Message("assistant", f"a{turn}", "t", calls))
        messages += [Message("tool", "r" * draw(st.integers(0, 400)), tool_call_id=id) for id in ids]
        messages += [Message("user", "go on")] if not ids else []
    return tuple(messages)


def view(messages: Sequence[Message], tokens_per_char: float = 1.0) -> View:
    num_chars = sum(len(message.content) for message in messages)
    return View(tuple(messages), round(num_chars * tokens_per_char), 1000, tokens_per_char)


async def notes(suffix: Sequence[Message]) -> Reply:
    return Reply("id", Message("assistant", " notes "), is_cut=False, num_prompt=1, num_sampled=1)


def inputs_of(operation: Operation, messages: Sequence[Message]) -> Any:
    return asyncio.run(operation.prepare(view(messages), notes))


@given(conversations(), st.lists(operations, max_size=4))
def test_operations_keep_what_must_stay(messages: tuple[Message, ...], chain: list[Operation]) -> None:
    for operation in chain:
        inputs = inputs_of(operation, messages)
        changed = operation.apply(messages, inputs)
        require_valid(operation.name, messages, changed)
        assert operation.apply(messages, inputs) == changed
        assert operation.apply(changed, inputs) == changed
        assert changed[: len(task_messages(messages))] == tuple(task_messages(messages))
        assert split_turns(changed)[1][-1:] == split_turns(messages)[1][-1:]
        messages = changed


@given(conversations(), operations, st.integers(-3, 9))
def test_the_model_may_call_them_with_any_number(messages: tuple[Message, ...], operation: Operation, n: int) -> None:
    arguments: Any = {"keep_turns": n, "summary": " what I know ", "keep_results": n}
    changed = operation.apply(messages, operation.read_call(view(messages), arguments))
    require_valid(operation.name, messages, changed)
    # What its other calls of that turn said, the model has not seen yet.
    assert split_turns(changed)[1][-1:] == split_turns(messages)[1][-1:]


@given(conversations(), st.floats(0.1, 3))
def test_dropped_output_leaves_at_most_its_share(messages: tuple[Message, ...], tokens_per_char: float) -> None:
    operation = DropToolOutput(DropToolOutputConfig())
    seen = view(messages, tokens_per_char)
    if not operation.is_due(seen):
        return
    changed = operation.apply(messages, asyncio.run(operation.prepare(seen, notes)))
    _, turns = split_turns(changed)
    old = [message for turn in turns[:-1] for message in turn if message.role == "tool"]
    whole = [message for message in old if "dropped" not in message.content and len(message.content) > 60]
    assert sum(len(message.content) for message in whole) * tokens_per_char <= 200
    assert not operation.is_due(view(changed, tokens_per_char)) or turns[-1][-1].role == "tool"


def turns(number: int, content: str = "r") -> list[Message]:
    return [
        message
        for turn in range(number)
        for message in (
            Message("assistant", f"a{turn}", tool_calls=(ToolCall("f", {}, f"c{turn}"),)),
            Message("tool", content, tool_call_id=f"c{turn}"),
        )
    ]


TASK = [Message("system", "s"), Message("user", "task")]


def test_a_window_slides_when_it_is_full() -> None:
    window = SlidingWindow(SlidingWindowConfig(max_turns=4, keep_turns=2))
    assert not window.is_due(view([*TASK, *turns(4)]))
    assert window.is_due(view([*TASK, *turns(5)]))
    assert window.apply([*TASK, *turns(5)], {"keep_turns": 2}) == (*TASK, *turns(5)[-4:])


def test_notes_stand_for_what_was_before() -> None:
    operation = Summarise(SummariseConfig(threshold=0.5, keep_turns=1))
    messages = [*TASK, Message("user", f"{NOTES_HEAD}old"), *turns(3, "r" * 200)]
    assert operation.is_due(view(messages))
    assert not operation.is_due(view(messages[:4], 9.0))
    changed = operation.apply(messages, {"summary": "new"})
    assert changed == (*TASK, Message("user", f"{NOTES_HEAD}new"), *messages[-2:])


def test_old_output_is_dropped_and_the_last_stays() -> None:
    operation = DropToolOutput(DropToolOutputConfig(max_share=0.3, keep_share=0.3))
    messages = [*TASK, *turns(4, "r" * 150)]
    assert not operation.is_due(view([*TASK, *turns(2, "r" * 150)]))
    assert inputs_of(operation, messages) == {"indexes": [3, 5]}
    changed = operation.apply(messages, {"indexes": [3, 5]})
    assert [message.content for message in changed if message.role == "tool"] == [
        *["[150 characters of output dropped]"] * 2,
        *["r" * 150] * 2,
    ]
    assert operation.read_call(view(messages), {"keep_results": 0}) == {"indexes": [3, 5, 7]}, "9 is not seen yet"
    assert operation.read_call(view(messages), {"keep_results": 2}) == {"indexes": [3]}
    huge = [*TASK, *turns(1, "r" * 900)]
    assert not operation.is_due(view(huge)), "the model has not seen it yet"


def test_an_operation_that_breaks_the_conversation_is_refused() -> None:
    whole = [*TASK, *turns(2)]
    require_valid("x", whole, whole)
    for broken in (whole[1:], [*TASK, *turns(2)[1:]], whole[:-1], [*whole[:3], *whole[4:]], [TASK[0], *whole[2:]]):
        with pytest.raises(RecordError, match="operation x"):
            require_valid("x", whole, broken)


def test_operations_are_found_by_what_a_log_says() -> None:
    for config in CONFIGS:
        operation = make_operation(config)
        assert find_operation(operation.name, operation.parameters).parameters == operation.parameters
        assert find_operation(operation.name, operation.parameters, [operation]) is operation
    with pytest.raises(NotFoundError, match="did you mean 'summarise'"):
        find_operation("summarize", {})
    with pytest.raises(ConfigError):
        build(SlidingWindowConfig, {"max_turns": 2, "keep_turns": 3})
    with pytest.raises(ConfigError):
        build(SummariseConfig, {"keep_turns": 0})
    with pytest.raises(ConfigError):
        build(DropToolOutputConfig, {"max_share": 0.1})
