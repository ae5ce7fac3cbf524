"""JSON text in, values out that can be serialized again: finite numbers, no lone surrogates, bounded depth.

Reads what models write and what trajectory files contain. Later consumers recurse (templates, serializers, schema
checks), so depth is bounded here. Unescaped newlines inside strings are accepted, because models write them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

from m2forge.records import JsonValue

MAX_DEPTH = 100
"""Arrays and objects nested deeper than this are refused."""
MAX_DOCUMENT_DEPTH = 2 * MAX_DEPTH
"""Maximum depth of whole documents: arguments and schemas are nested some levels down in them."""


def parse_json(text: str, max_depth: int = MAX_DEPTH) -> JsonValue:
    """Raises ValueError for an unacceptable value, json.JSONDecodeError if the text is not JSON."""
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
    """Whether arrays and objects are nested more than `depth` deep; not recursive itself."""
    level = [value]
    for _ in range(depth + 1):
        # Plain types first: a long body holds thousands of values, and abstract isinstance checks are slow.
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
