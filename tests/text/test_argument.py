"""Arguments written as bare text, typed by the tool's schema."""

from typing import Any

import pytest

from m2forge.text.argument import argument_problems, read_argument, type_problem
from m2forge.text.message import MAX_DEPTH, Tool
from tests.text.draw import as_json


def tool_with(schema: Any, **rest: Any) -> Tool:
    return Tool("f", "", {"type": "object", "properties": {"k": schema}, **rest})


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, " 5\n", " 5\n"),
        ({"type": "string"}, "null", "null"),
        ({}, "5", "5"),
        ({"description": "anything"}, "[1]", "[1]"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, " 5.0 ", 5),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "-1.5e3", -1500.0),
        ({"type": "boolean"}, "true", True),
        ({"type": "null"}, "null", None),
        ({"type": "array"}, '[1, "a", null]', [1, "a", None]),
        ({"items": {"type": "string"}}, "[]", []),
        ({"type": "object"}, '{"a": {"b": 1}}', {"a": {"b": 1}}),
        ({"properties": {}}, "{}", {}),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "nul", "nul"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "integer"]}, '"5"', '"5"'),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "five", "five"),
        ({"oneOf": [{"type": "boolean"}, {"type": "array"}]}, "[true]", [True]),
        ({"allOf": [{"$ref": "#/$defs/N"}]}, "3", 3),
        ({"$ref": "#/$defs/N"}, "3", 3),
        ({"$ref": "#/$defs/Loop"}, "3", "3"),
        ({"$ref": "elsewhere.json"}, "3", "3"),
        ({"enum": ["a", "b"]}, "a", "a"),
        ({"enum": [1, "1a"]}, "1", 1),
        ({"const": 4}, "4", 4),
        ({"type": "any"}, "4", "4"),
        ({"type": ["integer", "str"]}, "4", "4"),
        ({"type": [{}]}, "4", "4"),
        ({"anyOf": [{"type": "integer"}, {}]}, "4", 4),
        ({"anyOf": [{"type": "integer"}, {}]}, "four", "four"),
    ],
)
def test_text_becomes_what_the_schema_allows(schema: Any, text: str, value: Any) -> None:
    definitions = {"N": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}}
    read, problem = read_argument(text, "k", tool_with(schema, **{"$defs": definitions}))
    assert problem is None
    assert as_json(read) == as_json(value)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer"}, "five"),
        ({"type": "integer"}, "5.5"),
        ({"type": "integer"}, "true"),
        ({"type": "boolean"}, "1"),
        ({"type": "boolean"}, "True"),
        ({"type": "number"}, "NaN"),
        ({"type": "number"}, "1e999"),
        ({"type": "array"}, "{}"),
        ({"type": "array"}, "[" * 100_000),
        ({"type": "array"}, "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)),
        ({"type": "array"}, '["\\ud800"]'),
        ({"type": "integer"}, "9" * 5000),
        ({"enum": ["a", "b"]}, "c"),
        ({"enum": [1, 2]}, "3"),
        ({"type": "string", "enum": ["a"]}, "b"),
    ],
)
def test_what_does_not_fit_is_kept_and_reported(schema: Any, text: str) -> None:
    value, problem = read_argument(text, "k", tool_with(schema))
    assert problem is not None
    assert problem.startswith("k: expected")
    assert value == text or as_json(value) == text


def test_references_that_branch_and_circle_are_followed_once() -> None:
    # Followed afresh in every branch, these would be 3 ** 30 references.
    chain: dict[str, Any] = {f"{n}": {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 3} for n in range(30)}
    circle: dict[str, Any] = {"30": {"anyOf": [{"$ref": "#/$defs/0"}, {"type": "integer"}]}}
    tool = tool_with({"$ref": "#/$defs/0"}, **{"$defs": chain | circle})
    assert read_argument("5", "k", tool) == (5, None)


def test_without_a_schema_text_is_a_string() -> None:
    assert read_argument("5", "k", None) == ("5", None)
    assert read_argument("5", "other", tool_with({"type": "integer"})) == ("5", None)
    assert read_argument("5", "k", Tool("f", "", {"properties": ["k"]})) == ("5", None)


def test_missing_and_unknown_arguments_are_reported() -> None:
    tool = tool_with({"type": "integer"}, required=["k"])
    assert argument_problems({"k": 1}, tool) == []
    assert argument_problems({}, tool) == ["f: k is missing"]
    (problem,) = argument_problems({"k": 1, "kk": 2}, tool)
    assert "'kk' is no parameter" in problem
    assert argument_problems({"k": 1, "kk": 2}, tool_with({}, additionalProperties=True)) == []
    assert argument_problems({"k": 1, "kk": 2}, tool_with({}, additionalProperties={})) == []
    assert len(argument_problems({"k": 1, "kk": 2}, tool_with({}, additionalProperties=False))) == 1
    assert argument_problems({"k": 1}, tool_with({}, required=[["k"], {}, 3])) == []
    assert argument_problems({"k": 1}, Tool("f")) == []


def test_other_arguments_follow_the_schema_for_them() -> None:
    others = {"additionalProperties": {"type": "integer"}}
    assert read_argument("5", "other", tool_with({"type": "string"}, **others)) == (5, None)
    assert read_argument("5", "k", tool_with({"type": "string"}, **others)) == ("5", None)
    assert read_argument("5", "other", Tool("f", "", others)) == (5, None)
    assert type_problem("5", "other", Tool("f", "", others)) == "other: expected integer, received '5'"


def test_values_that_arrive_typed_are_checked() -> None:
    tool = tool_with({"type": "integer"})
    assert type_problem(1, "k", tool) is None
    assert type_problem(1.0, "k", tool) is None
    assert type_problem("1", "other", tool) is None
    assert type_problem("1", "k", tool) == "k: expected integer, received '1'"
    assert type_problem(True, "k", tool) is not None
