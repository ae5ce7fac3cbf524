"""The cost of a test file is found in what it imports."""

from pathlib import Path

import pytest

from tests.cost import Cost, cost_of


@pytest.mark.parametrize(
    ("text", "cost"),
    [
        ("import json\nfrom m2forge.records import Pack\n", Cost.LIGHT),
        ("def f():\n    import torch\n", Cost.LIGHT),
        ("from m2forge.rollout.core import Core\n", Cost.NETWORK),
        ("from m2forge.model import build\n", Cost.NETWORK),
        ("from tests.model.peer import (\n    set_router_biases,\n)\n", Cost.NETWORK),
        ("import torch\nimport subprocess\n", Cost.PROCESS),
        ("from tests.rl.ring import started\n", Cost.PROCESS),
    ],
)
def test_a_file_costs_what_its_imports_load(tmp_path: Path, text: str, cost: Cost) -> None:
    (tmp_path / "test_a.py").write_text(text)
    assert cost_of(tmp_path / "test_a.py") == cost
