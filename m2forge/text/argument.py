"""Types the arguments of a tool call by the tool's JSON schema.

A format that writes arguments as bare text needs the schema to parse them:

- if the schema allows only strings, the text is the value, including whitespace;
- if it allows other types, the text is parsed as JSON and used if its type is allowed, else it is the string;
- if there is no schema, or the parameter is unknown, the text is a string.

So an argument that follows its schema survives a round trip, with one exception: where a parameter allows strings and
other types, a string that parses as one of those, such as `"5"`, becomes that type. The types of `anyOf`, `oneOf`,
`allOf`, `enum`, `const`, a list of types and references within the schema are collected; a parameter that the schema
does not name follows its `additionalProperties`.
"""

from collections.abc import Mapping, Sequence

from m2forge.errors import suggest
from m2forge.records import JsonValue
from m2forge.text.json_value import parse_json
from m2forge.text.message import Tool

Schema = Mapping[str, JsonValue]

_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_MAX_REFERENCES = 32
"""Maximum number of references resolved for one parameter; further ones impose no type."""


def read_argument(text: str, name: str, tool: Tool | None) -> tuple[JsonValue, str | None]:
    """The value of parameter `name` written as bare text, and the problem with it, if any."""
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
    """Missing and unknown argument names."""
    properties, required = tool.parameters.get("properties"), tool.parameters.get("required")
    problems = []
    if isinstance(required, Sequence) and not isinstance(required, str):
        named = [name for name in required if isinstance(name, str)]
        problems += [f"{tool.name}: {name} is missing" for name in named if name not in arguments]
    # An empty schema allows all other arguments, like `true`.
    if isinstance(properties, Mapping) and tool.parameters.get("additionalProperties") in (None, False):
        unknown = [name for name in arguments if name not in properties]
        problems += [f"{tool.name}: {_shown(name)} is no parameter; {suggest(name, properties)}" for name in unknown]
    return problems


def type_problem(value: JsonValue, name: str, tool: Tool) -> str | None:
    """The type problem of a value that arrived typed, if any."""
    schema = _parameter_schema(name, tool)
    kinds = None if schema is None else _kinds(schema, tool.parameters)
    if schema is None or kinds is None:
        return None
    if not _kind(value) & kinds:
        return f"{name}: expected {_listed(kinds)}, received {_shown(value)}"
    return _enum_problem(value, name, schema)


def _parameter_schema(name: str, tool: Tool | None) -> Schema | None:
    if tool is None:
        return None
    properties, others = tool.parameters.get("properties"), tool.parameters.get("additionalProperties")
    schema = properties.get(name, others) if isinstance(properties, Mapping) else others
    return schema if isinstance(schema, Mapping) else None


def _kinds(schema: Schema, root: Schema) -> set[str] | None:
    """The JSON types that `schema` allows; None if it does not restrict them."""
    return _gather_kinds(schema, root, {})


def _gather_kinds(schema: Schema, root: Schema, known: dict[str, set[str] | None]) -> set[str] | None:
    """`known`: the types of each reference, resolved once; None while being resolved, which ends cycles."""
    stated = schema.get("type")
    if stated is not None:
        names = [stated] if isinstance(stated, str) else stated if isinstance(stated, Sequence) else []
        kinds = {name for name in names if isinstance(name, str) and name in _TYPES}
        # A type that JSON Schema does not define, such as "any", does not restrict a value.
        return kinds if kinds and len(kinds) == len(names) else None
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, Sequence) and not isinstance(choices, str):
        return {min(_kind(choice)) for choice in choices} or None
    reference = schema.get("$ref")
    if isinstance(reference, str):
        target = _referred(reference, root)
        if reference not in known and target is not None and len(known) < _MAX_REFERENCES:
            known[reference] = None
            known[reference] = _gather_kinds(target, root, known)
        return known.get(reference)
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        if isinstance(branches, Sequence) and not isinstance(branches, str):
            found = [_gather_kinds(branch, root, known) for branch in branches if isinstance(branch, Mapping)]
            gathered = set().union(*(branch for branch in found if branch is not None))
            if gathered and None in found and key != "allOf":
                # An unrestricted branch allows any text.
                gathered.add("string")
            return gathered or None
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
    """The JSON types of `value`: a whole number is both an integer and a number."""
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
