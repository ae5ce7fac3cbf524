"""Arguments written as bare text, typed by the tool's schema."""

from typing import Any

import pytest

from m2forge.text.argument import MAX_DEPTH, argument_problems, parse_json, read_argument, type_problem
from m2forge.text.message import Tool
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
    assert argument_problems({"k": 1}, Tool("f")) == []


def test_values_that_arrive_typed_are_checked() -> None:
    tool = tool_with({"type": "integer"})
    assert type_problem(1, "k", tool) is None
    assert type_problem(1.0, "k", tool) is None
    assert type_problem("1", "other", tool) is None
    assert type_problem("1", "k", tool) == "k: expected integer, received '1'"
    assert type_problem(True, "k", tool) is not None


def test_json_at_the_depth_limit_is_read() -> None:
    parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    parse_json('{"a": "' + "[" * 500 + '"}')
