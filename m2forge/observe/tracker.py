"""Experiment trackers: sends metrics to Weights & Biases or MLflow from a thread, so that training does not wait.

A failing tracker never stops training. The first failure is logged as one warning; later steps are still sent, in case
the network recovers, and `metrics.jsonl` holds every step. The configuration of the run is not sent: it may hold
secrets.

`tracking_id` in the run's folder identifies the run to both trackers, so a resumed run continues the same one. The
steps that it repeats are sent again: both trackers then show two values at those steps.
"""

import importlib
import importlib.util
import logging
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, Protocol

from m2forge.errors import ConfigError
from m2forge.files import write_atomic
from m2forge.observe.config import MetricsConfig

ID_FILE = "tracking_id"
MAX_WAITING = 10_000
"""Steps that wait to be sent; a step beyond them is left out."""
CLOSE_S = 30.0
"""How long the end of a run waits for the steps that are not sent yet."""
_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
_MLFLOW_TAG = "m2forge.run"
_MLFLOW_BATCH = 1000
"""The most metrics that MLflow accepts in one request."""

P = ParamSpec("P")

_log = logging.getLogger(__name__)


class Backend(Protocol):
    """The client of one tracker. Every method may raise anything; the thread calls them in this order."""

    def open(self) -> None: ...
    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None: ...
    def close(self, is_failed: bool) -> None: ...


def require_writers(config: MetricsConfig) -> None:
    """Raise if the package of a writer is not installed. Imports nothing: stages call it before anything else."""
    for name in config.writers:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            extra = "m2forge" if name == "tensorboard" else f"'m2forge[{name}]'"
            raise ConfigError(
                f'metrics.writers: "{name}" needs the package {_PACKAGES[name]}, which is not installed: pip install '
                f"{extra}, or leave it out"
            )


def open_trackers(run_dir: Path, config: MetricsConfig) -> list["Tracker"]:
    """The trackers that `config` names, each with a thread that connects it."""
    backends: dict[str, type[WandbBackend] | type[MlflowBackend]] = {"wandb": WandbBackend, "mlflow": MlflowBackend}
    names = [name for name in config.writers if name in backends]
    id = _tracking_id(run_dir) if names else ""
    return [Tracker(name, backends[name](run_dir, id, config)) for name in names]


def close_trackers(trackers: Sequence["Tracker"], *, is_failed: bool) -> None:
    """End all of them; steps that are not sent within `CLOSE_S` are left out."""
    ends_s = time.monotonic() + CLOSE_S
    for tracker in trackers:
        tracker.end(is_failed)
    for tracker in trackers:
        tracker.join(ends_s - time.monotonic())


class Tracker:
    """Passes steps to a backend in a thread of its own."""

    def __init__(self, name: str, backend: Backend) -> None:
        self._name, self._backend = name, backend
        self._waiting: queue.SimpleQueue[tuple[int, float, Mapping[str, float]] | None] = queue.SimpleQueue()
        self._is_open = self._has_warned = self._is_failed = False
        self._thread = threading.Thread(target=self._run, name=f"m2forge-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put((step, time_s, values))
        else:
            self._warn(f"step {step}: {MAX_WAITING} steps wait to be sent already")

    def end(self, is_failed: bool) -> None:
        """End the tracker's run once all steps are sent."""
        self._is_failed = is_failed
        self._waiting.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(max(0.0, timeout_s))
        if self._thread.is_alive():
            # The step being sent left the queue; the mark of the end is in it.
            left = self._waiting.qsize()
            _log.warning("%s: gave up after %g s; its last %d steps may be missing there", self._name, CLOSE_S, left)

    def _run(self) -> None:
        self._try("the start of the run", self._open)
        while (item := self._waiting.get()) is not None:
            self._try(f"step {item[0]}", self._send, *item)
        if self._is_open:
            self._try("the end of the run", self._backend.close, self._is_failed)

    def _open(self) -> None:
        self._backend.open()
        self._is_open = True

    def _send(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        if not self._is_open:
            self._open()
        self._backend.log(step, time_s, values)

    def _try(self, what: str, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # whatever a client library raises, training goes on
            self._warn(f"{what}: {type(error).__name__}: {error}")

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s did not receive %s; training continues, metrics.jsonl holds every step, and further failures of %s "
                "are not reported",
                *(self._name, problem, self._name),
            )


class WandbBackend:
    def __init__(self, run_dir: Path, id: str, config: MetricsConfig) -> None:
        self._run_dir, self._id, self._config = run_dir, id, config
        self._run: Any = None

    def open(self) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=self._config.project,
            name=self._config.run_name or self._run_dir.resolve().name,
            id=self._id,
            resume="allow",
            dir=str(self._run_dir),
            # It would replace standard output, which belongs to the progress display.
            settings=wandb.Settings(console="off"),
        )
        # wandb discards a step below the last; as an ordinary metric the steps that a resumed run repeats are accepted.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self, is_failed: bool) -> None:
        self._run.finish(exit_code=int(is_failed))


class MlflowBackend:
    def __init__(self, run_dir: Path, id: str, config: MetricsConfig) -> None:
        self._run_name, self._id, self._config = config.run_name or run_dir.resolve().name, id, config
        self._client: Any = None
        self._run_id = ""

    def open(self) -> None:
        self._client = client = importlib.import_module("mlflow").MlflowClient(tracking_uri=self._config.tracking_uri)
        experiment = client.get_experiment_by_name(self._config.project)
        experiment_id = (
            client.create_experiment(self._config.project) if experiment is None else experiment.experiment_id
        )
        # Found by our own id: a process that died after it created the run could not have stored MLflow's.
        found = client.search_runs([experiment_id], f"tags.`{_MLFLOW_TAG}` = '{self._id}'", max_results=1)
        if found:
            self._run_id = found[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
        else:
            run = client.create_run(experiment_id, tags={_MLFLOW_TAG: self._id}, run_name=self._run_name)
            self._run_id = run.info.run_id

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        metric, time_ms = importlib.import_module("mlflow.entities").Metric, round(time_s * 1000)
        metrics = [metric(_mlflow_name(name), value, time_ms, step) for name, value in values.items()]
        for start in range(0, len(metrics), _MLFLOW_BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MLFLOW_BATCH])

    def close(self, is_failed: bool) -> None:
        self._client.set_terminated(self._run_id, status="FAILED" if is_failed else "FINISHED")


def _mlflow_name(name: str) -> str:
    """MLflow refuses other characters, and with them the whole batch."""
    return re.sub(r"[^\w./ -]", "_", name)


def _tracking_id(run_dir: Path) -> str:
    path = run_dir / ID_FILE
    if not path.exists():
        write_atomic(path, f"{secrets.token_hex(8)}\n")
    return path.read_text(encoding="ascii").strip()
