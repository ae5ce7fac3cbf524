"""Strict reading of JSON objects: a value that is not what its field takes raises `AskError` naming the field.

null is the same as absent, as on the vendors' servers: SDKs serialize unset fields. An unknown key is refused with a
suggestion, because a misspelt setting that does nothing is worse than an error.

Bodies come from `parse_json`, so their text can be written as UTF-8, their numbers are finite and their depth bounded.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NoReturn

from m2forge.errors import suggest
from m2forge.gateway.exchange import AskError
from m2forge.records import JsonValue

MAX_METADATA, MAX_KEY_LENGTH, MAX_VALUE_LENGTH = 16, 64, 512
_NUM_SHOWN = 80
"""Maximum number of characters of a refused value in an error message."""


class Fields:
    """A JSON object being read. Each method returns None if the field is absent or null."""

    __slots__ = ("data", "place")

    def __init__(self, value: JsonValue, known: AbstractSet[str], place: str = "") -> None:
        """`place` is the object's own path, empty for the body."""
        self.data, self.place = read_object(value, place), place
        if not self.data.keys() <= known:
            name = next(name for name in self.data if name not in known)
            path = self.path(name[:_NUM_SHOWN])
            raise AskError(f"{path}: not a field that is known here; {suggest(name[:_NUM_SHOWN], known)}", path)

    def path(self, name: str) -> str:
        return f"{self.place}.{name}" if self.place else name

    def has(self, name: str) -> bool:
        return self.data.get(name) is not None

    def value(self, name: str) -> JsonValue:
        return self.data.get(name)

    def refuse(self, name: str, reason: str) -> NoReturn:
        """Raise `AskError`: the field, or its value, cannot be honoured for this reason."""
        path = self.path(name)
        raise AskError(f"{path}: {reason}", path)

    def text(self, name: str) -> str | None:
        value = self.data.get(name)
        if value is not None and not isinstance(value, str):
            refuse_value(self.path(name), "text", value)
        return value

    def required_text(self, name: str) -> str:
        """Refuses an empty text."""
        value = self.data.get(name)
        if not isinstance(value, str) or not value:
            refuse_value(self.path(name), "text", value)
        return value

    def boolean(self, name: str) -> bool | None:
        value = self.data.get(name)
        if value is not None and not isinstance(value, bool):
            refuse_value(self.path(name), "true or false", value)
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.data.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            refuse_value(self.path(name), f"an integer from {low} to {high}", value)
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.data.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            refuse_value(self.path(name), f"a number from {low:g} to {high:g}", value)
        return float(value)

    def choice(self, name: str, known: Sequence[str]) -> str | None:
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or value not in known:
            refuse_value(self.path(name), " or ".join(map(repr, known)), value)
        return value

    def items(self, name: str) -> Sequence[JsonValue]:
        """An absent list has no items."""
        value = self.data.get(name)
        return () if value is None else read_list(value, self.path(name))

    def object(self, name: str, known: AbstractSet[str]) -> "Fields | None":
        value = self.data.get(name)
        return None if value is None else Fields(value, known, self.path(name))

    def metadata(self, name: str = "metadata") -> Mapping[str, JsonValue] | None:
        """Return up to 16 short texts by name, which the response repeats."""
        value = self.data.get(name)
        if value is None:
            return None
        pairs = read_object(value, self.path(name))
        if len(pairs) > MAX_METADATA:
            self.refuse(name, f"expected at most {MAX_METADATA} pairs, received {len(pairs)}")
        for key, text in pairs.items():
            if len(key) > MAX_KEY_LENGTH:
                self.refuse(name, f"expected keys of at most {MAX_KEY_LENGTH} characters, received {shown(key)}")
            if not isinstance(text, str) or len(text) > MAX_VALUE_LENGTH:
                refuse_value(f"{self.path(name)}.{key}", f"text of at most {MAX_VALUE_LENGTH} characters", text)
        return pairs


def read_object(value: JsonValue, place: str) -> Mapping[str, JsonValue]:
    # Parsed bodies contain dict and list, for which isinstance is much faster than for the abstract types.
    if not isinstance(value, dict) and not isinstance(value, Mapping):
        refuse_value(place, "an object", value)
    return value


def read_list(value: JsonValue, place: str) -> Sequence[JsonValue]:
    if not isinstance(value, list) and (isinstance(value, str) or not isinstance(value, Sequence)):
        refuse_value(place, "a list", value)
    return value


def read_text(value: JsonValue, place: str) -> str:
    if not isinstance(value, str):
        refuse_value(place, "text", value)
    return value


def refuse_value(place: str, expected: str, value: JsonValue) -> NoReturn:
    received = "nothing" if value is None else shown(value)
    raise AskError(f"{place or 'the body'}: expected {expected}, received {received}", place or None)


def shown(value: JsonValue) -> str:
    """Return a shortened repr; long values are not formatted first."""
    if isinstance(value, str):
        text = repr(value[:_NUM_SHOWN])
        return text if len(value) <= _NUM_SHOWN else f"{text}…"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, Sequence):
        return f"a list of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 4 * _NUM_SHOWN:
        return "a very large integer"
    return repr(value)
