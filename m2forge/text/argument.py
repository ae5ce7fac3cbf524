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
from m2forge.text.json_schema import Schema, allowed_types, is_same, types_of
from m2forge.text.message import Tool, parse_json


def read_argument(text: str, name: str, tool: Tool | None) -> tuple[JsonValue, str | None]:
    """The value of parameter `name` written as bare text, and the problem with it, if any."""
    schema = _parameter_schema(name, tool)
    types = None if schema is None or tool is None else allowed_types(schema, tool.parameters)
    if schema is None or types is None or types == {"string"}:
        return text, None if schema is None else _enum_problem(text, name, schema)
    try:
        value = parse_json(text)
    except ValueError as error:
        if "string" in types:
            return text, _enum_problem(text, name, schema)
        return text, f"{name}: expected {_listed(types)}, received {_shown(text)}, which is not JSON ({error})"
    if isinstance(value, float) and "number" not in types and "integer" in types and value.is_integer():
        value = int(value)
    if types_of(value) & types and not (isinstance(value, str) and "string" in types):
        return value, _enum_problem(value, name, schema)
    if "string" in types:
        return text, _enum_problem(text, name, schema)
    return text, f"{name}: expected {_listed(types)}, received {_shown(text)}"


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
    types = None if schema is None else allowed_types(schema, tool.parameters)
    if schema is None or types is None:
        return None
    if not types_of(value) & types:
        return f"{name}: expected {_listed(types)}, received {_shown(value)}"
    return _enum_problem(value, name, schema)


def _parameter_schema(name: str, tool: Tool | None) -> Schema | None:
    if tool is None:
        return None
    properties, others = tool.parameters.get("properties"), tool.parameters.get("additionalProperties")
    schema = properties.get(name, others) if isinstance(properties, Mapping) else others
    return schema if isinstance(schema, Mapping) else None


def _enum_problem(value: JsonValue, name: str, schema: Schema) -> str | None:
    choices = schema.get("enum")
    if not isinstance(choices, Sequence) or isinstance(choices, str):
        return None
    if any(is_same(value, choice) for choice in choices):
        return None
    return f"{name}: expected one of {_shown(choices)}, received {_shown(value)}"


def _listed(types: set[str]) -> str:
    return " or ".join(sorted(types))


def _shown(value: JsonValue) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
