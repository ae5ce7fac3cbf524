"""The schema check, case by case."""

import time

import pytest

from m2forge.records import JsonValue
from m2forge.text.json_schema import argument_violations, schema_violations

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
    (1, {"oneOf": [{"type": "number"}, {"type": "integer"}]}, ["value: 1 fits 2 of oneOf, expected one"]),
    (1, {"allOf": [{"type": "integer"}, {"enum": [2]}]}, ["value: expected one of [2], received 1"]),
    ("x", {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}, ['value: expected integer, received "x"']),
    ([[["x"]]], {"type": "array", "items": {"$ref": "#"}}, ['[0][0][0]: expected array, received "x"']),
    (5, {"$defs": {"n": {}}, "$ref": "#/$defs/n", "maximum": 4}, ["value: expected at most 4, received 5"]),
    (1, {"$defs": {"a/b~c d": {"type": "null"}}, "$ref": "#/$defs/a~1b~0c%20d"}, ["value: expected null, received 1"]),
    ("x", {"anyOf": [{}, {"type": "null"}], "$ref": "#/anyOf/1"}, ['value: expected null, received "x"']),
    (1, {"$defs": {"n": {"$anchor": "here", "type": "null"}}, "$ref": "#here"}, ["value: expected null, received 1"]),
    (1, {"$ref": "#/$defs/none"}, []),
    (1, {"$ref": "https://example.org/schema"}, []),
    (1, {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, []),
    (1, True, []),
    (1, False, ["value: not allowed"]),
    (1, "nonsense", []),
    ([True], {"const": [1]}, ["value: expected [1], received [true]"]),
    ({"a": [1.0]}, {"const": {"a": [1]}}, []),
    (3, {"minimum": 3, "maximum": 3}, []),
    (2.5, {"minimum": 3}, ["value: expected at least 3, received 2.5"]),
    (3, {"exclusiveMinimum": 3}, ["value: expected above 3, received 3"]),
    (3, {"exclusiveMaximum": 3}, ["value: expected below 3, received 3"]),
    (0.0075, {"multipleOf": 0.0001}, []),
    (7, {"multipleOf": 2}, ["value: expected a multiple of 2, received 7"]),
    (1e308, {"multipleOf": 1e-300}, []),
    (7, {"multipleOf": 0, "minimum": "x", "maximum": True, "exclusiveMinimum": float("inf")}, []),
    ("äö", {"minLength": 2, "maxLength": 2}, []),
    ("ä", {"minLength": 2}, ["value: expected at least 2 characters, received 1"]),
    ("äöü", {"maxLength": 2}, ["value: expected at most 2 characters, received 3"]),
    ([1], {"minItems": 2}, ["value: expected at least 2 items, received 1"]),
    ([1, 2], {"maxItems": 1}, ["value: expected at most 1 items, received 2"]),
    ([1, True, 1.5], {"uniqueItems": True}, []),
    ([{"a": 1}, {"a": 1.0}], {"uniqueItems": True},
     ['value: expected different items, received [{"a": 1}, {"a": 1.0}]']),
    ([1, "x"], {"prefixItems": [{"type": "integer"}], "items": False}, ["[1]: not allowed"]),
    ([1, "x"], {"items": [{"type": "integer"}], "additionalItems": False}, ["[1]: not allowed"]),
    (["x"], {"prefixItems": [{"type": "integer"}]}, ['[0]: expected integer, received "x"']),
    ([1, "x"], {"contains": {"type": "string"}}, []),
    ([1], {"contains": {"type": "string"}}, ["value: expected at least 1 items that fit `contains`, received 0"]),
    ([1], {"contains": {"type": "string"}, "minContains": 0}, []),
    ({}, {"minProperties": 1}, ["value: expected at least 1 properties, received 0"]),
    ({"abc": 1}, {"propertyNames": {"maxLength": 2}}, ["name abc: expected at most 2 characters, received 3"]),
    ({"a": 1}, {"dependentRequired": {"a": ["b"], "c": ["d"]}}, ["b: missing beside 'a'"]),
    ({"a": 1}, {"dependentSchemas": {"a": {"required": ["b"]}}}, ["b: missing"]),
    (1, {"not": {"type": "integer"}}, ["value: 1 fits what `not` excludes"]),
    ("x", {"not": {"type": "integer"}}, []),
    (5, {"if": {"minimum": 5}, "then": {"enum": [6]}, "else": False}, ["value: expected one of [6], received 5"]),
    (4, {"if": {"minimum": 5}, "then": {"enum": [6]}, "else": False}, ["value: not allowed"]),
    ({"a1": 1}, {"patternProperties": {"^a": {}}, "additionalProperties": False}, []),
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


def test_hostile_schemas_are_answered_at_once() -> None:
    nested: JsonValue = {"type": "string"}
    for _ in range(5000):
        nested = {"anyOf": [nested], "not": False}
    through: JsonValue = []
    for _ in range(100):
        through = [through]
    links: dict[str, JsonValue] = {f"{n}": {"allOf": [{"$ref": f"#/$defs/{n + 1}"}]} for n in range(9)}
    links["9"] = {"items": {"$ref": "#/$defs/0"}}
    start_s = time.thread_time()
    assert schema_violations(5, nested) == []
    assert schema_violations(5, {"$defs": {"a": nested}, "$ref": "#gone"}) == []
    assert schema_violations("a" * 40 + "!", {"pattern": "^(a+)+$", "patternProperties": {"^(a+)+$": False}}) == []
    assert schema_violations(through, {"$ref": "#/$defs/0", "$defs": links}) == [
        "value: value and schema are nested too deep to be checked"
    ]
    assert time.thread_time() - start_s < 2
