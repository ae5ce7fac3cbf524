"""Writes a question as a task folder: its fixture, hidden tests and solution, in Harbor's form.

    instruction.md                  a variant of the question (`instruction`)
    environment/Dockerfile          runs files/.fixture.sh in /workspace, as the agent's user
    tests/                          test.sh, `state.py` and the expected state
    solution/solve.sh               the accepted answer's commands

Authors and licence of the question are in `[metadata.m2forge]`.

The instructions are variants from many hints to none, all verified by the same tests:

    3   flags      the programs of a solution with their options
    2   commands   the programs of a solution
    1   formats    the question's expected output, or the beginning of the output for other files
    0   none       the question without commands and without expected output

Files, and where the result belongs, are in every variant, because the tests need them.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import cast

import tomli_w

from m2forge.config import TomlValue
from m2forge.pipelines.stage import Item
from m2forge.pipelines.terminal import programs, state
from m2forge.pipelines.terminal.build import ENV, OUTPUT, WORKSPACE
from m2forge.pipelines.terminal.posts import Block, markdown, read_blocks
from m2forge.pipelines.terminal.script import is_commands, without_prompts
from m2forge.pipelines.terminal.shell import SimpleCommand, read_commands
from m2forge.tasks.folders.folder import CONFIG_NAME, INSTRUCTION_NAME, FileKind, FolderFile
from m2forge.tasks.folders.task_toml import SCHEMA_VERSIONS

BASE_IMAGE = "python:3.12-bookworm@sha256:e91fec3d1ac69f04e4eddcd29c327e630ce34658cf31075bfa7e8b0e052bafea"
USER = 1000
AGENT_TIMEOUT_S, VERIFIER_TIMEOUT_S = 600.0, 60.0
FIXTURE = ".fixture.sh"
_STATE = Path(str(state.__file__))
_DOCKERFILE = f"""FROM {BASE_IMAGE}
ENV {" ".join(f"{name}={value}" for name, value in ENV.items())}
COPY --chown={USER}:{USER} files/ {WORKSPACE}/
WORKDIR {WORKSPACE}
USER {USER}
RUN mv {FIXTURE} /tmp/{FIXTURE} && bash -e /tmp/{FIXTURE} && rm /tmp/{FIXTURE}
"""
_TEST = f"""#!/bin/sh
# Compares the workspace with the expected state; no program of the attempt runs here.
mkdir -p /logs/verifier
reward=$(python3 -I /tests/{_STATE.name} check /tests/expected.json {WORKSPACE}) || reward=0
echo "$reward" > /logs/verifier/reward.txt
[ "$reward" = 1 ]
"""


def folder_name(item: Item) -> str:
    return f"terminal-{item.id}"


def task_files(item: Item) -> dict[str, FolderFile]:
    """The files of the folder; `instruction` in the item is the variant that was chosen."""
    texts = {
        CONFIG_NAME: tomli_w.dumps(task_table(item)),
        INSTRUCTION_NAME: item.text("instruction"),
        "environment/Dockerfile": _DOCKERFILE,
        f"environment/files/{FIXTURE}": item.text("fixture"),
        f"tests/{_STATE.name}": _STATE.read_text(encoding="utf-8"),
        "tests/expected.json": json.dumps(item.data["expected"], indent=1, sort_keys=True) + "\n",
    }
    programs = {"tests/test.sh": _TEST, "solution/solve.sh": solution(item)}
    files = {name: FolderFile(text.encode()) for name, text in texts.items()}
    return files | {name: FolderFile(text.encode(), FileKind.EXECUTABLE) for name, text in programs.items()}


def solution(item: Item) -> str:
    script = item.text("solution").rstrip("\n")
    if not item.data["prints"]:
        return f"#!/bin/bash\ncd {WORKSPACE} || exit 1\n{script}\n"
    # The output is moved into the workspace at the end: a solution that lists files must not see it.
    return (
        f"#!/bin/bash\ncd {WORKSPACE} || exit 1\n(\n{script}\n) > /tmp/{OUTPUT}\n"
        f"cp /tmp/{OUTPUT} {WORKSPACE}/{OUTPUT}\n"
    )


def task_table(item: Item) -> dict[str, TomlValue]:
    data = cast("Mapping[str, TomlValue]", item.data)
    provenance: dict[str, TomlValue] = {
        "source": str(data.get("source", "stackexchange")),
        "package": f"question-{item.id}",
        "domain": "agent",
        "licence": data["licence"],
        "authors": data["authors"],
        "grade": data["grade"],
        "hints": data["hints"],
    }
    return {
        "schema_version": SCHEMA_VERSIONS[-1],
        "artifacts": [WORKSPACE],
        "task": {"name": f"m2forge/{folder_name(item)}", "keywords": cast("list[TomlValue]", list(data["tags"]))},  # type: ignore[arg-type]
        "metadata": {"m2forge": provenance},
        "agent": {"timeout_sec": AGENT_TIMEOUT_S, "user": USER},
        "verifier": {"environment_mode": "separate", "timeout_sec": VERIFIER_TIMEOUT_S},
        "environment": {
            "network_mode": "no-network",
            "workdir": WORKSPACE,
            "cpus": 1,
            "memory_mb": 1024,
            "storage_mb": 1024,
        },
    }


FORMATS, COMMANDS, FLAGS = 1, 2, 3
# -- instructions ------------------------------------------------------------------------------------------------------

MAX_LISTED = 12
MAX_EXAMPLE_LINES = 3
_SPAN = re.compile(r"`([^`\n]+)`")
_GOAL = re.compile(r"\?|\b(?:want|need|like to|how)\b", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[.!?:…])\s+(?=[A-Z`(])")


def instructions(item: Item) -> list[str]:
    """The variants, that with the fewest hints first."""
    return [instruction(item, hints) for hints in (0, FORMATS, COMMANDS, FLAGS)]


def instruction(item: Item, hints: int) -> str:
    data = item.data
    expected = cast("Sequence[str]", data["example_expected"])
    used = {command.program for command in read_commands(item.text("solution"))}
    blocks = [_reduced(block, hints, used) for block in read_blocks(item.text("question"))]
    shown = [b for b in blocks if b.text.strip() and not (hints < FORMATS and b.is_code and b.text in expected)]
    parts = [f"# {_title(item.text('title'), hints)}", markdown(shown), "## Task", _task(data)]
    if hints >= FORMATS and not expected and (example := _example(data)):
        parts.append(example)
    if hints >= COMMANDS and (named := _hint(item.text("solution"), hints)):
        parts.append(named)
    return "\n\n".join(part for part in parts if part.strip()) + "\n"


def _task(data: Mapping[str, object]) -> str:
    inputs = cast("list[str]", data["inputs"])
    changed = cast("Mapping[str, list[str]]", data["changed"])
    lines = [
        f"Do this once for the files in `{WORKSPACE}`.",
        "Where the question shows a file, the one there has the same form and other contents.",
    ]
    if inputs:
        lines.append(f"Files: {_listed(inputs)}.")
    if data["prints"]:
        lines.append(f"Write the result to `{WORKSPACE}/{OUTPUT}`, as a command would print it.")
        if not cast("Mapping[str, object]", data["expected"])["is_ordered"]:
            lines.append("The order of its lines does not matter.")
    elif changed["created"]:
        lines.append(f"The result includes {_listed(changed['created'])}.")
    lines.append("Leave other files as they are, and no further ones behind; scratch files belong in `/tmp`.")
    return "\n".join(lines)


def _listed(paths: Sequence[str]) -> str:
    shown = ", ".join(f"`{path}`" for path in paths[:MAX_LISTED])
    return shown if len(paths) <= MAX_LISTED else f"{shown} and {len(paths) - MAX_LISTED} more"


def _example(data: Mapping[str, object]) -> str:
    """The beginning of the result for other files of the same form."""
    lines = [line for line in str(data["example"]).rstrip("\n").split("\n") if line.strip()][:MAX_EXAMPLE_LINES]
    return "For other files, the result begins like this:\n\n```\n" + "\n".join(lines) + "\n```" if lines else ""


def _hint(script: str, hints: int) -> str:
    names: dict[str, list[str]] = {}
    for command in read_commands(script):
        if command.program and command.program not in ("for", "done", "cd"):
            names.setdefault(command.program, []).extend(_options(command))
    if not names:
        return ""
    if hints < FLAGS:
        return "A solution uses " + ", ".join(f"`{name}`" for name in names) + "."
    shown = [" ".join([name, *dict.fromkeys(options)]) for name, options in names.items()]
    return "A solution uses " + ", ".join(f"`{one}`" for one in shown) + "."


def _options(command: SimpleCommand) -> list[str]:
    """The options of a command, without their values: `-k` of `-k2,2n`, `-rn` as it is."""
    found = [re.match(r"--[a-zA-Z][\w-]*|-[a-zA-Z]+(?=$)|-[a-zA-Z]|-\d+$", text) for text in command.texts]
    return [match[0] for match in found if match]


def _title(title: str, hints: int) -> str:
    if hints >= COMMANDS:
        return title
    known = "|".join(sorted(map(re.escape, filter(str.isalnum, programs.ALLOWED)), key=len, reverse=True))
    return re.sub(rf"\s*\b(?:with|using|in|by)\s+(?:{known})\b", "", title, flags=re.IGNORECASE)


def _reduced(block: Block, hints: int, used: Collection[str]) -> Block:
    """A block of the question without the hints that this variant does not give. `used`: programs of the solution."""
    if hints >= FLAGS:
        return block
    if block.is_code:
        script = without_prompts(block.text)
        is_hint = _runs(script, used) and (hints < COMMANDS or any(map(_options, read_commands(script))))
        return Block("", True) if is_hint else block
    if hints >= COMMANDS:
        return Block(_SPAN.sub(lambda span: f"`{span[1].split()[0]}`" if _runs(span[1], used) else span[0], block.text))
    chosen = list[str]()
    for sentence in _SENTENCE.split(block.text):
        if not any(_runs(span, used) for span in _SPAN.findall(sentence)):
            chosen.append(sentence)
        elif _GOAL.search(sentence):
            # What is asked must stay.
            chosen.append(_SPAN.sub(lambda span: "a command" if _runs(span[1], used) else span[0], sentence))
    return Block(" ".join(chosen))


def _runs(text: str, used: Collection[str]) -> bool:
    """Whether a text is a command that runs a program of the solution."""
    return is_commands(text) and any(command.program in used for command in read_commands(text))
