"""`m2forge tasks lint`, `show` and `export` from the command line."""

import json
from pathlib import Path

import pytest

from m2forge.cli import main
from tests.tasks.folders.scene import table, write, write_raw


def test_lint_prints_findings_and_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "set" / "good")
    assert main(["tasks", "lint", str(tmp_path / "set")]) == 0
    assert "1 folder, 0 findings" in capsys.readouterr().out
    write(tmp_path / "set" / "root", table(agent={}))
    assert main(["tasks", "lint", str(tmp_path / "set" / "good"), str(tmp_path / "set" / "root")]) == 2
    output = capsys.readouterr()
    assert f"{tmp_path}/set/root/task.toml: root-agent: agent.user" in output.out
    assert "1 findings; repair the folders" in output.err
    assert main(["tasks", "lint", str(tmp_path / "set"), "--json"]) == 2
    (finding,) = json.loads(capsys.readouterr().out)
    assert (finding["rule"], finding["line"]) == ("root-agent", 0)
    assert main(["tasks", "lint", str(tmp_path / "set"), "--ignore", "root-agent"]) == 0


def test_show_prints_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = table(steps=[{"name": "first"}, {"name": "second"}])
    inner = {"steps__first__instruction_dot_md": "Begin.\n", "steps__second__instruction_dot_md": "End.\n"}
    write(tmp_path / "set" / "stepped", steps, **inner)
    write(tmp_path / "set" / "sum", environment__files__a_dot_txt="x" * 1234)
    assert main(["tasks", "show", str(tmp_path / "set" / "sum")]) == 0
    shown = capsys.readouterr().out
    for text in ("Write 2 + 3", "separate", "no-network", "a.txt  1,234 B", "user 1000", "grep -qx 5", "FROM python"):
        assert text in shown
    assert main(["tasks", "show", str(tmp_path / "set" / "stepped")]) == 0
    assert "step second: instruction" in capsys.readouterr().out
    assert main(["tasks", "show", str(tmp_path / "set" / "sum"), "--json"]) == 0
    shown_json = json.loads(capsys.readouterr().out)
    assert shown_json["files"]["environment/files/a.txt"] == 1234
    assert shown_json["config"]["agent"]["user"] == 1000


def test_show_lists_a_set_and_what_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "set" / "sum")
    write_raw(tmp_path / "set" / "broken", "x =")
    assert main(["tasks", "show", str(tmp_path / "set")]) == 2
    output = capsys.readouterr()
    assert "broken/task.toml: not valid TOML" in output.out
    assert "1 of 2 folders cannot be used" in output.err
    assert main(["tasks", "show", str(tmp_path / "set" / "broken")]) == 2
    assert "not valid TOML" in capsys.readouterr().err


def test_export_writes_folders_that_lint_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--count", "6", "--level", "2", "--seed", "1"]
    assert main(["tasks", "export", "gather", str(tmp_path / "set"), *arguments]) == 0
    assert "6 folders, 1 held out, 6 with a solution" in capsys.readouterr().out
    assert main(["tasks", "lint", str(tmp_path / "set")]) == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["lint", "none"], "none: cannot be read"),
        (["lint", "."], "no task folder"),
        (["lint", ".", "--ignore", "root-agents"], "no such rule; did you mean 'root-agent'?"),
        (["lint", ".", "--level", "3"], "--level belongs to another action"),
        (["show", "a", "b"], "tasks show: expected 1 arguments, received 2"),
        (["export", "chain"], "tasks export: expected 2 arguments, received 1"),
        (["import", "none.jsonl", "out"], "none.jsonl: cannot be read"),
    ],
)
def test_bad_arguments_are_one_message(
    arguments: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tasks", *arguments]) == 2
    assert problem in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
