"""SWE-bench records and task folders: JSON Lines in, folders out, and back without loss.

    problem_statement                       instruction.md
    patch, hints_text                       solution/patch.diff, solution/hints.txt
    test_patch                              tests/test.patch
    all other fields                        tests/instance.json
    repo, base_commit                       environment/Dockerfile: a clone at that commit, in /testbed
    image_name or docker_image, if given    environment.docker_image instead
    repo                                    package of `[metadata.m2forge]`, by which tasks are held out

The folder carries a copy of `tasks/folders/swe_tests.py`, which runs the tests. Only records whose tests are pytest's
(`file.py::name`) can be verified so; others are rejected, as are records without FAIL_TO_PASS. The optional field
`test_paths` is a regular expression, searched in paths: the files that are tests. A record with the fields
`command` and `report` has tests of another language: its folder carries `tasks/folders/suite_tests.py` too, which runs
them.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from m2forge.config import TomlValue
from m2forge.errors import DataError, NotFoundError
from m2forge.files import write_atomic
from m2forge.records import JsonValue
from m2forge.tasks.folders import suite_tests, swe_tests
from m2forge.tasks.folders.export import folder_name
from m2forge.tasks.folders.folder import (
    CONFIG_NAME,
    INSTRUCTION_NAME,
    FileKind,
    FolderFile,
    Rejected,
    TaskFolder,
    read_folders,
    write_folder,
)
from m2forge.tasks.folders.task_toml import SCHEMA_VERSIONS, parse_table

REQUIRED = ("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch", "FAIL_TO_PASS")
BASE_IMAGE = "python:3.12-bookworm@sha256:e91fec3d1ac69f04e4eddcd29c327e630ce34658cf31075bfa7e8b0e052bafea"
USER = 1000
TESTBED = "/testbed"
TEXT_FILES = {
    "problem_statement": INSTRUCTION_NAME,
    "patch": "solution/patch.diff",
    "hints_text": "solution/hints.txt",
    "test_patch": "tests/test.patch",
    "twin_patch": "tests/twin.patch",
}
"""Fields that are files of their own. The twin's patch is the test patch with tests that all fail."""
INSTANCE = "tests/instance.json"
MAX_LINE = 64 << 20

_DOCKERFILE = """FROM {image}
RUN git clone https://github.com/{repo} {testbed} && git -C {testbed} checkout -q {commit}
WORKDIR {testbed}
RUN python3 -m pip install --no-cache-dir pytest==8.4.2 && python3 -m pip install --no-cache-dir -e .
RUN chown -R {user}:{user} {testbed}
"""
_TEST = """#!/bin/sh
mkdir -p /logs/verifier
reward=$(python3 -s /tests/{program} {testbed} /tests /logs/verifier) || reward=0
echo "$reward" > /logs/verifier/reward.txt
[ "$reward" = 1 ]
"""
_SOLVE = """#!/bin/sh
set -e
cd {testbed}
git -c safe.directory='*' apply --whitespace=nowarn /solution/patch.diff
"""


@dataclass(frozen=True, slots=True)
class Imported:
    names: tuple[str, ...]
    """Names of the folders that were written."""
    rejected: tuple[str, ...]
    """Why records were left out, with their line."""


def import_records(path: Path, dest: Path) -> Imported:
    """Write a folder for each record of a file, all or none."""
    files: dict[str, FolderFile] = {}
    names: dict[str, int] = {}
    rejected = []
    for number, line in _lines(path):
        try:
            record = _parse(line)
            name = folder_name(str(record["instance_id"]))
            if name in names:
                raise DataError(f"instance_id: {record['instance_id']!r} is that of line {names[name]}")
            inner = record_files(record)
        except DataError as error:
            rejected.append(f"{path}, line {number}: {error}")
            continue
        names[name] = number
        files |= {f"{name}/{inside}": file for inside, file in inner.items()}
    if not names:
        why = f", the first: {rejected[0]}" if rejected else ""
        raise DataError(f"{path}: no record of SWE-bench that can be used; {len(rejected)} are rejected{why}")
    write_folder(dest, files)
    return Imported(tuple(names), tuple(rejected))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
                if len(line) > MAX_LINE:
                    raise DataError(f"{path}, line {number}: over {MAX_LINE} bytes")
                if line.strip():
                    yield number, line
    except OSError as error:
        raise NotFoundError(f"{path}: cannot be read ({error.strerror})") from error


def _parse(line: bytes) -> dict[str, JsonValue]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"expected an object, received {str(record)[:80]!r}")
    for key in REQUIRED:
        if key not in record:
            raise DataError(f"{key}: missing")
        if key != "FAIL_TO_PASS" and (not isinstance(record[key], str) or not record[key].strip()):
            raise DataError(f"{key}: expected text, received {str(record[key])[:80]!r}")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(record["repo"])):
        raise DataError(f"repo: expected OWNER/NAME, received {record['repo']!r}")
    if not re.fullmatch(r"[0-9a-f]{7,64}", str(record["base_commit"])):
        raise DataError(f"base_commit: expected a commit's hash, received {record['base_commit']!r}")
    for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        _check_tests(key, record.get(key, []))
    try:
        re.compile(str(record.get("test_paths", "")))
    except re.error as error:
        raise DataError(f"test_paths: expected a regular expression: {error}") from error
    return record


def _check_tests(key: str, value: JsonValue) -> None:
    try:
        tests = swe_tests.listed(value)
    except ValueError as error:
        raise DataError(f"{key}: {error}") from error
    if key == "FAIL_TO_PASS" and not tests:
        raise DataError(f"{key}: empty; nothing would show that the task is solved")
    if foreign := [test for test in tests if "::" not in test]:
        raise DataError(f"{key}: expected pytest's ids, file.py::name, received {foreign[0][:80]!r}")


def record_files(record: Mapping[str, JsonValue]) -> dict[str, FolderFile]:
    """The files of one folder."""
    table = _table(record)
    parse_table(table, f"{record['instance_id']}/{CONFIG_NAME}")
    rest = {key: value for key, value in record.items() if key not in TEXT_FILES}
    programs = [Path(swe_tests.__file__), *([Path(suite_tests.__file__)] if "report" in record else [])]
    texts = {
        CONFIG_NAME: tomli_w.dumps(table),
        INSTANCE: json.dumps(rest, ensure_ascii=False, indent=1) + "\n",
        "environment/Dockerfile": _dockerfile(record),
    }
    texts |= {name: str(record[key]) for key, name in TEXT_FILES.items() if isinstance(record.get(key), str)}
    texts |= {f"tests/{path.name}": path.read_text(encoding="utf-8") for path in programs}
    scripts = {"tests/test.sh": _TEST, "solution/solve.sh": _SOLVE}
    files = {name: FolderFile(text.encode("utf-8", "surrogatepass")) for name, text in texts.items()}
    return files | {
        name: FolderFile(text.format(testbed=TESTBED, program=programs[-1].name).encode(), FileKind.EXECUTABLE)
        for name, text in scripts.items()
    }


def _image(record: Mapping[str, JsonValue]) -> str | None:
    named = (record.get(key) for key in ("image_name", "docker_image"))
    return next((str(image) for image in named if isinstance(image, str) and image), None)


def _dockerfile(record: Mapping[str, JsonValue]) -> str:
    if (image := _image(record)) is not None:
        return f"FROM {image}\nWORKDIR {TESTBED}\n"
    return _DOCKERFILE.format(
        image=BASE_IMAGE, repo=record["repo"], commit=record["base_commit"], testbed=TESTBED, user=USER
    )


def _table(record: Mapping[str, JsonValue]) -> dict[str, TomlValue]:
    environment: dict[str, TomlValue] = {"network_mode": "no-network", "workdir": TESTBED, "cpus": 1, "memory_mb": 4096}
    provenance: dict[str, TomlValue] = {
        "source": "swe-bench",
        "package": str(record["repo"]),
        "domain": "coding",
        "instance_id": str(record["instance_id"]),
        "base_commit": str(record["base_commit"]),
    }
    return {
        "schema_version": SCHEMA_VERSIONS[-1],
        # The image's own repository stays, from which test files are restored.
        "artifacts": [{"source": TESTBED, "exclude": [".git"]}],
        "task": {"name": f"swe-bench/{folder_name(str(record['instance_id']))}", "keywords": ["bug"]},
        "metadata": {"m2forge": provenance},
        "agent": {"timeout_sec": 3600.0, "user": USER},
        "verifier": {"environment_mode": "separate", "timeout_sec": 1800.0},
        "environment": environment,
    }


# -- folders to records -----------------------------------------------------------------------------------------------


def export_records(path: Path, dest: Path) -> tuple[int, list[Rejected]]:
    """Write the records of all folders at or below `path` that have one; returns how many, and the other folders."""
    if dest.exists():
        raise DataError(f"{dest}: exists; choose another file or remove it first")
    folders, rejected = read_folders(path)
    lines = []
    for folder in folders:
        try:
            lines.append(json.dumps(folder_record(folder), ensure_ascii=False) + "\n")
        except DataError as error:
            rejected.append(Rejected(folder.path, str(error)))
    if not lines:
        raise DataError(f"{path}: no folder holds a record of SWE-bench; the first: {rejected[0].problem}")
    write_atomic(dest, "".join(lines).encode("utf-8", "surrogatepass"))
    return len(lines), rejected


def folder_record(folder: TaskFolder) -> dict[str, JsonValue]:
    """The record that a folder was written from."""
    path = folder.path / INSTANCE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise ValueError("expected an object")
        for key, name in TEXT_FILES.items():
            if (folder.path / name).is_file():
                record[key] = (folder.path / name).read_bytes().decode("utf-8", "surrogatepass")
    except OSError as error:
        raise DataError(f"{path}: missing; only folders with the tests of SWE-bench have a record") from error
    except ValueError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if missing := [key for key in REQUIRED if key not in record]:
        raise DataError(f"{path}: a record without {missing[0]}")
    return record
