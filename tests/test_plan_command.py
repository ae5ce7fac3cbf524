"""`m2forge plan` over presets, stages' files and bad input."""

import json
from pathlib import Path

import pytest

from m2forge import cli

ROOT = Path(__file__).parent.parent


def test_a_preset_is_planned_at_its_context(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "m2-mini", "--gpus", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workload"] == "m2-mini at its native context"
    assert found["plans"][0]["fits"]
    components = found["plans"][0]["memory"]["components"]
    assert {"weights", "moments", "activations"} <= components.keys()


def test_a_stage_is_planned_by_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(ROOT / "configs/pretrain/mini.toml"), "--gpus", "1"]) == 0
    assert "one GPU, recompute none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "m2-mini", "--gpus", "0"], "expected a number above 0"),
        (["plan", "m2-mini", "--gpu", "H20"], "unknown GPU 'H20'"),
        (["plan", "m2-mimi"], "m2-mini"),
        (["plan", "m2-mini", "--measure"], "torch sees none here"),
    ],
)
def test_bad_input_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err
