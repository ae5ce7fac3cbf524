"""What a family of tasks is: it makes tasks by number, serves their tools, verifies answers, and shows how it is done.

A family is a value without state. `draw(difficulty, seed)` gives the same task every time, and a task's metadata, JSON
alone, is all that its tools and its verifier need: a task that was written to disk and read again behaves the same.
Calls and verification never raise, whatever a policy wrote: a call that cannot be served is answered with a line that
begins with `error:`, and an answer that cannot be read has perf 0.

    task = family.draw(difficulty=3, seed=7)
    family.call(task, "look", {"key": "3G"})      '5B'
    family.verify(task, "5B").perf                0.0 or 1.0

Answers are compared as text after `plain`: white space at both ends and one full stop at the end are taken off, and
white space inside counts as one space. Case counts.
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
"""Of a task's metadata: the name of the family that made it."""
MAX_SHOWN = 200
"""Characters of an answer, or of an argument, that evidence and error lines repeat."""


class VerdictReason(StrEnum):
    """How a verdict came about; `tasks/runner.py` states the rule. A worker that was lost gives no verdict."""

    JUDGED = "judged"
    LIMIT = "limit"
    """The verifier exceeded its limit of time or memory: perf 0."""
    VERIFIER_ERROR = "verifier_error"
    """The verifier raised, twice: perf 0."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier says about an answer."""

    perf: float
    """From 0, wrong, to 1, right."""
    evidence: Mapping[str, JsonValue] = field(default_factory=dict)
    """What was seen and what was expected. JSON values only."""
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
        """The difficulties there are, easiest first; the family says what the number counts."""
        ...

    def draw(self, difficulty: int, seed: int) -> Task:
        """The task of this number; cheap, and the same every time."""
        ...

    def tools(self, task: Task) -> tuple[Tool, ...]:
        """What an agent may call."""
        ...

    def call(self, task: Task, name: str, arguments: JsonValue) -> str:
        """What the tool answers: the same every time, and never an exception."""
        ...

    def latency_s(self, task: Task, name: str) -> float:
        """How long whoever executes a call should let it take. Calls of one turn may wait together."""
        ...

    def verify(self, task: Task, answer: str) -> Verdict:
        """Judge the content of the agent's last message."""
        ...

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """A conversation that solves the task, from the user's message to the answer. `rng` chooses among ways."""
        ...


@runtime_checkable
class Preparing(Protocol):
    """A family that needs time to load what a task's tools and verifier work on. A worker calls `prepare` first,
    outside of the limit of time that a policy's answer has."""

    def prepare(self, task: Task) -> None: ...


class ToolFree:
    """The tools of a family that has none."""

    def tools(self, task: Task) -> tuple[Tool, ...]:
        return ()

    def call(self, task: Task, name: str, arguments: JsonValue) -> str:
        return f"error: no tool {shown(name)}; this task has none"

    def latency_s(self, task: Task, name: str) -> float:
        return 0.0


# -- tasks ------------------------------------------------------------------------------------------------------------


def make_task(family: Family, difficulty: int, instruction: str, metadata: Mapping[str, JsonValue]) -> Task:
    """A task whose id tells it from every other: it is made of all that the task is."""
    content = {FAMILY_KEY: family.name, **metadata}
    digest = hashlib.blake2b(json.dumps([instruction, content], sort_keys=True).encode(), digest_size=8).hexdigest()
    return Task(f"{family.name}-{difficulty}-{digest}", family.domain, instruction, float(difficulty), content)


def family_name(task: Task) -> str:
    return read_text(task, FAMILY_KEY)


def task_random(family: Family, difficulty: int, seed: int) -> random.Random:
    """Where a family takes a task's chances from. A difficulty that it does not have is refused."""
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
    """Right if both are the same plain text."""
    perf = float(plain(answer) == plain(expected))
    return Verdict(perf, {"expected": expected, "received": shown(answer)})


def call_problem(tools: Sequence[Tool], name: str, arguments: JsonValue) -> str | None:
    """What is wrong with a call, as the line that answers it; None if it can be served."""
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        return f"error: no tool {shown(name)}; known: {', '.join(tool.name for tool in tools)}"
    if not isinstance(arguments, Mapping):
        return f"error: {name}: expected an object of arguments, received {shown(arguments)}"
    problems = argument_problems(arguments, tool)
    problems += [problem for key, value in arguments.items() if (problem := type_problem(value, key, tool))]
    return f"error: {shown('; '.join(problems))}" if problems else None


def shown(value: JsonValue) -> str:
    """Text for evidence or an error line: short, and such as UTF-8 can express."""
    text = value if isinstance(value, str) else repr(value)
    text = text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"
    return text.encode("utf-8", "replace").decode("utf-8")
