"""`m2forge tasks export FAMILY DIR`: writes the tasks of any source as task folders.

    instruction.md          the task's instruction, its tools as programs, and where the answer belongs
    environment/            Dockerfile on a base pinned by digest; files/ in /workspace, its tools as programs
    tests/                  test.sh, which verifies by `answer.py` (a copy of `tasks/answer.py`) and `check.json`
    solution/               solve.sh, where the family has an answer that solves the task

The folders verify in a fresh environment, without network and without this package. A family that cannot be verified
so is refused with the reason. Its code runs in worker processes; all folders are written, or none.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import tomli_w

from m2forge.config import TomlValue
from m2forge.errors import ConfigError, DataError
from m2forge.records import JsonValue, Task
from m2forge.tasks import answer, stack_machine
from m2forge.tasks.config import VerifyConfig
from m2forge.tasks.folders.folder import CONFIG_NAME, INSTRUCTION_NAME, FileKind, FolderFile, write_folder
from m2forge.tasks.folders.task_toml import SCHEMA_VERSIONS, parse_table
from m2forge.tasks.runner import TaskRunner
from m2forge.tasks.task_set import HELD_OUT_EVERY, Distinct, FamilyInfo, Split, split_of

BASE_IMAGE = "python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea"
"""The image that folders are built on; its tests need Python and a shell."""
USER = 1000
"""User id of the agent."""
WORKSPACE = "/workspace"
ANSWER = f"{WORKSPACE}/answer.txt"
TOOLS = "tools"
"""The folder of the workspace with the programs of tools and their tables."""
AGENT_TIMEOUT_S, VERIFIER_TIMEOUT_S = 600.0, 60.0
MAX_NAME = 80

_DOCKERFILE = f"""FROM {BASE_IMAGE}
COPY --chown={USER}:{USER} files/ {WORKSPACE}/
WORKDIR {WORKSPACE}
"""
_TEST = """#!/bin/sh
# Verifies {what} and writes the reward, a number from 0 to 1.
mkdir -p /logs/verifier
reward=$(python3 -E -s /tests/answer.py /tests/check.json {path}) || reward=0
echo "$reward" > /logs/verifier/reward.txt
[ "$reward" != 0 ]
"""
_TOOL = """#!/bin/sh
# {description}
[ $# -eq 1 ] || {{ echo "usage: {name} {argument}" >&2; exit 2; }}
{wait}while read -r {argument} value; do
    [ "${argument}" = "$1" ] && {{ printf '%s\\n' "$value"; exit 0; }}
done < "$(dirname "$0")/{name}.txt"
echo "error: no {argument} $1" >&2
exit 1
"""


@dataclass(frozen=True, slots=True)
class Exported:
    name: str
    """Name of the folder."""
    split: Split
    has_solution: bool


async def export(
    source: str, dest: Path, config: VerifyConfig, num: int, level: int | None, seed: int
) -> list[Exported]:
    """`num`: how many tasks, one in five of them held out; of a fixed list at most all. `level`: None: all levels."""
    with TemporaryDirectory() as scratch:
        async with TaskRunner(config.model_copy(update={"num_workers": 1}), Path(scratch)) as runner:
            info = await runner.describe(source)
            tasks = await draw_tasks(runner, source, info, num, level, seed)
            parts = [(task, await runner.portable(task)) for task in tasks]
    files: dict[str, FolderFile] = {}
    exported: list[Exported] = []
    for task, part in parts:
        name = folder_name(task.id)
        inner = task_files(task, part, info)
        files |= {f"{name}/{path}": file for path, file in inner.items()}
        exported.append(Exported(name, split_of(task), "solution/solve.sh" in inner))
    if len({item.name for item in exported}) < len(exported):
        raise DataError(f"{source}: two tasks have ids that give the same folder name; choose other ids")
    write_folder(dest, files)
    return exported


async def draw_tasks(
    runner: TaskRunner, source: str, info: FamilyInfo, num: int, level: int | None, seed: int
) -> list[Task]:
    """`num` distinct tasks, one in five of them held out; of a fixed list at most all. `level`: None: all levels."""
    if level is not None and not info.lowest <= level <= info.highest:
        raise ConfigError(f"level {level}: {source} has the levels {info.lowest} to {info.highest}")
    levels = (info.lowest, info.highest) if level is None else (level, level)
    splits: tuple[Split, Split] = ("train", "held_out")
    if info.counts is not None:
        listed = [
            await runner.next_task(source, split, seed, position, *levels)
            for split in splits
            for position in range(info.num_listed(split, *levels) or 0)
        ]
        return sorted(listed, key=lambda task: task.id)[:num]
    tasks = []
    for split in splits:
        num_held_out = num // HELD_OUT_EVERY
        wanted = num_held_out if split == "held_out" else num - num_held_out
        distinct, position = Distinct(source, split, wanted, *levels), 0
        while distinct.is_wanting:
            distinct.add(await runner.next_task(source, split, seed, position, *levels))
            position += 1
        tasks += distinct.tasks
    return tasks


def folder_name(id: str) -> str:
    """A name that every file system and registry accepts."""
    return re.sub(r"[^a-z0-9._-]+", "-", id.lower()).strip(".-_")[:MAX_NAME] or "task"


def task_files(task: Task, part: Mapping[str, JsonValue], info: FamilyInfo) -> dict[str, FolderFile]:
    """The files of one folder. `part`: what `portable` returns."""
    check = cast("dict[str, JsonValue]", part["check"])
    tools = cast("list[dict[str, JsonValue]]", part["tools"])
    is_command = "command" in check
    table = task_table(task, info, check)
    parse_table(table, f"{task.id}/{CONFIG_NAME}")
    texts = {
        CONFIG_NAME: tomli_w.dumps(table),
        INSTRUCTION_NAME: _instruction(task, tools, is_command),
        "tests/check.json": json.dumps(check, ensure_ascii=False, indent=1) + "\n",
    }
    for module in (answer, *((stack_machine,) if "stack" in check else ())):
        path = Path(str(module.__file__))
        texts[f"tests/{path.name}"] = path.read_text(encoding="utf-8")
    programs = {"tests/test.sh": _TEST.format(what="the workspace", path=WORKSPACE)}
    if not is_command:
        programs["tests/test.sh"] = _TEST.format(what="the answer", path=ANSWER)
    for tool in tools:
        programs[f"environment/files/{TOOLS}/{tool['name']}"] = _program(tool)
        lines = cast("dict[str, str]", tool["table"]).items()
        texts[f"environment/files/{TOOLS}/{tool['name']}.txt"] = "".join(f"{key} {value}\n" for key, value in lines)
    given = cast("Mapping[str, str]", task.metadata.get("files") or {})
    for name, content in (given or {"README.md": "The working directory of this task.\n"}).items():
        texts[f"environment/files/{name}"] = content
    texts["environment/Dockerfile"] = _DOCKERFILE
    reference, solved = part["reference"], cast("Mapping[str, str]", task.metadata.get("reference_files") or {})
    if solved or (isinstance(reference, str) and not is_command):
        programs["solution/solve.sh"] = _solution(reference if isinstance(reference, str) else None, bool(solved))
        texts |= {f"solution/files/{name}": content for name, content in solved.items()}
    files = {name: FolderFile(text.encode()) for name, text in texts.items()}
    return files | {name: FolderFile(text.encode(), FileKind.EXECUTABLE) for name, text in programs.items()}


def task_table(task: Task, info: FamilyInfo, check: Mapping[str, JsonValue]) -> dict[str, TomlValue]:
    """`task.toml`: a separate verifier, no network, an ordinary user."""
    provenance: dict[str, TomlValue] = {
        "source": info.name,
        "package": task.id,
        "domain": str(task.domain),
        "split": split_of(task),
    }
    # A command ends by its own limit, and fails, before the verifier does.
    timeout_s = cast("float", check.get("timeout_s", 0.0))
    if info.measured is None:
        provenance["level"] = int(task.difficulty)
    return {
        "schema_version": SCHEMA_VERSIONS[-1],
        "artifacts": [WORKSPACE if "command" in check else ANSWER],
        "task": {"name": f"m2forge/{folder_name(task.id)}", "keywords": [str(task.domain)]},
        "metadata": {"m2forge": provenance},
        "agent": {"timeout_sec": AGENT_TIMEOUT_S, "user": USER},
        "verifier": {"environment_mode": "separate", "timeout_sec": timeout_s + VERIFIER_TIMEOUT_S},
        "environment": {
            "network_mode": "no-network",
            "workdir": WORKSPACE,
            "cpus": 1,
            "memory_mb": 1024,
            "storage_mb": 1024,
        },
    }


def _instruction(task: Task, tools: Sequence[Mapping[str, JsonValue]], is_command: bool) -> str:
    lines = [task.instruction.rstrip(), ""]
    if tools:
        lines += [f"Programs in `{WORKSPACE}`:", ""]
        lines += [
            f"- `{TOOLS}/{tool['name']} {str(tool['argument']).upper()}`: {tool['description']}" for tool in tools
        ]
        lines.append("")
    if is_command:
        lines.append(f"Work in `{WORKSPACE}`, where the task's files are.")
    else:
        lines.append(f"Write the answer, and nothing else, to `{ANSWER}`.")
    return "\n".join(lines) + "\n"


def _program(tool: Mapping[str, JsonValue]) -> str:
    latency_s = cast("float", tool["latency_s"])
    description = " ".join(str(tool["description"]).split())
    wait = f"sleep {latency_s:g}\n" if latency_s else ""
    return _TOOL.format(name=tool["name"], argument=tool["argument"], description=description, wait=wait)


def _solution(reference: str | None, has_files: bool) -> str:
    lines = ["#!/bin/sh", "set -e"]
    if has_files:
        lines.append(f"cp -R /solution/files/. {WORKSPACE}/")
    if reference is not None:
        lines.append(f"printf '%s\\n' {shlex.quote(reference)} > {ANSWER}")
    return "\n".join(lines) + "\n"
