"""Exported folders: their own tests accept their own solution and refuse the rest, without this package."""

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from m2forge.errors import ConfigError, DataError, ExistsError
from m2forge.records import JsonValue
from m2forge.tasks.catalog import EMBEDDED, find_family
from m2forge.tasks.config import VerifyConfig
from m2forge.tasks.family import Family, labelled, portable
from m2forge.tasks.folders.export import Exported, export, folder_name, task_files
from m2forge.tasks.folders.folder import FolderFile, TaskFolder, read_files, read_folders, write_folder
from m2forge.tasks.folders.lint import lint
from m2forge.tasks.task_file import JsonlFamily
from m2forge.tasks.task_set import describe

LINES: list[dict[str, JsonValue]] = [
    {"id": "Paris 1", "instruction": "Name it.", "verifier": {"exact": ["Paris", "paris"]}, "reference": "Paris"},
    {
        "id": "sort",
        "instruction": "Sort data.txt into sorted.txt.",
        "files": {"in/data.txt": "b\na\n"},
        "verifier": {
            "command": ["sh", "t.sh"],
            "files": {"t.sh": "sort in/data.txt | cmp - out/sorted.txt && echo 0.5"},
        },
        "reference_files": {"out/sorted.txt": "a\nb\n"},
    },
]


def run_export(source: str, dest: Path, num: int = 5, level: int | None = None, seed: int = 0) -> list[Exported]:
    return asyncio.run(export(source, dest, VerifyConfig(), num, level, seed))


def verify(folder: TaskFolder, root: Path, script: Path | None) -> float:
    """The reward of a folder's own tests, with its paths moved to `root`, after `script`."""
    root.mkdir()
    subprocess.run(["cp", "-R", str(folder.environment / "files"), str(root / "workspace")], check=True)
    for name in ("tests", "solution"):
        subprocess.run(["cp", "-R", str(folder.path / name), str(root / name)], check=True)
    for path in (path for path in root.rglob("*") if path.is_file()):
        text = path.read_text()
        for name in ("/workspace", "/tests", "/logs", "/solution"):
            text = text.replace(f" {name}", f" {root}{name}")
        path.write_text(text)
    if script is not None:
        subprocess.run(["sh", str(root / script)], check=True)
    subprocess.run(["sh", str(root / "tests/test.sh")], check=False, capture_output=True)  # It fails without a reward.
    return float((root / "logs/verifier/reward.txt").read_text())


def write_folders(family: Family, dest: Path, num: int, level: int) -> list[TaskFolder]:
    """As `export` writes them, without a worker process."""
    info, files = describe(family), dict[str, FolderFile]()
    for seed in range(num):
        task = labelled(family.draw(level, seed), family, family.name, level)
        part = json.loads(json.dumps(portable(family, task)))
        files |= {f"{task.id}/{name}": file for name, file in task_files(task, part, info).items()}
    write_folder(dest, files)
    folders, rejected = read_folders(dest)
    assert not rejected
    return folders


@pytest.mark.parametrize("family", EMBEDDED, ids=[family.name for family in EMBEDDED])
def test_an_exported_folder_verifies_its_own_solution(tmp_path: Path, family: Family) -> None:
    first, second = write_folders(family, tmp_path / "set", 2, family.levels[1])
    assert (lint(first.path), lint(second.path)) == ([], [])
    assert first.provenance.source == family.name
    assert verify(first, tmp_path / "solved", Path("solution/solve.sh")) == 1
    assert verify(first, tmp_path / "empty", None) == 0


def test_tools_become_programs_over_tables(tmp_path: Path) -> None:
    (folder,) = write_folders(find_family("copies"), tmp_path / "set", 1, 2)
    assert "`tools/look KEY`" in folder.instruction()
    verify(folder, tmp_path / "root", None)
    start = folder.instruction().split()[2].rstrip(".")
    for name in ("look", "recall"):
        table = dict(
            line.split() for line in (folder.environment / "files" / "tools" / f"{name}.txt").read_text().splitlines()
        )
        program = [str(tmp_path / "root" / "workspace" / "tools" / name)]
        done = subprocess.run([*program, start], capture_output=True, text=True, check=True)
        assert done.stdout == f"{table[start]}\n"
        assert subprocess.run([*program, "none"], capture_output=True).returncode == 1


def test_a_task_file_is_exported_with_its_files(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
    exported = run_export(str(tmp_path / "tasks.jsonl"), tmp_path / "set", num=9)
    assert [item.name for item in exported] == ["tasks-paris-1", "tasks-sort"]
    paris, sort = read_folders(tmp_path / "set")[0]
    assert verify(paris, tmp_path / "a", Path("solution/solve.sh")) == 1
    assert verify(sort, tmp_path / "b", Path("solution/solve.sh")) == 0.5
    assert verify(sort, tmp_path / "c", None) == 0
    assert [artifact.source for artifact in sort.config.artifacts_of()] == ["/workspace"]
    assert sort.provenance.source == "tasks"


def test_the_same_seed_exports_the_same_bytes(tmp_path: Path) -> None:
    exported = run_export("counters", tmp_path / "one", seed=3, level=2)
    assert [item.split for item in exported].count("held_out") == 1
    run_export("counters", tmp_path / "two", seed=3, level=2)
    assert read_files(tmp_path / "one") == read_files(tmp_path / "two")
    assert [lint(folder.path) for folder in read_folders(tmp_path / "one")[0]] == [[]] * 5


FAMILY = """
from m2forge import Family, Submission, Verdict
from m2forge.tasks.family import make_task
from m2forge.text.message import Tool

class Plain(Family):
    name, domain, levels = "plain", "general", range(1)
    def draw(self, difficulty, seed):
        return make_task(self, difficulty, f"Say {seed}.", {})
    def verify(self, task, submission):
        return Verdict(1.0)

class Tooled(Plain):
    def answer_check(self, task):
        return {"exact": ["1"]}
    def tools(self, task):
        return (Tool("grow", "Grow.", {"type": "object", "properties": {"by": {"type": "integer"}}}),)
"""


def test_a_family_that_cannot_be_exported_says_why(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FAMILY)
    with pytest.raises(DataError, match="plain: cannot be exported: its verifier is code"):
        run_export(f"{tmp_path}/own.py:Plain", tmp_path / "set")
    assert not (tmp_path / "set").exists()
    tooled = find_family(f"{tmp_path}/own.py:Tooled")
    with pytest.raises(DataError, match="cannot be exported: its tools are code"):
        portable(tooled, tooled.draw(0, 1))
    (tmp_path / "judge.py").write_text("def verify(task, submission):\n    return 1\n")
    line = {"instruction": "Say it.", "verifier": {"python": "judge.py:verify"}}
    (tmp_path / "judged.jsonl").write_text(json.dumps(line))
    judged = JsonlFamily(tmp_path / "judged.jsonl")
    with pytest.raises(DataError, match="a python verifier needs this package"):
        portable(judged, judged.tasks[0])


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mine").touch()
    with pytest.raises(ExistsError):
        run_export("counters", tmp_path / "set", num=1)
    with pytest.raises(ConfigError, match="has the levels 1 to 24"):
        run_export("counters", tmp_path / "other", level=99)


def test_a_folder_name_is_portable() -> None:
    assert folder_name("Tasks: A/B é..") == "tasks-a-b"
    assert folder_name("..") == "task"
