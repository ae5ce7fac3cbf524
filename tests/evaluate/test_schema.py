"""The schema check, case by case."""

import pytest

from m2forge.evaluate.schema import argument_violations, schema_violations
from m2forge.records import JsonValue

NAMED: dict[str, JsonValue] = {"properties": {"b": {"type": "string"}}}
TABLE: list[tuple[JsonValue, JsonValue, list[str]]] = [
    (1, {"type": "integer"}, []),
    (1.0, {"type": "integer"}, []),
    (1.5, {"type": "integer"}, ["value: expected integer, received 1.5"]),
    (True, {"type": "integer"}, ["value: expected integer, received true"]),
    (True, {"type": "number"}, ["value: expected number, received true"]),
    (2, {"type": "number"}, []),
    (True, {"type": "boolean"}, []),
    (0, {"type": "boolean"}, ["value: expected boolean, received 0"]),
    (None, {"type": "null"}, []),
    (None, {"type": "string"}, ["value: expected string, received null"]),
    (None, {"type": ["string", "null"]}, []),
    (3, {"type": ["string", "null"]}, ["value: expected string or null, received 3"]),
    ("x", {"type": "array"}, ['value: expected array, received "x"']),
    ([], {"type": "array"}, []),
    ({}, {"type": "object"}, []),
    ([], {"type": "object"}, ["value: expected object, received []"]),
    ("x", {"type": "tensor"}, []),
    ("b", {"enum": ["a", "b"]}, []),
    ("c", {"enum": ["a", "b"]}, ['value: expected one of ["a", "b"], received "c"']),
    (1, {"enum": [True]}, ["value: expected one of [true], received 1"]),
    ("a", {"const": "a"}, []),
    ("b", {"const": "a"}, ['value: expected "a", received "b"']),
    ([1, "x"], {"type": "array", "items": {"type": "integer"}}, ['[1]: expected integer, received "x"']),
    ({"a": [{"b": 1}]}, {"properties": {"a": {"items": NAMED}}}, ["a[0].b: expected string, received 1"]),
    ({"a": {}}, {"properties": {"a": {"required": ["b"]}}}, ["a.b: missing"]),
    ({"a": {"c": 1}}, {"properties": {"a": {"additionalProperties": False}}}, ["unknown argument 'a.c'"]),
    ({"c": "1"}, {"additionalProperties": {"type": "integer"}}, ['c: expected integer, received "1"']),
    (1, {"anyOf": [{"type": "string"}, {"type": "integer"}]}, []),
    (1.5, {"anyOf": [{"type": "string"}, {"type": "integer"}]}, ["value: 1.5 fits none of anyOf"]),
    (1, {"oneOf": [{"type": "string"}, {"type": "integer"}]}, []),
    (1, {"allOf": [{"type": "integer"}, {"enum": [2]}]}, ["value: expected one of [2], received 1"]),
    ("x", {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}, ['value: expected integer, received "x"']),
    ([[["x"]]], {"type": "array", "items": {"$ref": "#"}}, ['[0][0][0]: expected array, received "x"']),
    (1, {"$ref": "#/$defs/none"}, []),
    (1, {"$ref": "https://example.org/schema"}, []),
    (1, {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, []),
    (1, True, []),
    (1, False, ["value: not allowed"]),
    (1, "nonsense", []),
    ({"a": 1}, {"required": "a", "properties": ["a"], "enum": [{"a": 1}]}, []),
]  # fmt: skip


@pytest.mark.parametrize(("value", "schema", "violations"), TABLE)
def test_a_value_against_a_schema(value: JsonValue, schema: JsonValue, violations: list[str]) -> None:
    assert schema_violations(value, schema) == violations


PARAMETERS: dict[str, JsonValue] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}


@pytest.mark.parametrize(
    ("arguments", "parameters", "violations"),
    [
        ({"city": "Rome"}, PARAMETERS, []),
        ({"city": "Rome", "days": 3}, PARAMETERS, []),
        ({}, PARAMETERS, ["city: missing"]),
        ({"city": "Rome", "unit": "C"}, PARAMETERS, ["unknown argument 'unit'"]),
        ({"city": "Rome", "unit": "C"}, PARAMETERS | {"additionalProperties": True}, []),
        ({"city": "Rome", "unit": "C"}, PARAMETERS | {"additionalProperties": False}, ["unknown argument 'unit'"]),
        ({"x": 1}, {"type": "object", "properties": {}}, ["unknown argument 'x'"]),
        ({"x": 1}, {}, []),
        ({"x": 1}, {"type": "object"}, []),
        ({"x": 1}, {"type": "object", "required": [["x"], "y"]}, ["y: missing"]),
    ],
)
def test_arguments_against_parameters(
    arguments: dict[str, JsonValue], parameters: dict[str, JsonValue], violations: list[str]
) -> None:
    assert argument_violations(arguments, parameters) == violations


def test_references_that_branch_and_circle_are_followed_once() -> None:
    # Followed afresh in every branch, these would be 3 ** 12 references.
    chain: dict[str, JsonValue] = {f"{n}": {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 3} for n in range(12)}
    last: dict[str, JsonValue] = {"12": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}
    schema: dict[str, JsonValue] = {"$ref": "#/$defs/0", "$defs": chain | last}
    assert schema_violations(5, schema) == []
    assert schema_violations("x", schema) == ['value: "x" fits none of anyOf']
    circle: dict[str, JsonValue] = {"$defs": {"0": {"anyOf": [{"$ref": "#/$defs/0"}] * 3}}, "$ref": "#/$defs/0"}
    assert schema_violations(5, circle) == []
