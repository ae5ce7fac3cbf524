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
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from m2forge.errors import ConfigError, DataError, RecordError
from m2forge.records import ROLLOUT_KEY, Domain, JsonValue, Submission, Task, Verdict, VerdictReason
from m2forge.tasks.answer import plain
from m2forge.text.argument import argument_problems, type_problem
from m2forge.text.message import Message, Tool

__all__ = [
    "Checkable",
    "Fallible",
    "Family",
    "Finite",
    "Preparing",
    "Submission",
    "Tabular",
    "Verdict",
    "VerdictReason",
]

FAMILY_KEY = "family"
"""Metadata key of the name of the task's family."""
SOURCE_KEY = "source"
"""Metadata key of the family's key (`tasks/source.py`); absent if that is the family's name."""
SPLIT_KEY = "split"
"""Metadata key of the split of a task of a file."""
MAX_SHOWN = 200
"""Maximum characters of an answer or argument that evidence and error lines repeat."""


class UnavailableError(Exception):
    """Raised by a verifier that cannot judge now, because a service that it needs does not respond: the attempt has no
    verdict and is retried."""


class TimeLimitError(Exception):
    """A command of a verifier that ran over its time limit: a verdict with the reason `limit`."""


def as_verdict(value: object, where: str) -> Verdict:
    """A verdict from what a function returned: a verdict, or a perf."""
    if isinstance(value, Verdict):
        return value
    if isinstance(value, int | float):
        return Verdict(float(value))
    received = "nothing" if value is None else repr(value)[:100]
    raise RecordError(f"{where}: expected a Verdict or a number from 0 to 1, received {received}; return Verdict(perf)")


class Family(Protocol):
    """Derive a class from this to inherit what has a default: a family without tools and demonstrations."""

    if TYPE_CHECKING:
        # Properties for type checkers alone, which then accept frozen classes; a derived class sets plain attributes.
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

    def verify(self, task: Task, submission: Submission) -> Verdict:
        """Verify what an attempt submitted: the agent's last message, the workspace, the recorded conversation."""
        ...

    def tools(self, task: Task) -> tuple[Tool, ...]:
        """The tools that an agent may call."""
        return ()

    def call(self, task: Task, name: str, arguments: JsonValue) -> str:
        """The tool's response; deterministic, never raises."""
        return f"error: no tool {shown(name)}; this task has none"

    def latency_s(self, task: Task, name: str) -> float:
        """Latency that the caller simulates for a call. Calls of one turn may wait concurrently."""
        return 0.0

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """A conversation that solves the task, from the user's message to the answer. `rng` picks one of several
        solutions."""
        raise DataError(f"{self.name}: it has no demonstrations; write `demonstrate`")


@runtime_checkable
class Preparing(Protocol):
    """A family that needs time to load the data of a task's tools and verifier. A worker calls `prepare` first, outside
    the time limit of verifying the policy's answer."""

    def prepare(self, task: Task) -> None: ...


@runtime_checkable
class Fallible(Protocol):
    """A family that also knows a typical mistake, so that demonstrations can be as imperfect as collected data are."""

    def demonstrate_fallibly(self, task: Task, rng: random.Random, mistake_rate: float) -> list[Message]:
        """A conversation by a demonstrator who makes the mistake with probability `mistake_rate` at every step that
        allows it, and then goes on consistently; its answer may be wrong."""
        ...


@runtime_checkable
class Checkable(Protocol):
    """A family whose verdict depends on the answer alone, by a check of `tasks/answer.py`: its tasks can be exported to
    folders that verify without this package."""

    def answer_check(self, task: Task) -> dict[str, JsonValue]: ...


@runtime_checkable
class Tabular(Protocol):
    """A family whose tools each have one argument with finitely many values, so that a table is the whole tool."""

    def keys(self, task: Task, name: str) -> Sequence[str]:
        """The values of the argument of the tool with that name."""
        ...


@runtime_checkable
class Finite(Protocol):
    """A family with a fixed list of tasks, whose `draw` is not used."""

    @property
    def tasks(self) -> Sequence[Task]: ...

    @property
    def has_levels(self) -> bool:
        """Whether its tasks have levels; otherwise their difficulty is measured by pass rates."""
        ...


@runtime_checkable
class Rejecting(Protocol):
    """A family with a fixed list of tasks that leaves out those that cannot be used."""

    @property
    def rejected(self) -> Sequence[str]:
        """Why, one message for each."""
        ...


# -- tasks ------------------------------------------------------------------------------------------------------------


def make_task(family: Family, difficulty: int, instruction: str, metadata: Mapping[str, JsonValue]) -> Task:
    """Build a task whose id is unique, because it hashes the task's whole content."""
    content = {FAMILY_KEY: family.name, **metadata}
    digest = hashlib.blake2b(json.dumps([instruction, content], sort_keys=True).encode(), digest_size=8).hexdigest()
    return Task(f"{family.name}-{difficulty}-{digest}", family.domain, instruction, float(difficulty), content)


def family_name(task: Task) -> str:
    return read_text(task, FAMILY_KEY)


def family_key_of(task: Task) -> str:
    """The key of the task's family, by which a worker finds it."""
    return read_text(task, SOURCE_KEY if SOURCE_KEY in task.metadata else FAMILY_KEY)


def labelled(task: Task, family: Family, key: str, difficulty: int) -> Task:
    """The task with its family, the family's key and its difficulty, as every task of a run has them."""
    label: dict[str, JsonValue] = {FAMILY_KEY: family.name}
    if key != family.name:
        label[SOURCE_KEY] = key
    if task.difficulty == difficulty and all(task.metadata.get(name) == value for name, value in label.items()):
        return task
    return replace(task, difficulty=float(difficulty), metadata={**task.metadata, **label})


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


def portable(family: Family, task: Task) -> dict[str, JsonValue]:
    """What a task folder needs of a task, computed in a worker process: the check of the answer, the tools as tables,
    and an answer that solves the task, or None. Raises a `DataError` that says why a family cannot be exported."""
    if ROLLOUT_KEY in task.metadata:
        raise DataError(f"{family.name}: cannot be exported: the environment drives its own rollouts")
    if not isinstance(family, Checkable):
        raise DataError(
            f"{family.name}: cannot be exported: its verifier is code that a folder does not have; give the family a "
            "method `answer_check` (m2forge/tasks/answer.py lists the checks)"
        )
    tools = family.tools(task)
    if tools and not isinstance(family, Tabular):
        raise DataError(
            f"{family.name}: cannot be exported: its tools are code that a folder does not have; give the family a "
            "method `keys`, which makes them tables"
        )
    return {
        "check": family.answer_check(task),
        "tools": [_tool_table(family, task, tool) for tool in tools],
        "reference": _reference_answer(family, task),
    }


def _tool_table(family: Family, task: Task, tool: Tool) -> dict[str, JsonValue]:
    assert isinstance(family, Tabular)
    properties = tool.parameters.get("properties")
    names = list(properties) if isinstance(properties, Mapping) else []
    if len(names) != 1:
        raise DataError(f"{family.name}: cannot be exported: its tool {tool.name} has the arguments {names}, not one")
    table = {key: family.call(task, tool.name, {names[0]: key}) for key in family.keys(task, tool.name)}
    words = [tool.name, *names, *table]
    if any(word.split() != [word] for word in words) or any("\n" in value for value in table.values()):
        raise DataError(f"{family.name}: cannot be exported: keys of its tool {tool.name} are not words of one line")
    return {
        "name": tool.name,
        "argument": names[0],
        "description": tool.description,
        "latency_s": family.latency_s(task, tool.name),
        "table": table,
    }


def _reference_answer(family: Family, task: Task) -> str | None:
    try:
        return family.demonstrate(task, random.Random(task.id))[-1].content
    except DataError:
        return None
