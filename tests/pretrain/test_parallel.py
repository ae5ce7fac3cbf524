"""The stage under torchrun: two processes train what one would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from m2forge.config import dump
from m2forge.observe.metrics import read_metrics
from m2forge.pretrain.config import PretrainConfig
from m2forge.pretrain.stage import run_pretrain
from tests.pretrain.small import make_config, write_corpus

TOLERANCE = 1e-5
"""Relative: float32 sums in another order, over a dozen steps."""


def losses(run_dir: Path) -> list[float]:
    return [step.values["loss"] for step in read_metrics(run_dir / "metrics.jsonl")]


def under_torchrun(config: PretrainConfig, folder: Path) -> None:
    path = folder / f"{config.name}.toml"
    path.write_text(dump(config))
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "m2forge")
    command = [sys.executable, "-m", *torchrun, "pretrain", str(path), "--runs", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("parallel", ["data", "fsdp"])
def test_two_processes_train_what_one_would(parallel: str, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    alone = make_config(corpus)
    # FSDP adds no modules.
    alone = alone.model_copy(update={"name": "alone", "phases": alone.phases[:2]})
    run_pretrain(alone, tmp_path)
    machine = alone.train.machine.model_copy(update={"parallel": parallel})
    train = alone.train.model_copy(update={"machine": machine})
    under_torchrun(alone.model_copy(update={"name": parallel, "train": train}), tmp_path)
    assert losses(tmp_path / parallel) == pytest.approx(losses(tmp_path / "alone"), rel=TOLERANCE)
    assert (tmp_path / parallel / "model").is_dir()
