"""The cost of a test file is found in what it imports."""

from pathlib import Path

import pytest

from tests.cost import ROOT, Cost, cost_of, run_order
from tests.schedule import CLIENTS, IMPORTING, WAITERS, WAITING, is_collected


@pytest.mark.parametrize(
    ("text", "cost"),
    [
        ("import json\nfrom m2forge.records import Pack\n", Cost.LIGHT),
        ("def f():\n    import torch\n", Cost.LIGHT),
        ("from m2forge.rollout.core import Core\n", Cost.NETWORK),
        ("from m2forge.model import build\n", Cost.NETWORK),
        ("from tests.model.peer import (\n    grad_of,\n)\n", Cost.NETWORK),
        ("import torch\nimport subprocess\n", Cost.PROCESS),
        ("from tests.rl.ring import started\n", Cost.PROCESS),
    ],
)
def test_a_file_costs_what_its_imports_load(tmp_path: Path, text: str, cost: Cost) -> None:
    (tmp_path / "test_a.py").write_text(text)
    assert cost_of(tmp_path / "test_a.py") == cost


def test_files_that_wait_and_files_that_compute_alternate(tmp_path: Path) -> None:
    texts = {"p1": "import subprocess\n", "p2": "import subprocess\n", "n1": "import torch\n", "n2": "import torch\n"}
    for name, text in (texts | {"l1": ""}).items():
        (tmp_path / name).write_text(text)
    keys = run_order(tmp_path / name for name in ("l1", "p1", "p2", "n1", "n2", "p1"))
    assert [path.name for path in sorted(keys, key=lambda path: keys[path])] == ["p1", "n1", "p2", "n2", "l1"]


def test_every_scheduled_file_is_there_once() -> None:
    scheduled = [*WAITING, *IMPORTING, *CLIENTS]
    assert [file for file in scheduled if not (ROOT / file).is_file()] == []
    assert len({*scheduled}) == len(scheduled)


def test_workers_collect_only_files_that_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"waiting": WAITING[0], "importing": IMPORTING[0], "clients": CLIENTS[0], "other": "tests/test_cost.py"}

    def collected(worker: str, *arguments: str) -> set[str]:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        return {name for name, file in files.items() if is_collected(ROOT / file, arguments)}

    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "4")
    monkeypatch.chdir(ROOT)
    assert collected(WAITERS[-1], "tests") == collected(WAITERS[-1], str(ROOT / "tests")) == {"waiting"}
    assert collected("gw0", "tests") == files.keys() - {"clients"}
    assert collected("gw1", "tests") == files.keys() - {"importing"}
    assert collected("gw1", WAITING[0]) == {*files}, "files that are named are everyone's"
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "1")
    assert collected("gw0", "tests") == {*files}
