"""Tasks in, trajectories for fine-tuning out: OpenAI-style objects, as `m2forge sft` reads them from JSON Lines."""

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from m2forge.files import write_atomic
from m2forge.records import JsonValue, Task
from m2forge.tasks.catalog import family_of
from m2forge.text.message import Message, message_to_openai, tool_to_openai


def demonstrations(tasks: Iterable[Task], seed: int, system: str | None = None) -> Iterator[dict[str, JsonValue]]:
    """Yield one trajectory per task. `system`: the agent's system prompt; None if it sends none."""
    for index, task in enumerate(tasks):
        family = family_of(task)
        messages = family.demonstrate(task, random.Random(f"{seed}/{index}/{task.id}"))
        if system is not None:
            messages = [Message("system", system), *messages]
        yield {
            "messages": [message_to_openai(message) for message in messages],
            "tools": [tool_to_openai(tool) for tool in family.tools(task)],
        }


def write_demonstrations(path: Path, tasks: Iterable[Task], seed: int, system: str | None = None) -> None:
    """Write one trajectory per line; the file is replaced atomically."""
    lines = (json.dumps(item, ensure_ascii=False) for item in demonstrations(tasks, seed, system))
    write_atomic(path, "".join(f"{line}\n" for line in lines))
