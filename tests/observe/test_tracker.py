"""Metrics reach wandb and MLflow, a resumed run continues the same one there, and no failure of theirs stops training.

The packages are scripted doubles (`trackers/`). The last two tests use the real ones where they are installed.
"""

import json
import logging
import math
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from m2forge import cli
from m2forge.config import build, write_resolved
from m2forge.errors import ConfigError
from m2forge.observe import tracker
from m2forge.observe.config import MetricsConfig
from m2forge.observe.metrics import MetricsWriter, read_metrics
from tests.pretrain.small import make_config, write_corpus

DOUBLES = Path(__file__).parent / "trackers"
NAMES = ("wandb", "mlflow", "mlflow.entities")


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The doubles are importable; the file is what the double of wandb received."""
    monkeypatch.syspath_prepend(str(DOUBLES))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    path = tmp_path / "sent.jsonl"
    monkeypatch.setenv("WANDB_DOUBLE", str(path))
    monkeypatch.delenv("WANDB_FAILS", raising=False)
    yield path
    for name in NAMES:
        sys.modules.pop(name, None)


def received(path: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if line["kind"] == kind]


def config_of(*writers: str, **fields: object) -> MetricsConfig:
    return build(MetricsConfig, {"writers": list(writers), **fields}, origin="test")  # type: ignore[dict-item]


def test_a_resumed_run_continues_the_same_wandb_run(sent: Path, tmp_path: Path) -> None:
    config = config_of("wandb", project="p")
    with MetricsWriter(tmp_path / "small", config) as writer:
        writer.write(1, {"loss": 2.5, "bad": math.nan})
        writer.write(2, {"loss": 2.0})
    with pytest.raises(ZeroDivisionError), MetricsWriter(tmp_path / "small", config) as writer:
        writer.write(2, {"loss": 2.0})
        raise ZeroDivisionError
    first, second = received(sent, "init")
    assert first == second
    assert (first["project"], first["name"], first["resume"], first["console"]) == ("p", "small", "allow", "off")
    assert [line["values"]["step"] for line in received(sent, "log")] == [1, 2, 2]
    assert math.isnan(received(sent, "log")[0]["values"]["bad"])
    assert {"name": "*", "step_metric": "step", "kind": "define"} in received(sent, "define")
    assert [line["exit_code"] for line in received(sent, "finish")] == [0, 1]
    assert not (tmp_path / "small" / "tensorboard").exists(), "tensorboard is not among the writers"


def test_a_resumed_run_continues_the_same_mlflow_run(sent: Path, tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    config = config_of("mlflow", tracking_uri=str(path), run_name="trial")
    with pytest.raises(ZeroDivisionError), MetricsWriter(tmp_path / "run", config) as writer:
        writer.write(1, {"loss": 2.5, "loss/a#b": 1.0})
        raise ZeroDivisionError
    assert json.loads(path.read_text())["runs"][0]["status"] == "FAILED"
    with MetricsWriter(tmp_path / "run", config) as writer:
        writer.write(2, {f"load/{index}": float(index) for index in range(2500)})
    with MetricsWriter(tmp_path / "other", config) as writer:
        writer.write(1, {"loss": 9.0})
    store = json.loads(path.read_text())
    assert store["experiments"] == ["m2forge"]
    run, other = store["runs"]
    assert (run["name"], run["status"]) == ("trial", "FINISHED")
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [key for key, *_ in run["metrics"]] == ["loss", "loss/a_b", *steps[1].values]
    assert [step for *_, step in run["metrics"]] == [1, 1, *[2] * 2500]
    assert run["metrics"][-1][1:3] == [2499.0, round(steps[1].time_s * 1000)]
    assert [metric[:2] for metric in other["metrics"]] == [["loss", 9.0]]


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_a_failing_tracker_is_one_warning(
    sent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    monkeypatch.setenv("WANDB_FAILS", fails)
    with caplog.at_level(logging.WARNING), MetricsWriter(tmp_path, config_of("wandb")) as writer:
        for step in range(5):
            writer.write(step, {"loss": 1.0})
    (message,) = caplog.messages
    assert message.startswith(("wandb did not receive the ", "wandb did not receive step 0: "))
    assert "ConnectionError: network is unreachable; training continues" in message
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5


class Stuck:
    """A backend whose server accepts the connection and never answers; then it recovers."""

    def __init__(self) -> None:
        self.answers, self.num_opened = threading.Event(), 0
        self.steps: list[int] = []

    def open(self) -> None:
        self.num_opened += 1
        if self.num_opened == 1:
            raise ConnectionError
        self.answers.wait()

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        self.steps.append(step)

    def close(self, is_failed: bool) -> None: ...


def test_training_does_not_wait_for_a_tracker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracker, "CLOSE_S", 0.05)
    backend = Stuck()
    stuck = tracker.Tracker("stuck", backend)
    for step in range(3):
        stuck.log(step, 0.0, {"loss": 1.0})
    tracker.close_trackers([stuck], is_failed=False)
    assert caplog.messages[-1] == "stuck: gave up after 0.05 s; its last 3 steps may be missing there"
    backend.answers.set()
    stuck.join(10.0)
    assert backend.steps == [0, 1, 2], "what waited is sent once it answers"


def test_steps_beyond_those_that_may_wait_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracker, "MAX_WAITING", 2)
    backend = Stuck()
    stuck = tracker.Tracker("stuck", backend)
    for step in range(9):
        stuck.log(step, 0.0, {})
    backend.answers.set()
    tracker.close_trackers([stuck], is_failed=False)
    assert backend.steps in ([0, 1], [0, 1, 2])
    assert len(caplog.messages) == 1


def test_a_missing_package_is_one_error_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    write_resolved(make_config(write_corpus(tmp_path / "corpus")), tmp_path / "run.toml")
    for name in ("wandb", "mlflow"):
        command = ["pretrain", str(tmp_path / "run.toml"), "--runs", str(tmp_path / "runs")]
        assert cli.main([*command, "--set", f'train.metrics.writers=["{name}"]']) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"is not installed: pip install 'm2forge[{name}]', or leave it out" in error
    assert not (tmp_path / "runs").exists()


def test_a_config_line_sends_the_metrics_of_a_run(sent: Path, tmp_path: Path) -> None:
    """The second start finds the run complete up to its new phase, and adds a writer."""
    config = make_config(write_corpus(tmp_path / "corpus"))
    path = tmp_path / "run.toml"
    for num_phases, writers in ((1, ["wandb"]), (2, ["wandb", "mlflow"])):
        write_resolved(config.model_copy(update={"phases": config.phases[:num_phases]}), path)
        settings = [f"train.metrics.writers={json.dumps(writers)}"]
        settings += [f"train.metrics.tracking_uri={json.dumps(str(tmp_path / 'store.json'))}"] * ("mlflow" in writers)
        command = ["pretrain", str(path), "--runs", str(tmp_path / "runs")]
        assert cli.main(command + [part for setting in settings for part in ("--set", setting)]) == 0
    steps = read_metrics(tmp_path / "runs" / "small" / "metrics.jsonl")
    sent_steps = [line["values"] for line in received(sent, "log")]
    assert sent_steps == [{"step": step.step, **step.values} for step in steps]
    assert len({line["id"] for line in received(sent, "init")}) == 1
    (run,) = json.loads((tmp_path / "store.json").read_text())["runs"]
    num_before = config.phases[0].steps
    assert sorted({step for *_, step in run["metrics"]}) == [step.step for step in steps[num_before:]]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"writers": ["tensorboard", "tensorboard"]}, "expected each name once"),
        ({"tracking_uri": "http://localhost"}, 'tracking_uri has no effect without "mlflow"'),
        ({"project": "p"}, "project has no effect"),
        ({"run_name": "r"}, "run_name has no effect"),
        ({"writers": ["neptune"]}, "neptune"),
    ],
)
def test_a_setting_without_an_effect_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build(MetricsConfig, fields, origin="test")


def test_the_real_wandb_accepts_a_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for step in (1, 2):
        with MetricsWriter(tmp_path / "run", config_of("wandb")) as writer:
            writer.write(step, {"loss": 1.0, "bad": math.nan})
    id = (tmp_path / "run" / "tracking_id").read_text().strip()
    assert len(list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{id}/run-{id}.wandb"))) >= 1


def test_the_real_mlflow_accepts_a_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file://{tmp_path}/store"
    for step in (1, 2):
        with MetricsWriter(tmp_path / "run", config_of("mlflow", tracking_uri=uri)) as writer:
            writer.write(step, {"loss": 1.0, "load/a#b": math.nan})
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("m2forge").experiment_id])
    assert run.info.status == "FINISHED"
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")] == [1, 2]
