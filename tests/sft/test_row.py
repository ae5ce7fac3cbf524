"""Row formats: what each becomes, how it is detected, and what is refused."""

import json

import pytest

from m2forge.records import JsonValue
from m2forge.sft.report import Problem, Rejection
from m2forge.sft.row import RowFormat, detect_format, to_openai

USER, ASSISTANT = {"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [USER, ASSISTANT], "id": 7}, [USER, ASSISTANT]),
        ({"conversations": [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5"}]}, [USER, ASSISTANT]),
        (
            {
                "conversations": [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5"}],
                "system": "Be brief.",
            },
            [SYSTEM, USER, ASSISTANT],
        ),
        ({"conversation": [USER, ASSISTANT], "messages": None}, [USER, ASSISTANT]),
        (
            {"conversations": [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5", "weight": 0}]},
            [USER, {**ASSISTANT, "weight": 0}],
        ),
        ({"instruction": "2 + 3?", "output": "5"}, [USER, ASSISTANT]),
        ({"instruction": "2 + 3?", "input": "", "output": "5", "system": "Be brief."}, [SYSTEM, USER, ASSISTANT]),
        (
            {"instruction": "Add.", "input": "2, 3", "output": "5"},
            [{"role": "user", "content": "Add.\n\n2, 3"}, ASSISTANT],
        ),
        ({"prompt": "2 + 3?", "completion": "5"}, [USER, ASSISTANT]),
        (
            {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]},
            [{**USER, "train": False}, {**ASSISTANT, "train": False}, {**USER, "train": False}, ASSISTANT],
        ),
    ],
)
def test_a_row_becomes_messages(row: dict[str, JsonValue], messages: JsonValue) -> None:
    assert to_openai(row, "a:1")["messages"] == messages


def test_a_function_call_becomes_tool_calls() -> None:
    call = {"name": "add", "arguments": {"a": 2, "b": 3}}
    turns: JsonValue = [
        {"from": "human", "value": "2 + 3?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "5"},
        {"from": "gpt", "value": "5"},
    ]
    row = to_openai({"conversations": turns, "tools": "[]"}, "a:1")
    assert row["messages"] == [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "5"},
        ASSISTANT,
    ]
    assert row["tools"] == "[]"


def test_messages_are_preferred_to_other_columns() -> None:
    assert detect_format(["prompt", "completion", "messages"]) == "messages"
    assert detect_format(["instruction", "output", "prompt"]) == "alpaca"
    assert detect_format(["instruction", "prompt", "text"]) is None


@pytest.mark.parametrize(
    ("row", "row_format", "problem", "what"),
    [
        (
            {"text": "x", "id": 1},
            None,
            Problem.MISSING_KEY,
            "no 'messages' among the keys text, id; accepted are messages;",
        ),
        ({"conversations": "x"}, None, Problem.BAD_VALUE, 'conversations must be a list of turns, received "x"'),
        (
            {"conversations": [{"value": "x"}]},
            None,
            Problem.MISSING_KEY,
            "conversations[0] has neither 'from' nor 'role'",
        ),
        (
            {"conversations": [{"from": "narrator", "value": "x"}]},
            None,
            Problem.BAD_ROLE,
            '"narrator"; use one of system',
        ),
        ({"conversations": [{"from": "human"}]}, None, Problem.BAD_VALUE, "conversations[0].value must be text"),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, None, Problem.BAD_ARGUMENTS, "conversations[0]"),
        ({"instruction": 3, "output": "x"}, None, Problem.BAD_VALUE, "instruction must be text, received 3"),
        ({"prompt": "x", "completion": [ASSISTANT]}, None, Problem.BAD_VALUE, "completion must be text"),
        ({"messages": [USER, ASSISTANT]}, "alpaca", Problem.MISSING_KEY, "no 'instruction' among the keys messages"),
    ],
)
def test_a_row_of_no_format_is_rejected(
    row: dict[str, JsonValue], row_format: RowFormat | None, problem: Problem, what: str
) -> None:
    with pytest.raises(Rejection) as caught:
        to_openai(row, "a:1", row_format)
    assert caught.value.problem is problem
    assert what in caught.value.what
