"""Writes a question as a task folder: its fixture, hidden tests and solution, in Harbor's form.

    instruction.md                  a variant of the question (`instruction`)
    environment/Dockerfile          runs files/.fixture.sh in /workspace, as the agent's user
    tests/                          test.sh, `state.py` and the expected state
    solution/solve.sh               the accepted answer's commands

Authors and licence of the question are in `[metadata.m2forge]`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import tomli_w

from m2forge.config import TomlValue
from m2forge.pipelines.stage import Item
from m2forge.pipelines.terminal import state
from m2forge.pipelines.terminal.build import ENV, OUTPUT, WORKSPACE
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
