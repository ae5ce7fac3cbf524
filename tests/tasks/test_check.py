"""`m2forge tasks check` through the command: the report, its problems, and the exit status."""

import json
from pathlib import Path

import pytest

from m2forge.cli import main
from tests.tasks.test_jsonl_family import LINE, write

COMMAND = {"command": ["sh", "my_test.sh"], "files": {"my_test.sh": "cmp in.txt out.txt"}}


def test_a_sound_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"files": {"in.txt": "x"}, "reference_files": {"out.txt": "x"}, "verifier": COMMAND}
    path = write(
        tmp_path,
        LINE | {"level": 1, "split": "train", "reference": "Paris"},
        LINE | {"level": 1, "split": "held_out", "instruction": "And of Italy?"},
        LINE | {"level": 2, "split": "train", "instruction": "Copy in.txt to out.txt."} | files,
    )
    assert main(["tasks", "check", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["family"], report["domain"], report["is_measured"]) == ("capitals", "general", False)
    assert (report["num_duplicates"], report["problems"]) == (0, [])
    shown = [[level[name] for name in ("level", "num_tasks", "num_held_out")] for level in report["levels"]]
    assert shown == [[1, 2, 1], [2, 1, 0]]
    assert [(level["num_references"], level["num_solved"]) for level in report["levels"]] == [(1, 1), (1, 1)]
    assert all(0 < level["median_ms"] <= level["max_ms"] for level in report["levels"])


def test_problems_of_a_file_are_listed_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path,
        LINE | {"id": "wrong", "reference": "London"},
        LINE | {"id": "free", "verifier": {"regex": ""}} | {"verifier": {"regex": ".*"}},
    )
    assert main(["tasks", "check", str(path), "--num", "5"]) == 2
    output = capsys.readouterr()
    table = " ".join(output.out.split())
    assert "capitals-wrong: its reference has perf 0" in table
    assert "capitals-free: an empty submission has perf 1" in table
    assert "1 tasks repeat the instruction of another" in table
    assert "3 problems; repair the tasks, or their verifiers" in output.err


@pytest.mark.slow
def test_an_embedded_familys_demonstrations_are_verified(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "check", "counters", "--num", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert all(level["num_solved"] == level["num_references"] == 2 for level in report["levels"])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["folders:x"], "the tests of task folders run in sandboxes; use `m2forge tasks run x`"),
        (["chains"], "unknown task family 'chains'; did you mean 'chain'"),
        (["chain", "--num", "0"], "--num 0: expected 1 or more"),
        (["chain", "--set", "timeout=1"], "unknown key"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "check", *arguments]) == 2
    assert problem in capsys.readouterr().err
