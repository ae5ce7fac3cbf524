"""What the terminal demo says of its data: mistakes that show, held-out questions, a stated share of right commands."""

import itertools
import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from examples.demo import BARE, CONFIGS, WHOLE
from examples.demo_terminal import NUM_HELD_OUT, make_tasks
from examples.table_tasks import KINDS, demonstrated_steps, draw_rows, questions, write_folders
from m2forge import cli
from m2forge.config import load
from m2forge.rl.config import RLConfig
from m2forge.tasks.folders.folder import read_folders
from tests.sandbox.places import require


def test_the_shell_writes_what_questions_say(tmp_path: Path) -> None:
    """Each kind of question, with and without its mistakes."""
    _, others = questions(3, 1)
    asked = {kind: next(item for item in others if item.kind == kind) for kind in KINDS}
    for index, question in enumerate(asked.values()):
        rows = draw_rows(question, random.Random(index))
        (tmp_path / question.table).write_text("".join("\t".join(row) + "\n" for row in rows))
        right = question.written(rows, question.steps())
        for steps in (question.steps(), *question.mistakes()):
            env = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
            subprocess.run(["sh", "-c", question.command(steps)], cwd=tmp_path, env=env, check=True)
            lines = (tmp_path / question.output).read_text().splitlines()
            assert (lines if question.is_ordered else sorted(lines)) == question.written(rows, steps)
            assert (question.written(rows, steps) == right) == (steps == question.steps())


def test_no_held_out_question_is_demonstrated(tmp_path: Path) -> None:
    make_tasks(tmp_path / "folders", tmp_path, 0, lambda num: num // 5)
    folders, rejected = read_folders(tmp_path / "folders")
    assert not rejected
    held_out = [folder.instruction() for folder in folders if folder.provenance.split == "held_out"]
    assert (
        len(set(held_out))
        == len(held_out)
        == NUM_HELD_OUT
        == load(RLConfig, CONFIGS / "rl/demo-terminal.toml").eval.num_tasks
    )
    trained = [folder.instruction() for folder in folders if folder.provenance.split == "train"]
    for name in (BARE, WHOLE):
        lines = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        trained += [line["messages"][0]["content"] for line in lines]
    assert len(trained) == 80 + 600
    assert not set(trained) & set(held_out)


def test_a_third_of_the_demonstrations_is_right() -> None:
    rng = random.Random(0)
    asked = [item for item in itertools.islice(questions(0, 1)[1], 3000) if item.mistakes()]
    right = [demonstrated_steps(item, rng, 1 / 3) == item.steps() for item in asked]
    assert len(asked) > 2500
    assert sum(right) / len(right) == pytest.approx(1 / 3, abs=0.03)


def test_solutions_of_generated_folders_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require("namespace")
    write_folders(tmp_path / "tables", [(item, "train") for item in itertools.islice(questions(5, 1)[1], 3)], 5)
    assert cli.main(["tasks", "lint", str(tmp_path / "tables")]) == 0
    assert cli.main(["tasks", "run", str(tmp_path / "tables"), "--image", "host", "--json"]) == 0
    trials = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(trial["agent"], trial["perf"]) for trial in trials] == [("oracle", 1.0), ("nop", 0.0)] * 3
