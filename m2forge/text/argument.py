"""Arguments of a tool call, typed by the tool's JSON schema.

A format that writes arguments as bare text needs the schema to read them back:

- where the schema allows only strings, the text is the value, every space of it;
- where it allows other types, the text is read as JSON and taken if its type is allowed, else it is the string;
- where it says nothing (no schema, an unknown parameter), the text is a string.

So an argument that follows its schema comes back as it was, but for one case: where a parameter takes strings and other
types, a string that reads as one of those, such as `"5"`, comes back as it. The types of `anyOf`, `oneOf`, `allOf`,
`enum`, `const`, a list of types and references within the schema are gathered.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

from m2forge.errors import suggest
from m2forge.records import JsonValue
from m2forge.text.message import Tool

Schema = Mapping[str, JsonValue]

MAX_DEPTH = 100
"""Arrays and objects nested deeper than this are refused: every later reader recurses."""
_MAX_REFERENCES = 32


def read_argument(text: str, name: str, tool: Tool | None) -> tuple[JsonValue, str | None]:
    """The value of parameter `name` written as bare text, and what is wrong with it, if anything."""
    schema = _parameter_schema(name, tool)
    kinds = None if schema is None or tool is None else _kinds(schema, tool.parameters)
    if schema is None or kinds is None or kinds == {"string"}:
        return text, None if schema is None else _enum_problem(text, name, schema)
    try:
        value = parse_json(text)
    except ValueError as error:
        if "string" in kinds:
            return text, _enum_problem(text, name, schema)
        return text, f"{name}: expected {_listed(kinds)}, received {_shown(text)}, which is not JSON ({error})"
    if isinstance(value, float) and "number" not in kinds and "integer" in kinds and value.is_integer():
        value = int(value)
    if _kind(value) & kinds and not (isinstance(value, str) and "string" in kinds):
        return value, _enum_problem(value, name, schema)
    if "string" in kinds:
        return text, _enum_problem(text, name, schema)
    return text, f"{name}: expected {_listed(kinds)}, received {_shown(text)}"


def argument_problems(arguments: Mapping[str, JsonValue], tool: Tool) -> list[str]:
    """What is wrong with the set of arguments: names missing, names unknown."""
    properties, required = tool.parameters.get("properties"), tool.parameters.get("required")
    problems = []
    if isinstance(required, Sequence) and not isinstance(required, str):
        problems += [f"{tool.name}: {name} is missing" for name in required if name not in arguments]
    if isinstance(properties, Mapping) and not tool.parameters.get("additionalProperties"):
        unknown = [name for name in arguments if name not in properties]
        problems += [f"{tool.name}: {_shown(name)} is no parameter; {suggest(name, properties)}" for name in unknown]
    return problems


def type_problem(value: JsonValue, name: str, tool: Tool) -> str | None:
    """What is wrong with the type of a value that arrived typed."""
    schema = _parameter_schema(name, tool)
    kinds = None if schema is None else _kinds(schema, tool.parameters)
    if schema is None or kinds is None:
        return None
    if not _kind(value) & kinds:
        return f"{name}: expected {_listed(kinds)}, received {_shown(value)}"
    return _enum_problem(value, name, schema)


def parse_json(text: str) -> JsonValue:
    """Read JSON that can be written again: finite numbers, no lone surrogates, no abyss of brackets."""
    try:
        value: JsonValue = _DECODER.decode(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_constant(text)


# Bare line ends inside strings are let through, because models write them.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, strict=False)


def _depth(value: JsonValue) -> int:
    depth, level = 0, [value]
    while outers := [item for item in level if isinstance(item, list | dict)]:
        level = [inner for outer in outers for inner in (outer.values() if isinstance(outer, dict) else outer)]
        depth += 1
    return depth


def _parameter_schema(name: str, tool: Tool | None) -> Schema | None:
    properties = tool.parameters.get("properties") if tool is not None else None
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return schema if isinstance(schema, Mapping) else None


def _kinds(schema: Schema, root: Schema, budget: int = _MAX_REFERENCES) -> set[str] | None:
    """The JSON types that `schema` lets through; None where it says nothing about them."""
    if budget == 0:
        return None
    stated = schema.get("type")
    if isinstance(stated, str):
        return {stated}
    if isinstance(stated, Sequence):
        return {kind for kind in stated if isinstance(kind, str)} or None
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, Sequence) and not isinstance(choices, str):
        return {min(_kind(choice)) for choice in choices} or None
    reference = schema.get("$ref")
    if isinstance(reference, str):
        target = _referred(reference, root)
        return None if target is None else _kinds(target, root, budget - 1)
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        if isinstance(branches, Sequence) and not isinstance(branches, str):
            found = [_kinds(branch, root, budget - 1) for branch in branches if isinstance(branch, Mapping)]
            kinds = set().union(*(kind for kind in found if kind is not None))
            return kinds or None
    if "properties" in schema:
        return {"object"}
    return {"array"} if "items" in schema else None


def _referred(reference: str, root: Schema) -> Schema | None:
    """The part of `root` that a reference such as `#/$defs/Unit` points to."""
    if not reference.startswith("#/"):
        return None
    place: JsonValue = root
    for step in reference[2:].split("/"):
        place = place.get(step) if isinstance(place, Mapping) else None
    return place if isinstance(place, Mapping) else None


def _kind(value: JsonValue) -> set[str]:
    """The JSON types that `value` is of: a whole number is both an integer and a number."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"integer", "number"} if value.is_integer() else {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"object"} if isinstance(value, Mapping) else {"array"}


def _enum_problem(value: JsonValue, name: str, schema: Schema) -> str | None:
    choices = schema.get("enum")
    if not isinstance(choices, Sequence) or isinstance(choices, str) or value in choices:
        return None
    return f"{name}: expected one of {_shown(choices)}, received {_shown(value)}"


def _listed(kinds: set[str]) -> str:
    return " or ".join(sorted(kinds))


def _shown(value: JsonValue) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
