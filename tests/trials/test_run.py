"""`m2forge eval` with trials: an agent in sandboxes, scripted and native engines, infra apart, a killed evaluation."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from m2forge.cli import main
from m2forge.config import build, dump
from m2forge.errors import ConfigError, EngineError
from m2forge.protocols import Engine, Sandbox
from m2forge.records import Submission, Task, Verdict
from m2forge.tasks.runner import TaskRunner
from m2forge.testing.scripted import ScriptedEngine
from m2forge.text.format import make_format
from m2forge.text.tokenizer import load_tokenizer
from m2forge.trials import run
from m2forge.trials.config import TrialEvalConfig, TrialsConfig
from m2forge.trials.run import LINES_FILE, PAGE_FILE, PLOT_FILE, REPORT_FILE, read_trials
from tests.rl.scene import make_model
from tests.rl.scripted_run import Script
from tests.rl.test_own_tasks import PROGRAM, make_run, write_tasks
from tests.sandbox.places import problem, require

ROOT = Path(__file__).parents[2]
NUM_TASKS, NUM_TRIALS = 3, 2


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trials")
    make_model(folder)
    write_tasks(folder)
    return folder


def configured(scene: Path, output: Path, **fields: object) -> TrialEvalConfig:
    backend = "process" if problem("namespace") else "namespace"
    trials: dict[str, Any] = {
        "tasks": [str(scene / "commands.jsonl")],
        "split": "train",
        "num_tasks": NUM_TASKS,
        "num_trials": NUM_TRIALS,
        "max_tries": 2,
        "agent": {
            "kind": "command",
            "command": [sys.executable, str(PROGRAM), "{model}", "{instruction}"],
            "max_concurrent": 1,
            "sandbox": {"backend": backend},
        },
    }
    return build(TrialEvalConfig, {"model": str(scene / "model"), "output": str(output), "trials": trials | fields})


def scripted(folder: Path, config: TrialsConfig) -> Engine:
    """Writes the right word in every other attempt."""
    tokenizer = load_tokenizer(folder)
    script = Script(make_format(config.gateway.format, tokenizer))
    return ScriptedEngine(tokenizer.vocab_size, script=script, decode=tokenizer.decode_bytes)


def evaluate(config: TrialEvalConfig, folder: Path) -> int:
    (folder / "eval.toml").write_text(dump(config))
    return main(["eval", str(folder / "eval.toml")])


def test_trials_give_rates_and_a_killed_evaluation_goes_on(
    scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "open_native", scripted)
    config, lines = configured(scene, tmp_path / "out"), tmp_path / "out" / LINES_FILE
    assert evaluate(config, tmp_path) == 0
    report = json.loads((tmp_path / "out" / REPORT_FILE).read_text())
    trials = read_trials(lines)
    assert Counter((trial.task, trial.number) for trial in trials).total() == NUM_TASKS * NUM_TRIALS
    assert len({trial.task for trial in trials}) == NUM_TASKS
    assert [trial.perf for trial in trials] == [1.0, 0.0] * NUM_TASKS, "in the order in which they ran"
    assert all(trial.evidence["status"] == (trial.perf == 0) for trial in trials)
    assert (report["all"]["perf"], report["all"]["num_infra"]) == (0.5, 0)
    assert report["all"]["pass_all"] == [[0.5, 0.0], [0.0, 0.0]], "of each task one trial of two succeeds"
    assert "50.0% ±" in capsys.readouterr().out
    assert "pass^2" in (tmp_path / "out" / PAGE_FILE).read_text()
    assert (tmp_path / "out" / PLOT_FILE).read_text().startswith("<svg")
    # As a killed process leaves it: two trials are missing, and one is written in part.
    kept = lines.read_text().splitlines(keepends=True)[:-2]
    lines.write_text("".join(kept) + '{"task": "comm')
    assert evaluate(config, tmp_path) == 0
    again = read_trials(lines)
    assert (again[: len(kept)], len(again)) == (trials[: len(kept)], len(trials))
    assert not list((tmp_path / "out" / "workspaces").iterdir())
    capsys.readouterr()
    options = (f"--set=trials.compare={tmp_path / 'out'}", "--set=trials.price.completion=4.0")
    assert main(["eval", str(tmp_path / "eval.toml"), *options]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "difference 0.0% ±0.0%; 0 tasks better, 0 worse" in printed
    cost = json.loads((tmp_path / "out" / REPORT_FILE).read_text())["cost"]
    assert cost == pytest.approx(sum(trial.num_tokens for trial in again) * 4e-6)
    assert evaluate(configured(scene, tmp_path / "out", seed=7), tmp_path) == 2
    assert "holds trials of another configuration" in capsys.readouterr().err


def always_right(folder: Path, config: TrialsConfig) -> Engine:
    tokenizer = load_tokenizer(folder)
    format = make_format(config.gateway.format, tokenizer)
    # A fresh script's first attempt is right.
    return ScriptedEngine(tokenizer.vocab_size, script=lambda ids: Script(format)(ids), decode=tokenizer.decode_bytes)


@pytest.mark.slow
def test_two_policies_are_compared_at_task_folders(
    scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require("namespace")
    folders = {"tasks": [f"folders:{scene / 'folders'}"], "num_tasks": 2}
    for name, engine in (("first", scripted), ("second", always_right)):
        monkeypatch.setattr(run, "open_native", engine)
        options = () if name == "first" else (f"--set=trials.compare={tmp_path / 'first'}",)
        (tmp_path / "eval.toml").write_text(dump(configured(scene, tmp_path / name, **folders)))
        assert main(["eval", str(tmp_path / "eval.toml"), *options]) == 0
    # By the folders' own tests, in the order in which the trials ran.
    perfs = [[trial.perf for trial in read_trials(tmp_path / name / LINES_FILE)] for name in ("first", "second")]
    assert perfs == [[1.0, 0.0] * 2, [1.0] * 4]
    printed = " ".join(capsys.readouterr().out.split())
    assert "against the other policy, 2 tasks: pass@1 100.0% and 50.0%, difference 50.0%" in printed
    assert re.search(r"[12] tasks better, 0 worse", printed)


def test_a_model_folder_is_sampled_by_the_native_engine(scene: Path, tmp_path: Path) -> None:
    assert evaluate(configured(scene, tmp_path / "out", num_tasks=1, num_trials=1), tmp_path) == 0
    (trial,) = read_trials(tmp_path / "out" / LINES_FILE)
    # Untrained weights call no tool, so the file is missing: the policy failed, not the infrastructure.
    assert (trial.perf, trial.infra, trial.num_calls) == (0.0, None, 1)
    assert 0 < trial.num_tokens <= 200
    report = json.loads((tmp_path / "out" / REPORT_FILE).read_text())
    assert (report["all"]["num_trials"], report["num_tokens"]) == (1, trial.num_tokens)


def test_a_failing_infrastructure_is_counted_apart(
    scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify, tries = TaskRunner.verify, Counter[str]()

    async def failing(
        runner: TaskRunner, task: Task, submission: Submission, sandbox: Sandbox | None = None
    ) -> Verdict:
        tries[task.id] += 1
        if task.id == "commands-north" or tries[task.id] == 1:
            raise EngineError("the disk is full")
        return await verify(runner, task, submission, sandbox)

    monkeypatch.setattr(TaskRunner, "verify", failing)
    config = configured(scene, tmp_path / "out", num_tasks=5, num_trials=1)
    report = run.run_trials(config, open_engine=scripted)
    assert (report.all.num_tasks, report.all.num_trials, report.all.num_infra) == (5, 4, 1)
    assert report.all.perf is not None
    (infra,) = [trial for trial in read_trials(tmp_path / "out" / LINES_FILE) if trial.infra is not None]
    assert (infra.task, infra.perf, infra.infra) == ("commands-north", None, "the disk is full")
    assert set(tries.values()) == {2}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"split": "held_out", "tasks": ["chain", "{scene}/words.jsonl"]}, "it has no task of the split 'held_out'"),
        ({"tasks": ["{scene}/nothing.jsonl"]}, "nothing.jsonl"),
        ({"agent": {"kind": "command", "command": ["no-such-agent"]}}, "'no-such-agent' is not in"),
    ],
)
def test_what_cannot_be_tried_is_refused_and_nothing_written(
    scene: Path, tmp_path: Path, fields: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"instruction": "Do it.", "split": "train", "verifier": {"exact": "x"}}
    (scene / "words.jsonl").write_text(json.dumps(line) + "\n")
    if "tasks" in fields:
        fields = fields | {"tasks": [source.replace("{scene}", str(scene)) for source in fields["tasks"]]}
    else:
        fields["agent"]["sandbox"] = {"backend": "process" if problem("namespace") else "namespace"}
    assert evaluate(configured(scene, tmp_path / "out", **fields), tmp_path) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


FORBIDDEN = """
import ctypes, sys
assert ctypes.CDLL(None).unshare(0x10000000) == 0  # The limit holds in this user namespace alone.
open("/proc/self/setgroups", "w").write("deny")
open("/proc/self/uid_map", "w").write("0 0 1"); open("/proc/self/gid_map", "w").write("0 0 1")
open("/proc/sys/user/max_user_namespaces", "w").write("0")
from m2forge import cli
assert cli.main(["eval", sys.argv[1]]) == 2
assert cli.main(["rl", sys.argv[2]]) == 2
assert cli.main(["tasks", "run", sys.argv[3], "--agent", "nop", "--image", "host", "--set", "backend=namespace"]) == 2
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can forbid namespaces for one process")
def test_refused_namespaces_end_commands_by_a_message(scene: Path, tmp_path: Path) -> None:
    require("namespace")
    config = configured(scene, tmp_path / "out")
    (tmp_path / "eval.toml").write_text(dump(config))
    (tmp_path / "rl.toml").write_text(dump(make_run(scene / "model", scene, "commands.jsonl")))
    arguments = ("eval.toml", "rl.toml", str(ROOT / "examples" / "folders" / "count-words"))
    command = [sys.executable, "-c", FORBIDDEN, *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    messages = done.stderr.splitlines()
    assert len(messages) == 3, done.stderr
    assert all("sandbox.backend: the kernel refused the namespaces" in message for message in messages)
    assert all("user.max_user_namespaces" in message for message in messages)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval.toml", "rl.toml"]


def test_an_evaluation_without_anything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to measure: give suites, held_out, tool_calls, exact_match or"):
        build(TrialEvalConfig, {"model": "m2-nano", "output": str(tmp_path)})
