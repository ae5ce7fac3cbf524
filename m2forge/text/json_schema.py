"""JSON Schema (2020-12) as tool parameters use it: the types that a schema allows, and the violations of a value.

Schemas come from clients and files, so every schema gets an answer in bounded time: a reference is resolved once for
each position of a value, references and branches are followed to a depth of `MAX_REFERENCES`, and a malformed keyword,
an unknown type or a reference that leads nowhere restricts nothing. For the same reason no regular expression runs:
`pattern`, `patternProperties` and `format` are not checked, nor are `unevaluatedItems`, `unevaluatedProperties`,
`$dynamicRef` and references to other documents. All other assertions are.
"""

import json
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias
from urllib.parse import unquote

from m2forge.records import JsonValue

Schema: TypeAlias = Mapping[str, JsonValue]

MAX_REFERENCES = 32
"""A deeper chain of references and branches is treated as a cycle, and nothing more is checked."""
_PLAIN = frozenset(("$ref", "type", "title", "description", "default", "examples"))
"""The keywords of most schemas of a single value, after which nothing is left to check."""
TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))


def argument_violations(arguments: Mapping[str, JsonValue], parameters: Schema) -> list[str]:
    """Violations in a call's arguments, given the tool's `parameters`. Unlike JSON Schema it rejects arguments that are
    not among `properties`, unless the schema has `additionalProperties`: a call with an invented argument is not a
    valid call."""
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
    try:
        return _Checker(schema).violations(value, schema, "", MAX_REFERENCES)
    except RecursionError:
        return ["value: value and schema are nested too deep to be checked"]


def allowed_types(schema: Schema, root: Schema) -> set[str] | None:
    """The JSON types that `schema`, a part of `root`, allows; None if it does not restrict them."""
    return _gather_types(schema, root, {})


def types_of(value: JsonValue) -> set[str]:
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


def is_same(left: JsonValue, right: JsonValue) -> bool:
    """Equality in JSON: true is not 1, and 1 is 1.0."""
    return _canonical(left) == _canonical(right)


# -- types ------------------------------------------------------------------------------------------------------------


def _gather_types(schema: Schema, root: Schema, known: dict[str, set[str] | None]) -> set[str] | None:
    """`known`: the types of each reference, resolved once; None while being resolved, which ends cycles."""
    stated = schema.get("type")
    if stated is not None:
        names = [stated] if isinstance(stated, str) else _items(stated)
        types = {name for name in names if isinstance(name, str) and name in TYPES}
        # A type that JSON Schema does not define, such as "any", does not restrict a value.
        return types if types and len(types) == len(names) else None
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, Sequence) and not isinstance(choices, str):
        return {min(types_of(choice)) for choice in choices} or None
    reference = schema.get("$ref")
    if isinstance(reference, str):
        target = _referred(reference, root)
        if reference not in known and isinstance(target, Mapping) and len(known) < MAX_REFERENCES:
            known[reference] = None
            known[reference] = _gather_types(target, root, known)
        return known.get(reference)
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        if isinstance(branches, Sequence) and not isinstance(branches, str):
            found = [_gather_types(branch, root, known) for branch in branches if isinstance(branch, Mapping)]
            gathered = set().union(*(branch for branch in found if branch is not None))
            if gathered and None in found and key != "allOf":
                # An unrestricted branch allows any text.
                gathered.add("string")
            return gathered or None
    if "properties" in schema:
        return {"object"}
    return {"array"} if "items" in schema else None


def _referred(reference: JsonValue, root: JsonValue) -> JsonValue:
    """The subschema that a reference such as `#/$defs/Unit` or `#unit` points to; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    pointer = unquote(reference[1:])
    if pointer and not pointer.startswith("/"):
        return next((each for each in _parts(root) if each.get("$anchor") == pointer), None)
    location = root
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(location, Mapping):
            location = location.get(name)
        else:
            listed = _items(location)
            location = listed[int(name)] if name.isdecimal() and len(name) < 9 and int(name) < len(listed) else None
    return location


def _parts(schema: JsonValue) -> Iterator[Schema]:
    """Every object inside a schema, by a stack: a schema may be nested deeper than Python recurses."""
    stack = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, Mapping):
            yield part
            stack += part.values()
        else:
            stack += _items(part)


# -- violations -------------------------------------------------------------------------------------------------------


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
        found = self._referred_violations(value, schema["$ref"], where, budget) if "$ref" in schema else []
        wrong_type = _type_violations(value, schema.get("type"), where)
        if wrong_type:
            return found + wrong_type
        if schema.keys() <= _PLAIN:
            return found
        found = found + _choice_violations(value, schema, where)
        found += self._branch_violations(value, schema, where, budget)
        if isinstance(value, Mapping):
            found += self._object_violations(value, schema, where, budget)
        elif isinstance(value, str):
            found += _limit_violations(len(value), schema, where, "Length", "characters")
        elif isinstance(value, Sequence):
            found += self._array_violations(value, schema, where)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found += _number_violations(value, schema, where)
        return found

    def _fits(self, value: JsonValue, schema: JsonValue, where: str, budget: int) -> bool:
        return not self.violations(value, schema, where, budget - 1)

    def _referred_violations(self, value: JsonValue, reference: JsonValue, where: str, budget: int) -> list[str]:
        location = str(reference), where
        if location not in self.followed:
            self.followed[location] = []
            self.followed[location] = self.violations(value, _referred(reference, self.root), where, budget - 1)
        return self.followed[location]

    def _branch_violations(self, value: JsonValue, schema: Schema, where: str, budget: int) -> list[str]:
        found = []
        for keyword in ("anyOf", "oneOf"):
            members = _items(schema.get(keyword))
            num_fitting = sum(self._fits(value, each, where, budget) for each in members)
            if members and num_fitting == 0:
                found.append(f"{_named(where)}: {_show(value)} fits none of {keyword}")
            elif keyword == "oneOf" and num_fitting > 1:
                found.append(f"{_named(where)}: {_show(value)} fits {num_fitting} of oneOf, expected one")
        for each in _items(schema.get("allOf")):
            found += self.violations(value, each, where, budget - 1)
        if _is_schema(schema.get("not")) and budget > 1 and self._fits(value, schema["not"], where, budget):
            found.append(f"{_named(where)}: {_show(value)} fits what `not` excludes")
        if _is_schema(schema.get("if")):
            branch = "then" if self._fits(value, schema["if"], where, budget) else "else"
            found += self.violations(value, schema.get(branch), where, budget - 1)
        return found

    def _array_violations(self, value: Sequence[JsonValue], schema: Schema, where: str) -> list[str]:
        found = _limit_violations(len(value), schema, where, "Items", "items")
        # Before 2020-12 a list in `items` was what `prefixItems` is, and `additionalItems` what `items` is.
        is_old = not _is_schema(schema.get("items")) and bool(_items(schema.get("items")))
        first = _items(schema.get("items" if is_old else "prefixItems"))
        others = schema.get("additionalItems" if is_old else "items")
        for index, item in enumerate(value):
            each = first[index] if index < len(first) else others
            found += self.violations(item, each, f"{where}[{index}]", MAX_REFERENCES)
        if schema.get("uniqueItems") is True and len({_canonical(item) for item in value}) < len(value):
            found.append(f"{_named(where)}: expected different items, received {_show(value)}")
        if _is_schema(schema.get("contains")):
            num = sum(
                not self.violations(item, schema["contains"], f"{where}[{index}]?", MAX_REFERENCES)
                for index, item in enumerate(value)
            )
            found += _limit_violations(
                num, {"minContains": 1, **schema}, where, "Contains", "items that fit `contains`"
            )
        return found

    def _object_violations(self, value: Mapping[str, JsonValue], schema: Schema, where: str, budget: int) -> list[str]:
        properties = schema.get("properties")
        names = properties if isinstance(properties, Mapping) else {}
        # Which names a pattern covers is not known, so it may be all.
        others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        needed = [name for name in _items(schema.get("required")) if isinstance(name, str)]
        found = [f"{_inside(where, name)}: missing" for name in needed if name not in value]
        for name, item in value.items():
            location = _inside(where, name)
            if name in names:
                found += self.violations(item, names[name], location, MAX_REFERENCES)
            elif others is False:
                found.append(f"unknown argument {location!r}")
            else:
                found += self.violations(item, others, location, MAX_REFERENCES)
            found += self.violations(name, schema.get("propertyNames"), f"name {location}", budget - 1)
        found += _limit_violations(len(value), schema, where, "Properties", "properties")
        return found + self._dependent_violations(value, schema, where, budget)

    def _dependent_violations(
        self, value: Mapping[str, JsonValue], schema: Schema, where: str, budget: int
    ) -> list[str]:
        found = []
        for name, needed in _entries(schema.get("dependentRequired")):
            missing = [each for each in _items(needed) if isinstance(each, str) and each not in value]
            if name in value:
                found += [f"{_inside(where, each)}: missing beside {name!r}" for each in missing]
        for name, each in _entries(schema.get("dependentSchemas")):
            if name in value:
                found += self.violations(value, each, where, budget - 1)
        return found


def _type_violations(value: JsonValue, declared: JsonValue, where: str) -> list[str]:
    names = [declared] if isinstance(declared, str) else _items(declared)
    # An unknown type is no reason to reject.
    if not names or any(name not in TYPES or name in types_of(value) for name in names if isinstance(name, str)):
        return []
    expected = " or ".join(str(name) for name in names)
    return [f"{_named(where)}: expected {expected}, received {_show(value)}"]


def _choice_violations(value: JsonValue, schema: Schema, where: str) -> list[str]:
    violations = []
    if "enum" in schema and not any(is_same(value, option) for option in _items(schema["enum"])):
        violations.append(f"{_named(where)}: expected one of {_show(schema['enum'])}, received {_show(value)}")
    if "const" in schema and not is_same(value, schema["const"]):
        violations.append(f"{_named(where)}: expected {_show(schema['const'])}, received {_show(value)}")
    return violations


def _number_violations(value: float, schema: Schema, where: str) -> list[str]:
    least, most = _number(schema.get("minimum")), _number(schema.get("maximum"))
    above, below = _number(schema.get("exclusiveMinimum")), _number(schema.get("exclusiveMaximum"))
    divisor = _number(schema.get("multipleOf"))
    expected = []
    if least is not None and value < least:
        expected.append(f"at least {_show(least)}")
    if most is not None and value > most:
        expected.append(f"at most {_show(most)}")
    if above is not None and value <= above:
        expected.append(f"above {_show(above)}")
    if below is not None and value >= below:
        expected.append(f"below {_show(below)}")
    # As decimals, in which 0.0075 is a multiple of 0.0001.
    if divisor is not None and divisor > 0 and math.isfinite(value) and Fraction(repr(value)) % Fraction(repr(divisor)):
        expected.append(f"a multiple of {_show(divisor)}")
    return [f"{_named(where)}: expected {each}, received {_show(value)}" for each in expected]


def _limit_violations(num: int, schema: Schema, where: str, keyword: str, counted: str) -> list[str]:
    """Violations of `min…` and `max…`, such as `minLength` for the keyword "Length"."""
    least, most = _number(schema.get(f"min{keyword}")), _number(schema.get(f"max{keyword}"))
    found = []
    if least is not None and num < least:
        found.append(f"{_named(where)}: expected at least {_show(least)} {counted}, received {num}")
    if most is not None and num > most:
        found.append(f"{_named(where)}: expected at most {_show(most)} {counted}, received {num}")
    return found


# -- values -----------------------------------------------------------------------------------------------------------


def _canonical(value: JsonValue) -> Hashable:
    """Equal exactly for values that are equal in JSON."""
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, Mapping):
        return ("object", frozenset((name, _canonical(item)) for name, item in value.items()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ("array", *(_canonical(item) for item in value))
    return value


def _is_schema(value: JsonValue) -> bool:
    return isinstance(value, bool | Mapping)


def _number(value: JsonValue) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number and isinstance(value, int | float) else None


def _items(value: JsonValue) -> Sequence[JsonValue]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _entries(value: JsonValue) -> Sequence[tuple[str, JsonValue]]:
    return [*value.items()] if isinstance(value, Mapping) else ()


def _named(where: str) -> str:
    return where or "value"


def _inside(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _show(value: JsonValue) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:59]}…"
