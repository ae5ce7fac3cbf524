"""The stage under torchrun: two processes train what one would.

One mode runs under torchrun itself. The other has its variables and is forked: torchrun and its processes take seconds
to import torch.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from m2forge import cli
from m2forge.config import dump
from m2forge.model.checkpoint import load_model
from m2forge.observe.metrics import read_metrics
from m2forge.pretrain.config import PretrainConfig
from m2forge.pretrain.stage import run_pretrain
from m2forge.train.config import MeshConfig
from tests.forked import start
from tests.pretrain.small import make_config, write_corpus

LIMIT_S = 300
TOLERANCE = 1e-5
"""Relative: float32 sums in another order, over a dozen steps."""


def losses(run_dir: Path) -> list[float]:
    return [step.values["loss"] for step in read_metrics(run_dir / "metrics.jsonl")]


def under_torchrun(arguments: list[str]) -> None:
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "m2forge")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *torchrun, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def forked(arguments: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    processes = [start(run_rank, rank, port, arguments) for rank in range(2)]
    for process in processes:
        process.join(LIMIT_S)
    assert [process.exitcode for process in processes] == [0, 0]


def run_rank(rank: int, port: int, arguments: list[str]) -> None:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    sys.exit(cli.main(arguments))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PretrainConfig]:
    """The runs of one process, and their configuration."""
    runs = tmp_path_factory.mktemp("alone")
    config = make_config(write_corpus(runs / "corpus"))
    # FSDP adds no modules.
    config = config.model_copy(update={"name": "alone", "phases": config.phases[:2]})
    run_pretrain(config, runs)
    return runs, config


@pytest.mark.parametrize(
    ("name", "mesh", "start_both"),
    [
        ("replicate", MeshConfig(replicate=2), forked),
        ("context", MeshConfig(context=2, expert=2), under_torchrun),
        pytest.param("compiled", MeshConfig(shard=2), under_torchrun, marks=pytest.mark.long),
    ],
)
def test_two_processes_train_what_one_would(
    name: str,
    mesh: MeshConfig,
    start_both: Callable[[list[str]], None],
    alone: tuple[Path, PretrainConfig],
    tmp_path: Path,
) -> None:
    expected, config = alone
    compiling = "always" if name == "compiled" else "auto"
    machine = config.train.machine.model_copy(update={"mesh": mesh, "compile_blocks": compiling})
    train = config.train.model_copy(update={"machine": machine})
    config = config.model_copy(update={"name": name, "train": train})
    (tmp_path / "config.toml").write_text(dump(config))
    start_both(["pretrain", str(tmp_path / "config.toml"), "--runs", str(tmp_path)])
    assert losses(tmp_path / name) == pytest.approx(losses(expected / "alone"), rel=TOLERANCE)
    model = load_model(tmp_path / name / "model").state_dict()
    for weight, tensor in load_model(expected / "alone" / "model").state_dict().items():
        torch.testing.assert_close(model[weight], tensor, rtol=1e-3, atol=1e-4)
