"""The cost of a test file is found in what it imports."""

from pathlib import Path

import pytest

from tests.cost import ROOT, Cost, cost_of, run_order
from tests.schedule import IMPORTING, WAITERS, WAITING, is_waiter, is_waiting


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
    scheduled = [*WAITING, *IMPORTING]
    assert [file for file in scheduled if not (ROOT / file).is_file()] == []
    assert len({*scheduled}) == len(scheduled)


def test_waiting_workers_collect_their_own_files_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", WAITERS[-1])
    monkeypatch.chdir(ROOT)
    assert is_waiter(["tests"])
    assert is_waiter([str(ROOT / "tests")])
    assert not is_waiter([WAITING[0]])
    assert is_waiting(ROOT / WAITING[0])
    assert not is_waiting(Path(__file__))
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    assert not is_waiter(["tests"])
