"""`m2forge pipeline` with the pipeline `questions`, from the command line to folders and trajectories."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from m2forge.cli import main
from m2forge.tasks.folders.folder import read_folder
from m2forge.tasks.folders.lint import lint
from tests.pipelines.endpoint import completion, serving

HELD_OUT = {"split": "held_out"}
TASKS: list[dict[str, Any]] = [
    {"id": "sum", "instruction": "Add the numbers 2 and 3.", "verifier": {"numeric": 5}, "reference": "5", **HELD_OUT},
    {"id": "sum-again", "instruction": "Add the numbers 2 and 3!", "verifier": {"numeric": 5}, "reference": "5"},
    {"id": "city", "instruction": "Name the capital of France.", "verifier": {"exact": "Paris"}, "reference": "Paris"},
    {"id": "short", "instruction": "Go on.", "verifier": {"exact": "on"}, "reference": "on"},
    {"id": "wrong", "instruction": "Name the capital of Spain.", "verifier": {"exact": "Madrid"}, "reference": "Rome"},
    {"id": "free", "instruction": "Say anything at all here.", "verifier": {"regex": ".*"}, "reference": "a"},
    {"id": "bare", "instruction": "Name the capital of Italy.", "verifier": {"exact": "Rome"}},
]


def write_run(folder: Path, url: str | None = None) -> Path:
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    lines = ['name = "questions"', "workers = 2"]
    keys = [f'source = "{folder}/tasks.jsonl"']
    if url is not None:
        lines += [f'[models.m]\nurl = "{url}"\nmodel = "model"\nmax_retries = 0']
        keys += ['writer = "m"', "num_variants = 1", 'judge = "m"', 'teachers = ["m"]', "num_draws = 2"]
    (folder / "run.toml").write_text("\n".join([*lines, "[questions]", *keys, ""]))
    return folder / "run.toml"


def respond(body: dict[str, Any], number: int) -> tuple[int, bytes]:
    *system, user = (message["content"] for message in body["messages"])
    if "Rewrite" in " ".join(system):
        (text,) = re.findall(r"<text>\n(.*)\n</text>", user)
        return completion(json.dumps([f"Please answer this: {text}"]))
    if system:
        return completion('[{"score": 1, "evidence": "yes"}, {"score": 0.5, "evidence": "no"}]')
    # Right for tasks in the author's words, wrong for the other ones.
    return completion("5" if "Add" in user and "Please" not in user else "Paris" if "France" in user else "no idea")


def yields(run_dir: Path) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in json.loads((run_dir / "yields.json").read_text())["stages"]}


def files(run_dir: Path) -> dict[str, bytes]:
    paths = [run_dir / "trajectories.jsonl", *(path for path in (run_dir / "tasks").rglob("*") if path.is_file())]
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in paths}


def test_tasks_become_folders_and_trajectories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, runs = write_run(tmp_path), tmp_path / "runs"
    assert main(["pipeline", str(config), "--dry-run", "--runs", str(runs)]) == 0
    assert "tasks → length → dedup → gates → write → teach → verify → select → write-lines" in capsys.readouterr().out
    assert not runs.exists()
    assert main(["pipeline", str(config), "--runs", str(runs)]) == 0
    out, run_dir = capsys.readouterr().out, runs / "questions"
    assert all(text in out for text in ("Yields", "near-duplicate", "reference fails", f"wrote {run_dir}"))
    found = yields(run_dir)
    assert found["length"]["rejected"] == {"too short": 1}
    assert found["dedup"]["rejected"] == {"near-duplicate": 1}
    assert found["gates"]["rejected"] == {"empty submission passes": 1, "no reference": 1, "reference fails": 1}
    folders = sorted((run_dir / "tasks").iterdir())
    assert [path.name for path in folders] == ["tasks-city", "tasks-sum"]
    assert [finding for path in folders for finding in lint(path)] == []
    lines = [json.loads(line) for line in (run_dir / "trajectories.jsonl").read_text().splitlines()]
    assert [line["messages"][-1]["content"] for line in lines] == ["Paris", "5"]
    before = files(run_dir)
    assert main(["pipeline", str(config), "--runs", str(runs)]) == 0
    assert files(run_dir) == before


def test_models_rewrite_score_and_answer_and_are_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    with serving(respond) as endpoint:
        config = write_run(tmp_path, endpoint.url)
        assert main(["pipeline", str(config), "--runs", str(runs)]) == 0
        num_requests = len(endpoint.requests)
    found, run_dir = yields(runs / "questions"), runs / "questions"
    assert (found["expand"]["num_in"], found["expand"]["num_made"]) == (7, 14)
    assert found["rubric"]["num_passed"] == found["rubric"]["num_in"] > 4
    assert found["teach"]["num_made"] == 2 * found["teach"]["num_in"]
    assert found["verify"]["rejected"] == {"verdict: judged": 4}
    assert found["select"]["rejected"] == {"over the cap of its group": 3}
    assert sum(one["num_asked"] for one in found.values()) == num_requests
    names = sorted(path.name for path in (run_dir / "tasks").iterdir())
    assert names == ["tasks-city", "tasks-city-v1", "tasks-short-v1", "tasks-sum", "tasks-sum-v1"]
    # A variant stays in the split of its task.
    splits = {name: read_folder(run_dir / "tasks" / name).provenance.split for name in names}
    assert splits["tasks-sum"] == splits["tasks-sum-v1"] == "held_out"
    words = ["pipeline", str(config), "--runs", str(runs), "--set", "name=again", "--set", "replay=true"]
    stores = f'completions=["{run_dir}/pipeline.db"]'
    assert main([*words, "--set", stores]) == 0
    assert files(runs / "again") == files(run_dir)
    assert sum(one["num_asked"] for one in yields(runs / "again").values()) == 0
    capsys.readouterr()
    assert main([*words, "--set", "name=third", "--set", stores, "--set", "questions.num_variants=2"]) == 2
    error = capsys.readouterr().err
    assert "replay: stage expand asks model for a completion that is not stored" in error
    assert error.count("m2forge: error") == 1


def test_bad_input_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, runs = write_run(tmp_path), tmp_path / "runs"
    cases = [
        (["questions.source=missing.jsonl"], r"questions\.source: .*missing\.jsonl: no such file"),
        (["questions.source=folders:x"], "these are task folders already"),
        (["questions.judge=m"], r"questions: no table models\.m; none is known here"),
        (["questions.source=no_such_family"], "no_such_family"),
        (["models.m.url=ftp://x", "models.m.model=m"], r"models\.m\.url: .* received 'ftp://x'"),
        (["worker=3"], "did you mean 'workers'"),
        (["completions=['nothing.db']"], r"nothing\.db: no such file"),
    ]
    for overrides, message in cases:
        words = [word for override in overrides for word in ("--set", override)]
        assert main(["pipeline", str(config), "--runs", str(runs), *words]) == 2
        error = capsys.readouterr().err
        assert re.search(message, error), error
        assert error.count("m2forge: error") == 1
    (tmp_path / "garbage.toml").write_bytes(b"\xff\x00")
    assert main(["pipeline", str(tmp_path / "garbage.toml")]) == 2
    (tmp_path / "empty.toml").write_text('name = "empty"')
    assert main(["pipeline", str(tmp_path / "empty.toml")]) == 2
    assert "expected one of the tables questions" in capsys.readouterr().err


def test_a_garbage_endpoint_fails_its_items_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda *_: (200, b"\x00garbage")) as endpoint:
        config = write_run(tmp_path, endpoint.url)
        assert main(["pipeline", str(config), "--runs", str(tmp_path / "runs")]) == 0
    found = yields(tmp_path / "runs" / "questions")
    assert found["expand"]["failed"] == {"no chat completion": 7}
    assert found["write-lines"]["num_in"] == 0
    assert "7 items failed; the same command" in capsys.readouterr().err


def test_a_run_resumes_only_with_its_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, runs = write_run(tmp_path), tmp_path / "runs"
    words = ["pipeline", str(config), "--runs", str(runs), "--set", "questions.min_words=100"]
    assert main(words) == 0
    assert main([*words, "--set", "workers=1"]) == 0
    assert main([*words, "--set", "seed=3"]) == 2
    assert "was started with seed = 0, now it is 3" in capsys.readouterr().err
    (tmp_path / "tasks.jsonl").write_text(json.dumps(TASKS[0]) + "\n")
    assert main(words) == 2
    assert "was started with other input" in capsys.readouterr().err
