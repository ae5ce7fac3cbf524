"""Exported folders: their own tests accept their own solution and refuse the rest, without this package."""

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from m2forge.errors import ConfigError, DataError, ExistsError
from m2forge.records import JsonValue
from m2forge.tasks.catalog import EMBEDDED
from m2forge.tasks.config import VerifyConfig
from m2forge.tasks.folders.export import Exported, export, folder_name
from m2forge.tasks.folders.folder import TaskFolder, read_folder, read_folders
from m2forge.tasks.folders.lint import lint

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
    for name, target in (("files", "workspace"), ("tools", "usr/local/bin"), ("tables", "usr/local/share/task")):
        if (folder.environment / name).is_dir():
            (root / target).parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-R", str(folder.environment / name), str(root / target)], check=True)
    for name in ("tests", "solution"):
        subprocess.run(["cp", "-R", str(folder.path / name), str(root / name)], check=True)
    for path in (path for path in root.rglob("*") if path.is_file()):
        text = path.read_text()
        for name in ("/workspace", "/tests", "/logs", "/solution", "/usr/local/share"):
            text = text.replace(f" {name}", f" {root}{name}")
        path.write_text(text)
    if script is not None:
        subprocess.run(["sh", str(root / script)], check=True)
    subprocess.run(["sh", str(root / "tests/test.sh")], check=True, capture_output=True)
    return float((root / "logs/verifier/reward.txt").read_text())


@pytest.mark.parametrize("family", EMBEDDED, ids=[family.name for family in EMBEDDED])
def test_an_exported_folder_verifies_its_own_solution(tmp_path: Path, family: object) -> None:
    name = str(getattr(family, "name"))  # noqa: B009
    exported = run_export(name, tmp_path / "set", num=5)
    assert [item.split for item in exported].count("held_out") == 1
    folders, rejected = read_folders(tmp_path / "set")
    assert (len(folders), rejected) == (5, [])
    assert [lint(folder.path) for folder in folders] == [[]] * 5
    first = folders[0]
    assert first.provenance.source == name
    assert verify(first, tmp_path / "solved", Path("solution/solve.sh")) == 1
    assert verify(first, tmp_path / "empty", None) == 0


def test_tools_become_programs_over_tables(tmp_path: Path) -> None:
    run_export("copies", tmp_path / "set", num=1, level=2)
    (folder,) = read_folders(tmp_path / "set")[0]
    assert "`look KEY`" in folder.instruction()
    verify(folder, tmp_path / "root", None)
    start = folder.instruction().split()[2].rstrip(".")
    for name in ("look", "recall"):
        table = dict(line.split() for line in (folder.environment / "tables" / f"{name}.txt").read_text().splitlines())
        program = ["sh", str(tmp_path / "root" / "usr/local/bin" / name)]
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


def test_the_same_seed_exports_the_same_bytes(tmp_path: Path) -> None:
    run_export("counters", tmp_path / "one", seed=3, level=2)
    run_export("counters", tmp_path / "two", seed=3, level=2)
    run_export("counters", tmp_path / "three", seed=4, level=2)
    names = [[path.name for path in sorted((tmp_path / name).iterdir())] for name in ("one", "two", "three")]
    assert names[0] == names[1] != names[2]
    digests = [read_folder(tmp_path / name / names[0][0]).digest() for name in ("one", "two")]
    assert digests[0] == digests[1]


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


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("own.py:Plain", "its verifier is code"),
        ("own.py:Tooled", "its tools are code"),
        ("judged.jsonl", "python verifier"),
    ],
)
def test_a_family_that_cannot_be_exported_says_why(tmp_path: Path, source: str, problem: str) -> None:
    (tmp_path / "own.py").write_text(FAMILY)
    (tmp_path / "judge.py").write_text("def verify(task, submission):\n    return 1\n")
    line = {"instruction": "Say it.", "verifier": {"python": "judge.py:verify"}}
    (tmp_path / "judged.jsonl").write_text(json.dumps(line))
    with pytest.raises(DataError, match=f"cannot be exported: {problem}|{problem}"):
        run_export(str(tmp_path / source), tmp_path / "set")
    assert not (tmp_path / "set").exists()


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
