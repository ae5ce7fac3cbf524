"""The examples run as a reader would run them."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from m2forge.errors import ConfigError
from m2forge.model.checkpoint import load_model
from m2forge.observe.metrics import read_metrics

ROOT = Path(__file__).parent.parent


def run(example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / example), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_agent_goes_from_text_to_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A part of the standard library's text: every stage reads it as it reads the whole.
    stdlib, text = Path(sysconfig.get_path("stdlib")), tmp_path / "text"
    text.mkdir()
    for path in stdlib.glob("[a-d]*.py"):
        shutil.copy(path, text)
    # In this process: another would spend seconds on its imports.
    arguments = ["--scale", "0.005", "--runs", str(tmp_path), "--text", str(text)]
    monkeypatch.setattr(sys, "argv", ["agent.py", *arguments])
    runpy.run_path(str(ROOT / "examples" / "agent.py"), run_name="__main__")
    assert re.search(r"^calls +\d+\.\d% of 2 held-out requests", capsys.readouterr().out, re.MULTILINE)
    assert json.loads((tmp_path / "summary.json").read_text())["seconds"].keys() == {
        "corpus",
        "pretrain",
        "data",
        "sft",
        "eval",
    }
    model = load_model(tmp_path / "nano-agent" / "model")
    assert model.config.num_mtp == 3
    assert model.config.max_context == 1024
    steps = read_metrics(tmp_path / "nano" / "metrics.jsonl")
    assert steps[-1].values["loss"] < steps[0].values["loss"]


@pytest.mark.parametrize("scale", ["0", "nan", "1000"])
def test_the_agent_refuses_a_scale_that_is_none(
    scale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["agent.py", f"--scale={scale}", "--runs", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / "agent.py"), run_name="__main__")
    assert ended.value.code == 2
    assert "give a number above 0, at most 100" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "checks.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_the_demo_closes_the_ring(tmp_path: Path) -> None:
    """Too small to learn anything; `make demo` at its own size does."""
    result = run("demo.py", "--scale", "0.03", "--runs", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert re.search(r"^before +\d+\.\d% of 14 held-out tasks", result.stdout, re.MULTILINE)
    assert re.search(r"^after +\d+\.\d% after 1 steps of CISPO", result.stdout, re.MULTILINE)
    report = (tmp_path / "report.html").read_text()
    assert "Before and after" in report
    assert re.search(r"with a wrong answer: \d+% of replies, \d+% of raises, \d+% of joins", report)
    assert all(result["by_level"].keys() == {"replies", "raises", "joins"} for result in evaluations(tmp_path / "rl"))
    assert load_model(tmp_path / "rl" / "model").config.num_mtp == 1
    told = json.loads((tmp_path / "rl" / "summary.json").read_text())
    assert told["seconds"].keys() == {"text", "pretrain", "sft", "rl", "report"}
    assert len(read_metrics(tmp_path / "rl" / "metrics.jsonl")) == 1
    again = run("demo.py", "--scale", "0.03", "--runs", str(tmp_path), "--seed", "1")
    assert again.returncode == 1
    assert re.fullmatch(r"demo: error: .* was started with seed = 0, .*; --runs names another folder\n", again.stderr)


def test_the_demo_refuses_a_scale_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", "--scale=0", "--runs", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / "demo.py"), run_name="__main__")
    assert ended.value.code == 2
    assert "give a number above 0, at most 1" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_demo_says_what_is_wrong_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConfigError("no such text")

    monkeypatch.setattr("m2forge.corpus.build.build_corpus", fail)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--scale=0.03", "--runs", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^demo: error: no such text; --runs names another folder$"):
        runpy.run_path(str(ROOT / "examples" / "demo.py"), run_name="__main__")


def test_the_demo_ends_at_an_interrupt_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("m2forge.text.tokenizer.train_tokenizer", stop)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--smoke", "--runs", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^demo: interrupted; the same command resumes it$"):
        runpy.run_path(str(ROOT / "examples" / "demo.py"), run_name="__main__")
