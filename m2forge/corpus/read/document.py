"""The reader's output: documents, and problems counted by kind with the first examples of each."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from m2forge.errors import DataError
from m2forge.records import JsonValue

MAX_EXAMPLES = 5
"""Maximum number of examples per kind of problem."""


@dataclass(frozen=True, slots=True)
class Document:
    text: bytes
    """The whole text in UTF-8."""
    name: str
    """Path relative to the source for a file of a folder; otherwise empty."""


class ProblemKind(StrEnum):
    NOT_JSON = "not_json"
    NOT_OBJECT = "not_object"
    MISSING_KEY = "missing_key"
    NOT_TEXT = "not_text"
    """The value under the key is not a string."""
    NOT_UTF8 = "not_utf8"
    TRUNCATED = "truncated"
    """An archive that ends early; the lines before are used."""
    UNREADABLE = "unreadable"
    """A file, or part of one, that its format's library cannot read."""
    TOO_LARGE = "too_large"
    """An archive, or a line of it, that decompresses to more than `Source.unpack` allows; what came before is used."""
    NO_TEXT = "no_text"
    """A PDF without any text: scanned pages."""


class Problems:
    """Counts problems; with `strict` it raises the first one as a `DataError` instead."""

    def __init__(self, strict: bool = False) -> None:
        self.counts: Counter[ProblemKind] = Counter()
        self.examples: dict[ProblemKind, list[str]] = {}
        self._strict = strict

    def add(self, kind: ProblemKind, location: str, detail: str) -> None:
        """`location` is FILE or FILE:LINE."""
        # File names may be bytes that are not valid UTF-8.
        message = f"{location}: {detail}".encode(errors="backslashreplace").decode()
        if self._strict:
            raise DataError(f"{message}; fix or remove it, or set strict = false to skip such input")
        self.counts[kind] += 1
        self._add_examples(kind, [message])

    def merge(self, other: "Problems") -> None:
        self.counts.update(other.counts)
        for kind, locations in other.examples.items():
            self._add_examples(kind, locations)

    @property
    def total(self) -> int:
        return self.counts.total()

    def to_json(self) -> dict[str, JsonValue]:
        kinds = sorted(self.counts)
        return {kind.value: {"count": self.counts[kind], "first": self.examples[kind]} for kind in kinds}

    @classmethod
    def from_json(cls, data: JsonValue) -> "Problems":
        problems = cls()
        assert isinstance(data, Mapping)
        for name, entry in data.items():
            assert isinstance(entry, Mapping)
            kind, count, locations = ProblemKind(name), entry["count"], entry["first"]
            assert isinstance(count, int)
            assert isinstance(locations, list)
            problems.counts[kind] = count
            problems.examples[kind] = [str(location) for location in locations]
        return problems

    def _add_examples(self, kind: ProblemKind, locations: Iterable[str]) -> None:
        examples = self.examples.setdefault(kind, [])
        examples += list(locations)[: MAX_EXAMPLES - len(examples)]
