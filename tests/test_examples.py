"""The examples run as a reader would run them."""

import re
import subprocess
import sys
from pathlib import Path

from m2forge.model.checkpoint import load_model
from m2forge.observe.metrics import read_metrics

ROOT = Path(__file__).parent.parent


def run_nano(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / "nano.py"), *arguments]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_nano_learns_saves_and_writes(tmp_path: Path) -> None:
    stale = tmp_path / "model" / "left-over"
    stale.parent.mkdir()
    stale.write_text("from an earlier run")
    result = run_nano("--seconds", "3", "--run-dir", str(tmp_path))
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert result.stdout.startswith("import os\nimport sys\n\n\ndef ")
    assert len(lines[lines.index("-" * 80) + 1 :]) == 10
    before, after = (float(bits) for bits in re.findall(r"(\d+\.\d+) bits per byte", result.stdout))
    # Fresh weights are near even over 512 tokens, 9 bits; seconds of training find the common bytes.
    assert 8.5 < before < 10.5
    assert after < before - 0.5

    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "model", "tensorboard"]
    assert not stale.exists()
    assert load_model(tmp_path / "model").config.num_mtp == 1
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert [record.step for record in steps] == list(range(1, len(steps) + 1))
    assert steps[0].values.keys() == {"loss", "mtp_loss", "max_vio", "tokens_per_s"}


def test_nano_refuses_a_time_that_is_none(tmp_path: Path) -> None:
    for seconds in ("0", "inf"):
        result = run_nano(f"--seconds={seconds}", "--run-dir", str(tmp_path / "run"))
        assert result.returncode == 2
        assert "give a finite time of at least 1" in result.stderr
    assert not (tmp_path / "run").exists()
