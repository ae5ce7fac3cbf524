"""Problems and notes from reading and encoding trajectories, counted by kind with the first examples of each.

A problem is a trajectory (or the rest of a file) that is lost because it is broken: `strict` refuses the data.
A note is valid content that training skips or changes: it is counted and logged, never refused. A `Report` is
JSON-serializable, so it is saved with the encoded data and loaded back with it.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self, TypeVar

from m2forge.errors import DataError
from m2forge.records import JsonValue

NUM_FIRST_PLACES = 5
"""Maximum number of examples per kind."""

_LONGEST_VALUE = 60

logger = logging.getLogger(__name__)


class Problem(StrEnum):
    """Why a trajectory was lost."""

    BROKEN_JSON = "broken JSON"
    TRUNCATED = "truncated file"
    TOO_LARGE = "unpacks to more than it may"
    MISSING_KEY = "missing key"
    BAD_VALUE = "bad value"
    BAD_ROLE = "bad role"
    BAD_ARGUMENTS = "arguments that are not a JSON object"
    BAD_ORDER = "messages in an impossible order"
    UNKNOWN_VERSION = "unknown schema version"
    INEXPRESSIBLE = "messages that the chat format cannot express"


class Note(StrEnum):
    """What was skipped or changed."""

    CUT = "cut at a turn to fit the context"
    TOO_LONG = "dropped, too long for the context"
    UNTRAINED = "dropped, nothing in it is trained"
    HELD_OUT = "held out for evaluation"
    IMAGE = "image left out"
    AUDIO = "audio left out"
    SUBAGENT = "reference to another agent's trajectory left out"
    CONTINUED = "continued in another file"
    NOTICE = "system step within the conversation, given to the user's role"
    REPLACED = "context replaced, continued as a trajectory of its own"
    UNKNOWN_CONTEXT = "context changed in a way that is not recorded, the rest left out"
    NOT_ATIF = "JSON file that is no ATIF trajectory, passed over"
    UNMATCHED_PART = "prompt part found in no system prompt"


_WARNED = {Note.CUT, Note.TOO_LONG, Note.UNKNOWN_CONTEXT, Note.UNMATCHED_PART}


class Rejection(DataError):
    """One trajectory that cannot be used. Readers report it and continue with the next."""

    def __init__(self, problem: Problem, location: str, what: str) -> None:
        super().__init__(f"{location}: {problem}: {what}")
        self.problem = problem
        self.location = location
        self.what = what


def show(value: JsonValue) -> str:
    """A received value for an error message, shortened."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


@dataclass
class Finding:
    """How often one kind of problem or note occurred, and the first locations."""

    count: int = 0
    places: list[str] = field(default_factory=list)

    def add(self, location: str, what: str) -> None:
        self.count += 1
        if len(self.places) < NUM_FIRST_PLACES:
            self.places.append(f"{location}: {what}" if what else location)


@dataclass
class Report:
    """Counts over one set of sources. Tokens and turns are those of the first variant of each accepted trajectory."""

    num_trajectories: int = 0
    """Trajectories read without a problem, accepted or not."""
    num_kept: int = 0
    num_turns: int = 0
    """Assistant messages in the accepted trajectories."""
    num_tokens: int = 0
    num_trained_tokens: int = 0
    problems: dict[Problem, Finding] = field(default_factory=dict)
    notes: dict[Note, Finding] = field(default_factory=dict)

    def add_problem(self, rejection: Rejection) -> None:
        self.problems.setdefault(rejection.problem, Finding()).add(rejection.location, rejection.what)

    def add_note(self, note: Note, location: str, what: str = "") -> None:
        self.notes.setdefault(note, Finding()).add(location, what)

    def count(self, kind: Problem | Note) -> int:
        finding = self.problems.get(kind) if isinstance(kind, Problem) else self.notes.get(kind)
        return finding.count if finding else 0

    @property
    def num_problems(self) -> int:
        return sum(finding.count for finding in self.problems.values())

    def refuse_problems(self) -> None:
        """Raise the `DataError` that `strict` requires, if anything was lost."""
        if self.problems:
            lines = _lines(self.problems)
            raise DataError(
                "\n  ".join(
                    [f"{self.num_problems} problems in the trajectories; fix them or set strict = false", *lines]
                )
            )

    def describe(self) -> str:
        """The report as text, one finding per line."""
        head = (
            f"{self.num_kept} of {self.num_trajectories} trajectories accepted: {self.num_turns} assistant turns, "
            f"{self.num_tokens} tokens, {self.num_trained_tokens} of them trained"
        )
        return "\n  ".join([head, *_lines(self.problems), *_lines(self.notes)])

    def log(self) -> None:
        """Log the totals, and losses as warnings."""
        logger.info("%s", self.describe().splitlines()[0])
        for line in _lines(self.problems):
            logger.warning("%s", line)
        for note, finding in self.notes.items():
            level = logging.WARNING if note in _WARNED else logging.INFO
            logger.log(level, "%s", _line(note, finding))

    def to_json(self) -> dict[str, JsonValue]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, JsonValue]) -> Self:
        numbers = {name: value for name, value in data.items() if isinstance(value, int)}
        problems = _findings(data["problems"], Problem)
        return cls(**numbers, problems=problems, notes=_findings(data["notes"], Note))


_Kind = TypeVar("_Kind", Problem, Note)


def _findings(data: JsonValue, kind: type[_Kind]) -> dict[_Kind, Finding]:
    findings: dict[_Kind, Finding] = {}
    if isinstance(data, Mapping):
        for name, value in data.items():
            if isinstance(value, Mapping) and isinstance(value["count"], int) and isinstance(value["places"], list):
                findings[kind(name)] = Finding(value["count"], [str(location) for location in value["places"]])
    return findings


def _lines(findings: Mapping[_Kind, Finding]) -> list[str]:
    return [_line(kind, finding) for kind, finding in findings.items()]


def _line(kind: Problem | Note, finding: Finding) -> str:
    more = "; …" if finding.count > len(finding.places) else ""
    return f"{finding.count} × {kind}: {'; '.join(finding.places)}{more}"
