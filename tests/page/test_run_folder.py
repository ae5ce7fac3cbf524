"""A run's directory in every state it can be found in."""

import fcntl
import json
import os
from pathlib import Path
from typing import cast

import pytest

from m2forge.cluster.process_record import VERSIONS_FILE, ProcessRecord
from m2forge.errors import NotFoundError, TrainingError
from m2forge.page import run_folder as page_run
from m2forge.page.run_folder import Run
from m2forge.page.run_list import RunList
from m2forge.pool.config import PoolConfig
from m2forge.rl.layout import Layout
from m2forge.text.format import ChatFormat
from m2forge.train.run_dir import hold_run
from tests.page.run_folder import write_pipeline
from tests.page.scene import Scene


def test_the_names_are_those_that_the_loop_writes(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    assert layout.evaluations == tmp_path / page_run.CHECKS_FILE
    assert layout.model == tmp_path / page_run.MODEL_FOLDER
    assert layout.ratios == tmp_path / page_run.RATIOS_FOLDER
    assert layout.weights == tmp_path / page_run.WEIGHTS_FOLDER
    assert layout.sandboxes == tmp_path / page_run.SANDBOXES_FILE
    assert layout.processes == tmp_path / page_run.PROCESSES_FOLDER
    for url in ("sqlite:///pool.db", "sqlite:////elsewhere/pool.db", "postgresql://me@host/db"):
        (tmp_path / "config.toml").write_text(f'[pool]\nurl = "{url}"\n')
        assert Run(tmp_path).pool_config() == layout.pool(PoolConfig(url=url))


def test_processes_are_shown_with_their_deaths(tmp_path: Path) -> None:
    assert Run(tmp_path).processes(is_running=True) == []
    record = ProcessRecord(tmp_path / page_run.PROCESSES_FOLDER, "gateway", "n1")
    record.start()
    record.end(1, is_death=True)
    record.start()
    with (tmp_path / page_run.PROCESSES_FOLDER / "gateway.jsonl").open("a") as file:
        file.write("no JSON\n")
    (shown,) = Run(tmp_path).processes(is_running=True)
    assert isinstance(shown, dict)
    deaths = shown.pop("deaths")
    facts = {"node": "n1", "is_running": True, "version": None, "num_starts": 2, "num_deaths": 1}
    assert shown == {"name": "gateway"} | facts
    assert isinstance(deaths, list)
    assert [death["status"] for death in deaths if isinstance(death, dict)] == [1]
    record.end(0, is_death=False)
    (tmp_path / page_run.PROCESSES_FOLDER / VERSIONS_FILE).write_text('{"gateway": 4}')
    (ended,) = Run(tmp_path).processes(is_running=True)
    assert isinstance(ended, dict)
    assert (ended["is_running"], ended["num_deaths"], ended["version"]) == (False, 1, 4)
    (tmp_path / page_run.PROCESSES_FOLDER / VERSIONS_FILE).write_text("no JSON")
    (unread,) = Run(tmp_path).processes(is_running=True)
    assert isinstance(unread, dict)
    assert unread["version"] is None


def test_sandboxes_are_alive_while_the_run_is(tmp_path: Path) -> None:
    assert Run(tmp_path).sandboxes(is_running=True) is None
    nums = {"num_alive": 3, "num_forked": 20, "num_failed": 1}
    (tmp_path / "sandboxes.json").write_text(json.dumps({"backend": "namespace", **nums}))
    assert Run(tmp_path).sandboxes(is_running=True) == {"backend": "namespace", **nums}
    assert Run(tmp_path).sandboxes(is_running=False) == {"backend": "namespace", **nums, "num_alive": 0}
    (tmp_path / "sandboxes.json").write_text('{"num_alive": []}')
    assert Run(tmp_path).sandboxes(is_running=True) is None


def test_a_pipeline_has_yields(tmp_path: Path) -> None:
    write_pipeline(tmp_path, is_finished=False)
    found = Run(tmp_path).describe()
    assert (found["stage"], found["state"], found["problems"]) == ("pipeline", "running", [])
    write_pipeline(tmp_path, is_finished=True)
    run = Run(tmp_path)
    assert run.state() == "finished"
    yields = run.yields()
    assert yields == json.loads((tmp_path / "yields.json").read_text())
    (row,) = cast("list[dict[str, object]]", RunList(tmp_path).describe()["runs"])
    assert [(figure["label"], figure["value"]) for figure in cast("list[dict[str, object]]", row["figures"])] == [
        ("accepted", 9),
        ("records", 12),
    ]
    for text in ("", "[]", '{"stages": [{}]}', '{"stages": [], "is_finished": true, "num_accepted": 1e999}'):
        (tmp_path / "yields.json").write_text(text)
        assert Run(tmp_path).yields() is None
        assert Run(tmp_path).describe()["yields"] is None


def test_a_complete_run_says_so(done: Path) -> None:
    found = Run(done).describe()
    assert (found["stage"], found["state"], found["step"], found["num_steps"]) == ("rl", "finished", 6, 6)
    checks = found["checks"]
    assert isinstance(checks, list)
    assert [check["step"] for check in checks if isinstance(check, dict)] == [0, 6, 6]
    assert [check["versions"] for check in checks if isinstance(check, dict)] == [{}] * 3
    assert found["problems"] == []


def test_keys_of_another_version_do_not_hide_the_pool(done: Path) -> None:
    assert "max_attempts" in (done / "config.toml").read_text()
    config = Run(done).pool_config()
    assert config is not None
    assert (config.window.queue, config.window.size) == (8, 6)


def test_a_run_is_running_while_it_writes_or_is_held(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.state() == "empty"
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("")
    assert run.state() == "running"
    os.utime(metrics, (1e9, 1e9))
    assert run.state() == "stopped"
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run.state() == "running"
        (tmp_path / "model").mkdir()
        assert run.state() == "running", "a finished run that goes on with more phases is running"
    assert run.state() == "finished"
    (tmp_path / "model").rmdir()
    assert run.state() == "stopped"


def test_a_run_that_ended_with_an_error_says_which(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(TrainingError), hold_run(tmp_path):
        assert (run.state(), run.failure()) == ("running", None)
        raise TrainingError("the loss is not finite; lower the learning rate")
    assert (run.state(), run.failure()) == ("failed", "the loss is not finite; lower the learning rate")
    assert run.describe()["failure"] == run.failure()
    with hold_run(tmp_path):
        assert run.state() == "running"
    assert run.failure() is None


def test_a_model_without_its_last_check_is_not_complete(format: ChatFormat, tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run", format, num_steps=2)
    scene.pool.close()
    (scene.run_dir / "model").mkdir()
    assert Run(scene.run_dir).state() != "finished"
    scene.write_check(0.5, 2)
    assert Run(scene.run_dir).state() == "finished"


def test_an_evaluation_shows_the_versions_that_it_sampled_from(tmp_path: Path) -> None:
    line = '{"step": 3, "success": 0.5, "versions": {"3": 0.75, "4": 0.25}}'
    (tmp_path / "checks.jsonl").write_text(f'{line}\n{{"step": 4, "success": 0.5, "versions": [4]}}\n')
    found, num_unread = Run(tmp_path).checks()
    assert [check["versions"] for check in found if isinstance(check, dict)] == [{"3": 0.75, "4": 0.25}]
    assert num_unread == 1


def test_an_evaluation_shows_its_levels(tmp_path: Path) -> None:
    levels = {"raises": {"1": {"num_tasks": 50, "success": 0.25}, "2": {"num_tasks": 40, "success": 0.5}}}
    known = json.dumps({"step": 3, "success": 0.5, "by_level": levels})
    broken = [
        json.dumps({"step": 4, "success": 0.5, "by_level": by_level})
        for by_level in ([1], {"raises": 3}, {"raises": {"1": 0.5}}, {"raises": {"1": {"success": 0.5}}})
    ]
    (tmp_path / "checks.jsonl").write_text("\n".join([known, *broken, '{"step": 5, "success": 0.5}', ""]))
    found, num_unread = Run(tmp_path).checks()
    assert [check["by_level"] for check in found if isinstance(check, dict)] == [levels, {}]
    assert num_unread == len(broken)


def test_broken_files_are_told_and_the_rest_is_shown(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("name = [")
    (tmp_path / "checks.jsonl").write_text('{"step": 0, "success": 0.5}\n{"step": "x"}\n[]\nNaN\n{"step": 3, "succ')
    found = Run(tmp_path).describe()
    problems = found["problems"]
    assert isinstance(problems, list)
    assert len(problems) == 2
    assert "3 lines" in str(problems[1])
    assert found["stage"] == "run"
    assert Run(tmp_path).pool_config() is None
    assert Run(tmp_path).format() is None


@pytest.mark.parametrize(("text", "stage"), [('corpus = "c"', "pretrain"), ("[data]", "sft"), ("", "run")])
def test_stages_are_told_apart(tmp_path: Path, text: str, stage: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    assert Run(tmp_path).stage() == stage


def test_former_keys_are_read_under_their_current_names(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[curriculum]\n[agent]\n[policy]\nrouter_bias = "balanced"\n')
    assert Run(tmp_path).config()["train"] == {"router_bias": "balanced"}


def test_phases_add_up(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('corpus = "c"\n[[phases]]\nsteps = 5\n[[phases]]\nsteps = 7\n')
    assert Run(tmp_path).num_steps() == 12


def test_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="is not a folder"):
        Run(tmp_path / "none")
