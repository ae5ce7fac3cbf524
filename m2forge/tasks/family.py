"""The protocol of a task family: it generates tasks by seed, serves their tools, verifies answers, and demonstrates.

A family is stateless. `draw(difficulty, seed)` is deterministic, and a task's metadata, JSON only, is all that its
tools and its verifier need: a task written to disk and read again behaves the same. Calls and verification never raise,
whatever the policy wrote: an invalid call returns a line that begins with `error:`, and an unreadable answer has perf
0.

    task = family.draw(difficulty=3, seed=7)
    family.call(task, "look", {"key": "3G"})      '5B'
    family.verify(task, Submission("5B")).perf    0.0 or 1.0

Answers are compared as text after `plain`, which strips white space at both ends and one final full stop and collapses
white space inside to one space. The comparison is case-sensitive.
"""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from m2forge.errors import ConfigError, RecordError
from m2forge.records import Domain, JsonValue, Submission, Task, Verdict, VerdictReason
from m2forge.text.argument import argument_problems, type_problem
from m2forge.text.message import Message, Tool

__all__ = ["Family", "Preparing", "Submission", "ToolFree", "Verdict", "VerdictReason"]

FAMILY_KEY = "family"
"""Metadata key of the name of the task's family."""
MAX_SHOWN = 200
"""Maximum characters of an answer or argument that evidence and error lines repeat."""


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

    def verify(self, task: Task, submission: Submission) -> Verdict:
        """Verify what an attempt submitted: the agent's last message, the workspace, the recorded conversation."""
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
