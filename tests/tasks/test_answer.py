"""Checks of answers give the verdicts of the families, also as a program without this package."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from m2forge.records import JsonValue, Submission
from m2forge.tasks import answer
from m2forge.tasks.answer import read_answer, score
from m2forge.tasks.catalog import EMBEDDED
from m2forge.tasks.family import Checkable, Family
from m2forge.tasks.task_file import JsonlFamily

CHECKABLE = [family for family in EMBEDDED if isinstance(family, Checkable)]
LINES: list[dict[str, JsonValue]] = [
    {"exact": ["7G", "8 H"]},
    {"exact": "7G"},
    {"numeric": 3.5, "tolerance": 0.25},
    {"regex": "(?i)\\bparis\\b"},
    {"choice": "B", "options": ["A", "B", "BB"]},
]
ANSWERS = st.text("7G8H .,35BAparis\n-+eE", max_size=12)


def test_every_embedded_family_can_be_checked() -> None:
    assert len(CHECKABLE) == len(EMBEDDED)


@given(st.sampled_from(range(len(CHECKABLE))), st.integers(0, 2**32), st.data())
def test_a_check_agrees_with_the_verifier_of_its_family(index: int, seed: int, data: st.DataObject) -> None:
    family: Family = CHECKABLE[index]
    assert isinstance(family, Checkable)
    task = family.draw(data.draw(st.sampled_from(list(family.levels)[:3])), seed)
    right = family.demonstrate(task, random.Random(seed))[-1].content
    check = json.loads(json.dumps(family.answer_check(task)))
    wrong = family.demonstrate(family.draw(family.levels[0], seed + 1), random.Random(0))[-1].content
    for text in (right, f" {right}.\n", wrong, data.draw(ANSWERS), right.replace(" ", "  "), right[:-1]):
        assert score(check, text) == family.verify(task, Submission(text)).perf


def test_a_check_agrees_with_the_verifier_of_its_line(tmp_path: Path) -> None:
    answers = ["7G", " 7G .", "8  H.", "7g", "", "3.5", "it is 3,6 or 3.7", "3.8", "1e999", "in PARIS!", "Parisian"]
    answers += ["B", "A or B", "B or A", "BB", "(B)", "B2", "b", ".", "\0"]
    perfs = set()
    for number, spec in enumerate(LINES):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps({"instruction": "Say it.", "verifier": spec}))
        family = JsonlFamily(path)
        check = json.loads(json.dumps(family.answer_check(family.tasks[0])))
        for text in answers:
            perf = family.verify(family.tasks[0], Submission(text)).perf
            assert score(check, text) == perf, (spec, text)
            perfs.add((number, perf))
    assert len(perfs) == 2 * len(LINES)


def test_a_link_or_a_pipe_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("7G")
    assert read_answer(tmp_path / "secret") == "7G"
    (tmp_path / "link").symlink_to("secret")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text("7G" * (answer.MAX_ANSWER_BYTES // 2) + ".")
    for name in ("link", "pipe", "large", "missing", "."):
        assert read_answer(tmp_path / name) == ""


def test_the_program_runs_without_this_package(tmp_path: Path) -> None:
    (tmp_path / "answer.py").write_text(Path(answer.__file__).read_text())
    (tmp_path / "check.json").write_text(json.dumps({"exact": ["7G"]}))
    (tmp_path / "answer.txt").write_text("7G.\n")
    command = [sys.executable, "-E", "-s", "-S", str(tmp_path / "answer.py"), str(tmp_path / "check.json")]
    done = subprocess.run([*command, str(tmp_path / "answer.txt")], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
