"""JSON text in, values out that can be written again: finite numbers, no lone surrogates, no abyss of brackets.

What a model writes and what a file of trajectories holds is read here. Later readers recurse (templates, writers,
schema checks), so depth is bounded at the door. Bare line ends inside strings are let through, because models write
them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

from m2forge.records import JsonValue

MAX_DEPTH = 100
"""Arrays and objects nested deeper than this are refused."""
MAX_DOCUMENT_DEPTH = 2 * MAX_DEPTH
"""The bound for whole documents: arguments and schemas stand some levels down in them."""


def parse_json(text: str, max_depth: int = MAX_DEPTH) -> JsonValue:
    """Raises ValueError for what is no such value, json.JSONDecodeError where it is no JSON at all."""
    try:
        value: JsonValue = _DECODER.decode(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {max_depth}") from None
    if text.count("[") + text.count("{") > max_depth and is_deeper(value, max_depth):
        raise ValueError(f"nested deeper than {max_depth}")
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def is_deeper(value: JsonValue, depth: int) -> bool:
    """Whether arrays and objects are nested more than `depth` deep; itself without recursion."""
    level = [value]
    for _ in range(depth + 1):
        # The plain types first: a long body holds thousands of values, and abstract ones are slow to tell.
        outers = [
            item
            for item in level
            if type(item) not in _LEAVES and isinstance(item, _OUTERS) and not isinstance(item, str)
        ]
        if not outers:
            return False
        level = [inner for outer in outers for inner in (outer.values() if isinstance(outer, _OBJECTS) else outer)]
    return True


_LEAVES = frozenset((str, int, float, bool, type(None)))
_OBJECTS = (dict, Mapping)
_OUTERS = (dict, list, Mapping, Sequence)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_constant(text)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, strict=False)
