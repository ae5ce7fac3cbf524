"""The subset of JSON Schema that tool parameters use: a value and a schema in, violations out.

Supported keywords: type (also a list), enum, const, properties, required, additionalProperties, items, anyOf, oneOf
(treated as anyOf), allOf, and $ref within the schema. Others are not checked. Unlike JSON Schema, `argument_violations`
rejects arguments that are not among a tool's `properties`, unless its schema has `additionalProperties`: a call with an
invented argument is not a valid call.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from m2forge.records import JsonValue

MAX_REFERENCES = 32
"""A longer chain of references is treated as a cycle, and nothing more is checked."""


def argument_violations(arguments: Mapping[str, JsonValue], parameters: Mapping[str, JsonValue]) -> list[str]:
    """Violations in a call's arguments, given the tool's `parameters`."""
    if not parameters:
        # Without a schema any arguments are valid.
        return []
    violations = schema_violations(arguments, {"type": "object", **parameters})
    names = parameters.get("properties")
    if "additionalProperties" in parameters or not isinstance(names, Mapping):
        return violations
    return violations + [f"unknown argument {name!r}" for name in arguments if name not in names]


def schema_violations(value: JsonValue, schema: JsonValue) -> list[str]:
    """One message per violation, with the path of the value, such as `filters[0].name`."""
    return _Checker(schema).violations(value, schema, "", MAX_REFERENCES)


@dataclass(frozen=True, slots=True)
class _Checker:
    root: JsonValue
    followed: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """Violations by reference and path, each resolved once; empty while being resolved, which ends cycles."""

    def violations(self, value: JsonValue, schema: JsonValue, where: str, budget: int) -> list[str]:
        if schema is False:
            return [f"{_named(where)}: not allowed"]
        if not isinstance(schema, Mapping) or budget == 0:
            return []
        if "$ref" in schema:
            place = str(schema["$ref"]), where
            if place not in self.followed:
                self.followed[place] = []
                self.followed[place] = self.violations(value, self._referred(schema["$ref"]), where, budget - 1)
            return self.followed[place]
        wrong_type = _type_violations(value, schema.get("type"), where)
        if wrong_type:
            return wrong_type
        found = _choice_violations(value, schema, where)
        found += self._branch_violations(value, schema, where, budget)
        if isinstance(value, Mapping):
            found += self._object_violations(value, schema, where)
        elif _is_list(value) and "items" in schema:
            for index, item in enumerate(_listed(value)):
                found += self.violations(item, schema["items"], f"{where}[{index}]", MAX_REFERENCES)
        return found

    def _branch_violations(
        self, value: JsonValue, schema: Mapping[str, JsonValue], where: str, budget: int
    ) -> list[str]:
        found = []
        for keyword in ("anyOf", "oneOf"):
            members = [self.violations(value, each, where, budget - 1) for each in _listed(schema.get(keyword))]
            if members and all(members):
                found.append(f"{_named(where)}: {_show(value)} fits none of {keyword}")
        for each in _listed(schema.get("allOf")):
            found += self.violations(value, each, where, budget - 1)
        return found

    def _object_violations(
        self, value: Mapping[str, JsonValue], schema: Mapping[str, JsonValue], where: str
    ) -> list[str]:
        properties = schema.get("properties")
        names = properties if isinstance(properties, Mapping) else {}
        others = schema.get("additionalProperties", True)
        needed = [name for name in _listed(schema.get("required")) if isinstance(name, str)]
        found = [f"{_inside(where, name)}: missing" for name in needed if name not in value]
        for name, item in value.items():
            place = _inside(where, name)
            if name in names:
                found += self.violations(item, names[name], place, MAX_REFERENCES)
            elif others is False:
                found.append(f"unknown argument {place!r}")
            else:
                found += self.violations(item, others, place, MAX_REFERENCES)
        return found

    def _referred(self, reference: JsonValue) -> JsonValue:
        """The subschema that a reference such as `#/$defs/Unit` points to; None if there is none."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        place = self.root
        for step in reference[1:].split("/")[1:]:
            place = place.get(step) if isinstance(place, Mapping) else None
        return place


def _type_violations(value: JsonValue, declared: JsonValue, where: str) -> list[str]:
    names = [declared] if isinstance(declared, str) else _listed(declared)
    if not names or any(_is_type(value, name) for name in names):
        return []
    expected = " or ".join(str(name) for name in names)
    return [f"{_named(where)}: expected {expected}, received {_show(value)}"]


def _is_type(value: JsonValue, name: JsonValue) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match name:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return is_number and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
        case "number":
            return is_number
        case "string":
            return isinstance(value, str)
        case "array":
            return _is_list(value)
        case "object":
            return isinstance(value, Mapping)
        case _:
            # An unknown type is no reason to reject.
            return True


def _choice_violations(value: JsonValue, schema: Mapping[str, JsonValue], where: str) -> list[str]:
    violations = []
    if "enum" in schema and not any(_same(value, option) for option in _listed(schema["enum"])):
        violations.append(f"{_named(where)}: expected one of {_show(schema['enum'])}, received {_show(value)}")
    if "const" in schema and not _same(value, schema["const"]):
        violations.append(f"{_named(where)}: expected {_show(schema['const'])}, received {_show(value)}")
    return violations


def _is_list(value: JsonValue) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _listed(value: JsonValue) -> Sequence[JsonValue]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _named(where: str) -> str:
    return where or "value"


def _inside(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _same(left: JsonValue, right: JsonValue) -> bool:
    # In JSON true is not 1.
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def _show(value: JsonValue) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:59]}…"
