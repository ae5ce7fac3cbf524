"""The README shows nothing that does not run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from m2forge import cli
from m2forge.model.build import build
from m2forge.model.checkpoint import load_model, save_model
from m2forge.model.preset import preset

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_the_python_runs() -> None:
    (program,) = code_blocks("python")
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    # One prompt of 100 tokens and four answers of 20; in rows the prompt would stand four times.
    assert result.stdout == "180 tokens computed, 300 saved\n"


def test_the_commands_run_after_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(build(preset("m2-nano")), Path("runs/demo/rl/model"))
    (block,) = code_blocks("console")
    for line in block.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        assert program == "m2forge"
        status, printed = cli.main(arguments), capsys.readouterr()
        assert status == 0, printed.err
        assert all(figure in printed.out for figure in re.findall(r"\d+\.\d+B", line))
    assert load_model(Path("runs/bf16")).embedding.weight.dtype.itemsize == 2


def test_links_lead_to_files() -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in target]
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
