"""The protocol of a task family: it generates tasks by seed, serves their tools, verifies answers, and demonstrates.

A family is stateless. `draw(difficulty, seed)` is deterministic, and a task's metadata, JSON only, is all that its
tools and its verifier need: a task written to disk and read again behaves the same. Calls and verification never raise,
whatever the policy wrote: an invalid call returns a line that begins with `error:`, and an unreadable answer has perf
0.

    task = family.draw(difficulty=3, seed=7)
    family.call(task, "look", {"key": "3G"})      '5B'
    family.verify(task, "5B").perf                0.0 or 1.0

Answers are compared as text after `plain`, which strips white space at both ends and one final full stop and collapses
white space inside to one space. The comparison is case-sensitive.
"""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

from m2forge.errors import ConfigError, RecordError
from m2forge.records import Domain, JsonValue, Task
from m2forge.text.argument import argument_problems, type_problem
from m2forge.text.message import Message, Tool

FAMILY_KEY = "family"
"""Metadata key of the name of the task's family."""
MAX_SHOWN = 200
"""Maximum characters of an answer or argument that evidence and error lines repeat."""


class VerdictReason(StrEnum):
    """How a verdict was reached; `tasks/runner.py` specifies the rule. A lost worker gives no verdict."""

    JUDGED = "judged"
    LIMIT = "limit"
    """The verifier exceeded its time or memory limit: perf 0."""
    VERIFIER_ERROR = "verifier_error"
    """The verifier raised, twice: perf 0."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's result for an answer."""

    perf: float
    """Score from 0, wrong, to 1, right."""
    evidence: Mapping[str, JsonValue] = field(default_factory=dict)
    """What was received and what was expected, as JSON values."""
    reason: VerdictReason = VerdictReason.JUDGED

    def __post_init__(self) -> None:
        if not 0 <= self.perf <= 1:
            raise RecordError(f"Verdict: perf: expected a number from 0 to 1, received {self.perf!r}")


class Family(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def domain(self) -> Domain: ...

    @property
    def levels(self) -> range:
        """The family's difficulties, easiest first; each family defines what the number counts."""
        ...

    def draw(self, difficulty: int, seed: int) -> Task:
        """Generate the task of this difficulty and seed; cheap and deterministic."""
        ...

    def tools(self, task: Task) -> tuple[Tool, ...]:
        """The tools that an agent may call."""
        ...

    def call(self, task: Task, name: str, arguments: JsonValue) -> str:
        """The tool's response; deterministic, never raises."""
        ...

    def latency_s(self, task: Task, name: str) -> float:
        """Latency that the caller simulates for a call. Calls of one turn may wait concurrently."""
        ...

    def verify(self, task: Task, answer: str) -> Verdict:
        """Verify the content of the agent's last message."""
        ...

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """A conversation that solves the task, from the user's message to the answer. `rng` picks one of several
        solutions."""
        ...


@runtime_checkable
class Preparing(Protocol):
    """A family that needs time to load the data of a task's tools and verifier. A worker calls `prepare` first, outside
    the time limit of verifying the policy's answer."""

    def prepare(self, task: Task) -> None: ...


class ToolFree:
    """Mixin for a family without tools."""

    def tools(self, task: Task) -> tuple[Tool, ...]:
        return ()

    def call(self, task: Task, name: str, arguments: JsonValue) -> str:
        return f"error: no tool {shown(name)}; this task has none"

    def latency_s(self, task: Task, name: str) -> float:
        return 0.0


# -- tasks ------------------------------------------------------------------------------------------------------------


def make_task(family: Family, difficulty: int, instruction: str, metadata: Mapping[str, JsonValue]) -> Task:
    """Build a task whose id is unique, because it hashes the task's whole content."""
    content = {FAMILY_KEY: family.name, **metadata}
    digest = hashlib.blake2b(json.dumps([instruction, content], sort_keys=True).encode(), digest_size=8).hexdigest()
    return Task(f"{family.name}-{difficulty}-{digest}", family.domain, instruction, float(difficulty), content)


def family_name(task: Task) -> str:
    return read_text(task, FAMILY_KEY)


def task_random(family: Family, difficulty: int, seed: int) -> random.Random:
    """The random generator of a task; refuses a difficulty that the family does not have."""
    levels = family.levels
    if difficulty not in levels:
        raise ConfigError(
            f"{family.name}: difficulty: expected {levels.start} to {levels.stop - 1}, received {difficulty!r}"
        )
    return random.Random(f"{family.name}/{difficulty}/{seed}")


def read_text(task: Task, key: str) -> str:
    value = task.metadata.get(key)
    if not isinstance(value, str):
        raise RecordError(f"Task {task.id}: metadata: {key}: expected text, received {value!r}")
    return value


def read_int(task: Task, key: str) -> int:
    value = task.metadata.get(key)
    if not isinstance(value, int):
        raise RecordError(f"Task {task.id}: metadata: {key}: expected an integer, received {value!r}")
    return value


# -- answers and calls ------------------------------------------------------------------------------------------------


def plain(answer: str) -> str:
    return " ".join(answer.split()).removesuffix(".").rstrip()


def compare(answer: str, expected: str) -> Verdict:
    """Perf 1 if both are the same plain text, else 0."""
    perf = float(plain(answer) == plain(expected))
    return Verdict(perf, {"expected": expected, "received": shown(answer)})


def call_problem(tools: Sequence[Tool], name: str, arguments: JsonValue) -> str | None:
    """The error line that responds to an invalid call; None if the call is valid."""
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        return f"error: no tool {shown(name)}; known: {', '.join(tool.name for tool in tools)}"
    if not isinstance(arguments, Mapping):
        return f"error: {name}: expected an object of arguments, received {shown(arguments)}"
    problems = argument_problems(arguments, tool)
    problems += [problem for key, value in arguments.items() if (problem := type_problem(value, key, tool))]
    return f"error: {shown('; '.join(problems))}" if problems else None


def shown(value: JsonValue) -> str:
    """Text for evidence or an error line: truncated and valid UTF-8."""
    text = value if isinstance(value, str) else repr(value)
    text = text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"
    return text.encode("utf-8", "replace").decode("utf-8")
