"""Small task folders for tests."""

from collections.abc import Mapping
from pathlib import Path

import tomli_w

from m2forge.config import TomlValue
from m2forge.tasks.folders.folder import (
    CONFIG_NAME,
    SOLVE_NAME,
    TEST_NAME,
    FileKind,
    FolderFile,
    TaskFolder,
    read_folder,
    write_folder,
)

IMAGE = f"python:3.12-slim@sha256:{'0' * 64}"


def new_folder(dest: Path, table: Mapping[str, TomlValue], files: Mapping[str, str | bytes]) -> TaskFolder:
    """Write a folder from a table and texts, and read it again."""
    entries = {CONFIG_NAME: FolderFile(tomli_w.dumps(dict(table)).encode())}
    for name, content in files.items():
        is_program = name.rpartition("/")[2] in (TEST_NAME, SOLVE_NAME)
        data = content.encode() if isinstance(content, str) else content
        entries[name] = FolderFile(data, FileKind.EXECUTABLE if is_program else FileKind.FILE)
    write_folder(dest, entries)
    return read_folder(dest)


def table(**changes: TomlValue) -> dict[str, TomlValue]:
    """A `task.toml` as this project writes it; `changes` replace whole tables."""
    usual: dict[str, TomlValue] = {
        "schema_version": "1.4",
        "artifacts": ["/workspace/answer.txt"],
        "task": {"name": "m2forge/sum"},
        "metadata": {"m2forge": {"source": "written", "package": "sums", "domain": "general"}},
        "agent": {"user": 1000, "timeout_sec": 60.0},
        "verifier": {"environment_mode": "separate", "timeout_sec": 30.0},
        "environment": {"network_mode": "no-network", "workdir": "/workspace"},
    }
    return usual | changes


def files(**changes: str) -> dict[str, str]:
    """The other files; keys of `changes` have `__` for a slash and `_dot_` for a dot, an empty text removes a file."""
    texts = {
        "instruction.md": "Write 2 + 3 to /workspace/answer.txt.\n",
        "environment/Dockerfile": f"FROM {IMAGE}\nWORKDIR /workspace\n",
        "tests/test.sh": "#!/bin/sh\ngrep -qx 5 /workspace/answer.txt && echo 1 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "#!/bin/sh\necho 5 > /workspace/answer.txt\n",
    }
    named = {name.replace("__", "/").replace("_dot_", "."): text for name, text in changes.items()}
    return {name: text for name, text in (texts | named).items() if text}


def write(dest: Path, table_: Mapping[str, TomlValue] | None = None, **changes: str) -> TaskFolder:
    return new_folder(dest, table() if table_ is None else table_, files(**changes))


def write_raw(dest: Path, toml: str, **changes: str) -> Path:
    """A folder that need not be valid."""
    for name, text in (files(**changes) | {"task.toml": toml}).items():
        (dest / name).parent.mkdir(parents=True, exist_ok=True)
        (dest / name).write_text(text)
    return dest
