"""Tasks in, trajectories for fine-tuning out: OpenAI-style objects, as `m2forge sft` reads them from JSON Lines."""

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from m2forge.errors import DataError
from m2forge.files import write_atomic
from m2forge.records import JsonValue, Task
from m2forge.tasks.catalog import family_of
from m2forge.tasks.family import Fallible
from m2forge.text.message import Message, message_to_openai, tool_to_openai


def demonstrations(
    tasks: Iterable[Task], seed: int, system: str | None = None, mistake_rate: float = 0.0
) -> Iterator[dict[str, JsonValue]]:
    """Yield one trajectory per task. `system`: the agent's system prompt; None if it sends none. `mistake_rate`: how
    often the demonstrator makes the family's typical mistake where a step allows it."""
    for index, task in enumerate(tasks):
        family = family_of(task)
        messages = demonstrate(task, random.Random(f"{seed}/{index}/{task.id}"), mistake_rate)
        if system is not None:
            messages = [Message("system", system), *messages]
        yield {
            "messages": [message_to_openai(message) for message in messages],
            "tools": [tool_to_openai(tool) for tool in family.tools(task)],
        }


def demonstrate(task: Task, rng: random.Random, mistake_rate: float = 0.0) -> list[Message]:
    """One demonstration; without mistakes it is the family's own."""
    family = family_of(task)
    if not mistake_rate:
        return family.demonstrate(task, rng)
    if not isinstance(family, Fallible):
        raise DataError(f"{family.name}: its demonstrations make no mistakes; write `demonstrate_fallibly`")
    return family.demonstrate_fallibly(task, rng, mistake_rate)


def write_demonstrations(path: Path, tasks: Iterable[Task], seed: int, system: str | None = None) -> None:
    """Write one trajectory per line; the file is replaced atomically."""
    lines = (json.dumps(item, ensure_ascii=False) for item in demonstrations(tasks, seed, system))
    write_atomic(path, "".join(f"{line}\n" for line in lines))
