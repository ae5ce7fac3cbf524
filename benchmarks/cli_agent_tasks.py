"""Tasks on files for a CLI agent, and demonstrations of them in the messages that mini-swe-agent sends.

    FOLDER/create.jsonl     Create notes/amber.txt with the line: quiet harbor lantern
    FOLDER/replace.jsonl    In meadow.txt, replace every copper with violet.
    FOLDER/count.jsonl      Write the number of lines of thunder.txt to pebble.txt.
    FOLDER/copy.jsonl       Copy walnut.txt to attic/saddle.txt.

Each file is a source of tasks for `m2forge rl` (`m2forge/tasks/task_file.py`) with `command` verifiers, which look
at the files that the agent left. A task's split is that of `JsonlFamily`: one instruction in five is held out, by its
hash. A demonstration runs one command that solves the task and then mini-swe-agent's command that ends the attempt.

    python benchmarks/cli_agent_tasks.py FOLDER             writes the four files
"""

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from m2forge.files import write_atomic
from m2forge.records import JsonValue, Task
from m2forge.text.message import Message, Tool, ToolCall, message_to_openai, tool_to_openai

NUM_TASKS = 600
"""Tasks of each kind, about 480 of them for training."""
EXPECTED = ".expected"
"""File that a verifier writes into the workspace and compares with the agent's."""
SYSTEM = "You change files with the tool bash."
"""The system prompt, as configs/rl/smollm2-mini-swe.toml gives it to mini-swe-agent."""
USER = "{} Then run: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The first user message, likewise."""
RESULT = "status 0"
"""The message after a command that succeeded and printed nothing, likewise."""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
BASH = Tool(
    "bash",
    "Execute a bash command",
    {
        "type": "object",
        "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
        "required": ["command"],
    },
)
"""The tool that mini-swe-agent offers."""
TEXT = (
    "amber anchor apple attic autumn bamboo basket beacon birch blanket bottle bridge bronze butter button cabin "
    "candle canyon carpet castle cedar chalk cherry circle cloud clover cobalt copper coral corner cotton cradle "
    "crystal dagger daisy desert diamond dragon eagle ember engine falcon feather fiddle finger flower forest fossil "
    "galaxy garden ginger glacier granite hammer harbor hazel helmet hollow honey island ivory jacket jungle kernel "
    "kettle ladder lagoon lantern laurel lemon linen lizard magnet maple marble meadow melon mirror mountain needle "
    "nickel ocean olive orange orchid otter oxygen paddle panther parrot pebble pencil pepper pillow planet pocket "
    "prairie quartz rabbit raven ribbon river rocket saddle salmon sandal saturn shadow silver spider spring squirrel "
    "stone summer sunset temple thunder ticket tiger timber tulip tunnel turtle valley velvet violet walnut window "
    "winter yellow zebra"
)
WORDS = TEXT.split()
"""What names and contents of files are made of."""


@dataclass(frozen=True)
class FileTask:
    instruction: str
    command: str
    """A command that solves it."""
    verifier: dict[str, JsonValue]
    solved: dict[str, str]
    """Files that the command leaves."""
    files: dict[str, str] = field(default_factory=dict)
    """Files that are there before."""

    def line(self) -> dict[str, JsonValue]:
        """As in a task file."""
        return {
            "instruction": self.instruction,
            "files": dict(self.files),
            "domain": "agent",
            "reference": self.command,
            "reference_files": dict(self.solved),
            "verifier": self.verifier,
        }


def create(words: Sequence[str], rng: random.Random) -> FileTask:
    folder, name, *line = words[:5]
    path, text = f"{folder}/{name}.txt", " ".join(line)
    return FileTask(
        f"Create {path} with the line: {text}",
        f"mkdir -p {folder} && echo {text} > {path}",
        _same(path, f"{text}\n"),
        {path: f"{text}\n"},
    )


def replace(words: Sequence[str], rng: random.Random) -> FileTask:
    name, old, new, *others = words
    path = f"{name}.txt"
    lines = [rng.sample([old, *others], 3) for _ in range(rng.randint(3, 5))] + [[old, others[0], old]]
    before = "".join(f"{' '.join(line)}\n" for line in lines)
    after = "".join(f"{' '.join(new if word == old else word for word in line)}\n" for line in lines)
    return FileTask(
        f"In {path}, replace every {old} with {new}.",
        f"sed -i s/{old}/{new}/g {path}",
        _same(path, after),
        {path: after},
        {path: before},
    )


def count(words: Sequence[str], rng: random.Random) -> FileTask:
    source, dest = f"{words[0]}.txt", f"{words[1]}.txt"
    num_lines = rng.randint(3, 40)
    return FileTask(
        f"Write the number of lines of {source} to {dest}.",
        f"wc -l < {source} > {dest}",
        {"command": ["sh", "-c", f'test "$(tr -d " " < {dest})" = {num_lines}']},
        {dest: f"{num_lines}\n"},
        {source: "".join(f"{rng.choice(words)}\n" for _ in range(num_lines))},
    )


def copy(words: Sequence[str], rng: random.Random) -> FileTask:
    source, folder, dest = f"{words[0]}.txt", words[1], f"{words[1]}/{words[2]}.txt"
    text = f"{' '.join(words[3:])}\n"
    return FileTask(
        f"Copy {source} to {dest}.",
        f"mkdir -p {folder} && cp {source} {dest}",
        _same(dest, text),
        {dest: text},
        {source: text},
    )


KINDS: dict[str, Callable[[Sequence[str], random.Random], FileTask]] = {
    "create": create,
    "replace": replace,
    "count": count,
    "copy": copy,
}


def file_tasks(kind: str, num: int = NUM_TASKS, seed: int = 0) -> list[FileTask]:
    """`num` tasks with different instructions."""
    rng = random.Random(f"{seed}/{kind}")
    tasks: dict[str, FileTask] = {}
    while len(tasks) < num:
        task = KINDS[kind](rng.sample(WORDS, 7), rng)
        tasks.setdefault(task.instruction, task)
    return list(tasks.values())


def write_tasks(folder: Path, num: int = NUM_TASKS) -> list[Path]:
    """One file for each kind, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{kind}.jsonl" for kind in KINDS]
    for kind, path in zip(KINDS, paths, strict=True):
        write_atomic(path, "".join(f"{json.dumps(task.line())}\n" for task in file_tasks(kind, num)))
    return paths


def prompt(instruction: str) -> list[Message]:
    """What mini-swe-agent sends first."""
    return [Message("system", SYSTEM), Message("user", USER.format(instruction))]


def demonstration(task: Task) -> list[Message]:
    """All messages of an attempt that solves a task of these files."""
    command = task.metadata["reference"]
    return [
        *prompt(task.instruction),
        Message("assistant", "", tool_calls=(ToolCall("bash", {"command": command}, "call-0"),)),
        Message("tool", RESULT, tool_call_id="call-0"),
        Message("assistant", "", tool_calls=(ToolCall("bash", {"command": SUBMIT}, "call-1"),)),
    ]


def write_file_demonstrations(path: Path, tasks: Sequence[Task]) -> None:
    rows = (
        {"messages": [message_to_openai(message) for message in demonstration(task)], "tools": [tool_to_openai(BASH)]}
        for task in tasks
    )
    write_atomic(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def _same(path: str, text: str) -> dict[str, JsonValue]:
    """The verifier that compares a file with a text, byte by byte."""
    return {"command": ["cmp", path, EXPECTED], "files": {EXPECTED: text}}


if __name__ == "__main__":
    for written in write_tasks(Path(sys.argv[1])):
        print(written)
