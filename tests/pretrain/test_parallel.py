"""The stage under torchrun: two processes train what one would.

Some modes run under torchrun itself, one of them under two, as on two nodes. The others have its variables and are
forked: torchrun and its processes take seconds to import torch.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from m2forge import cli
from m2forge.config import dump
from m2forge.model.checkpoint import load_model
from m2forge.observe.metrics import read_metrics
from m2forge.pretrain.config import PretrainConfig
from m2forge.pretrain.stage import run_pretrain
from m2forge.train import machine
from m2forge.train.config import MachineConfig, MeshConfig
from tests.forked import start
from tests.pretrain.small import make_config, write_corpus

LIMIT_S = 600
TOLERANCE = 1e-5
"""Relative: float32 sums in another order, over a dozen steps."""


def losses(run_dir: Path) -> list[float]:
    return [step.values["loss"] for step in read_metrics(run_dir / "metrics.jsonl")]


def under_torchrun(arguments: list[str]) -> None:
    run_torchruns([["--standalone", "--nproc-per-node", "2"]], arguments)


def on_two_nodes(arguments: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    both = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    run_torchruns([[*both, "--node-rank", str(index)] for index in range(2)], arguments)


def run_torchruns(options: Sequence[list[str]], arguments: list[str]) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    module = ("-m", "m2forge", *arguments)
    torchruns = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *mine, *module],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for mine in options
    ]
    try:
        said = [torchrun.communicate(timeout=LIMIT_S)[0] for torchrun in torchruns]
    finally:
        for torchrun in torchruns:
            torchrun.kill()
    assert [torchrun.returncode for torchrun in torchruns] == [0] * len(options), "".join(text[-3000:] for text in said)


def forked(arguments: list[str]) -> None:
    assert start_ranks([arguments, arguments]) == [0, 0]


def start_ranks(arguments: Sequence[list[str]], log: Path | None = None, other: str | None = None) -> list[int | None]:
    """The exit status of each rank, whose standard error goes into the folder `log`. `other`: what the last one has in
    another way."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    last = len(arguments) - 1
    processes = [
        start(run_rank, rank, port, mine, log, other if rank == last else None) for rank, mine in enumerate(arguments)
    ]
    for process in processes:
        process.join(LIMIT_S)
    return [process.exitcode for process in processes]


def run_rank(rank: int, port: int, arguments: list[str], log: Path | None, other: str | None) -> None:
    if log is not None:
        os.dup2(os.open(log / f"{rank}.log", os.O_WRONLY | os.O_CREAT), 2)
    machine.APPEARS_S = 1.0
    if other is not None:
        setattr(machine, other, lambda *_: "another")
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
    config = config.model_copy(update={"name": "alone"})
    run_pretrain(config, runs)
    return runs, config


@pytest.mark.parametrize(
    ("name", "mesh", "start_both"),
    [
        ("replicate", MeshConfig(replicate=2), forked),
        ("context", MeshConfig(context=2, expert=2), on_two_nodes),
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
    changed = config.train.machine.model_copy(update={"mesh": mesh, "compile_blocks": compiling})
    train = config.train.model_copy(update={"machine": changed})
    config = config.model_copy(update={"name": name, "train": train})
    (tmp_path / "config.toml").write_text(dump(config))
    start_both(["pretrain", str(tmp_path / "config.toml"), "--runs", str(tmp_path)])
    assert losses(tmp_path / name) == pytest.approx(losses(expected / "alone"), rel=TOLERANCE)
    model = load_model(tmp_path / name / "model").state_dict()
    for weight, tensor in load_model(expected / "alone" / "model").state_dict().items():
        torch.testing.assert_close(model[weight], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "other", "problem"),
    [
        ({"--runs": "other/runs"}, None, "put runs on a shared file system"),
        ({"--set": "phases.0.lr.start=0.5"}, None, "phases.0.lr.start = 0.5, and that of {host} 0.003"),
        ({}, "code_digest", "other code there than on {host}; install the same version on all nodes"),
        ({}, "gpu_name", "trains on another, and {host} on its CPU; start the run on nodes of one kind"),
    ],
)
def test_nodes_that_cannot_train_together_are_refused(
    options: dict[str, str], other: str | None, problem: str, tmp_path: Path
) -> None:
    """Two processes with other options stand for two nodes."""
    config = make_config(write_corpus(tmp_path / "corpus"))
    train = config.train.model_copy(update={"machine": MachineConfig(device="cpu", mesh=MeshConfig(replicate=2))})
    (tmp_path / "config.toml").write_text(dump(config.model_copy(update={"train": train})))
    (tmp_path / "log").mkdir()
    before = sorted(tmp_path.rglob("*"))
    arguments = {"--runs": "deep/runs"}
    commands = [
        ["pretrain", str(tmp_path / "config.toml"), *(word for pair in given.items() for word in pair)]
        for given in (arguments, arguments | options)
    ]
    for command in commands:
        at = command.index("--runs") + 1
        command[at] = str(tmp_path / command[at])
    assert start_ranks(commands, tmp_path / "log", other) == [2, 2]
    said = [(tmp_path / "log" / f"{rank}.log").read_text().splitlines() for rank in range(2)]
    assert said[0] == said[1]
    (line,) = said[0]
    host = socket.gethostname()
    assert line.startswith(f"m2forge: error: node {host} (rank 1): ")
    assert problem.format(host=host) in line
    assert sorted(path for path in tmp_path.rglob("*") if path.suffix != ".log") == before
