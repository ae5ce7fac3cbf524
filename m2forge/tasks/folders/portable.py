"""What a task folder needs of a family's task, computed in a worker process: a family and a task in, JSON out."""

import random
from collections.abc import Mapping

from m2forge.errors import DataError
from m2forge.records import ROLLOUT_KEY, JsonValue, Task
from m2forge.tasks.family import Checkable, Family, Tabular
from m2forge.text.message import Tool


def portable(family: Family, task: Task) -> dict[str, JsonValue]:
    """The check of the answer, the tools as tables, and an answer that solves the task, or None. Raises a `DataError`
    that says why a family cannot be exported."""
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
        "tools": [_table(family, task, tool) for tool in tools],
        "reference": _reference(family, task),
    }


def _table(family: Family, task: Task, tool: Tool) -> dict[str, JsonValue]:
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


def _reference(family: Family, task: Task) -> str | None:
    try:
        return family.demonstrate(task, random.Random(task.id))[-1].content
    except DataError:
        return None
