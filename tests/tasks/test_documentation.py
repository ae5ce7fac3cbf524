"""What docs/tasks.md shows is what happens."""

import json
import re
from pathlib import Path

import pytest

from m2forge.cli import main
from m2forge.records import Submission
from m2forge.tasks.catalog import EMBEDDED, find_family

TEXT = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")


def test_the_example_prints_what_its_comments_say(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(code, "docs/tasks.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"^print\(.*  # (.*)$", code, re.MULTILINE)


def test_the_table_shows_a_task_of_each_family_with_its_answer() -> None:
    names = [family.name for family in EMBEDDED]
    rows = re.findall(r"^\| `([a-z-]+)[^|]*\| \w+ \|[^|]*\| `([^`]+)`[^|]*\| `([^`]+)`", TEXT, re.MULTILINE)
    assert [name for name, _, _ in rows] == [*names, "reasoning-gym"]
    for name, instruction, answer in rows:
        family = find_family("reasoning-gym:chain_sum" if name == "reasoning-gym" else name)
        task = family.draw(family.levels[2], 7)
        assert (task.instruction, family.verify(task, Submission(answer)).perf) == (instruction, 1)


def test_the_family_of_ones_own_works(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(from m2forge import Family.*?)```", TEXT, re.DOTALL)
    (tmp_path / "my_tasks.py").write_text(code)
    family = find_family(f"{tmp_path}/my_tasks.py:Doubles")
    task = family.draw(2, 1234)
    assert [family.verify(task, Submission(answer)).perf for answer in ("68", "34")] == [1.0, 0.0]


def test_the_task_file_is_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (lines,) = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "tasks.jsonl").write_text(lines)
    assert main(["tasks", "check", str(tmp_path / "tasks.jsonl"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(level["num_references"], level["num_solved"]) for level in report["levels"]] == [(2, 2)]
