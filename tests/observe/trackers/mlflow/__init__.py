"""A scripted double of MLflow's client: a store in one JSON file, the tracking URI. Like the real one it refuses names
with odd characters and more than 1000 metrics at once.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlflow.entities import Metric  # type: ignore[import-not-found, unused-ignore]  # the double beside, by sys.path


class MlflowClient:
    def __init__(self, tracking_uri: str | None) -> None:
        assert tracking_uri is not None
        self._path = Path(tracking_uri)

    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = {"experiments": [], "runs": []}
        return json.loads(self._path.read_text()) if self._path.exists() else found

    def _change(self, run_id: str, **fields: object) -> None:
        store = self._read()
        store["runs"][int(run_id)] |= fields
        self._path.write_text(json.dumps(store))

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        names = self._read()["experiments"]
        return SimpleNamespace(experiment_id=str(names.index(name))) if name in names else None

    def create_experiment(self, name: str) -> str:
        store = self._read()
        store["experiments"].append(name)
        self._path.write_text(json.dumps(store))
        return str(len(store["experiments"]) - 1)

    def search_runs(self, experiment_ids: Sequence[str], filter_string: str, max_results: int) -> list[SimpleNamespace]:
        asked = re.fullmatch(r"tags\.`([\w.]+)` = '(\w+)'", filter_string)
        assert asked is not None
        runs = enumerate(self._read()["runs"])
        found = [
            SimpleNamespace(info=SimpleNamespace(run_id=str(index)))
            for index, run in runs
            if run["experiment"] in experiment_ids and run["tags"].get(asked[1]) == asked[2]
        ]
        return found[:max_results]

    def create_run(self, experiment_id: str, tags: dict[str, str], run_name: str) -> SimpleNamespace:
        store = self._read()
        run = {"experiment": experiment_id, "tags": tags, "name": run_name, "status": "RUNNING", "metrics": []}
        store["runs"].append(run)
        self._path.write_text(json.dumps(store))
        return SimpleNamespace(info=SimpleNamespace(run_id=str(len(store["runs"]) - 1)))

    def update_run(self, run_id: str, status: str) -> None:
        self._change(run_id, status=status)

    def set_terminated(self, run_id: str, status: str) -> None:
        self._change(run_id, status=status)

    def log_batch(self, run_id: str, metrics: Sequence[Metric]) -> None:
        assert len(metrics) <= 1000
        assert all(re.fullmatch(r"[/\w.\- :]+", metric.key) for metric in metrics)
        before = self._read()["runs"][int(run_id)]["metrics"]
        self._change(run_id, metrics=before + [[m.key, m.value, m.timestamp, m.step] for m in metrics])
