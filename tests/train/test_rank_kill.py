"""Ranks that write a checkpoint together, of which one is killed: the newest checkpoint is complete."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from m2forge.model.start import Start
from m2forge.train.checkpoint import CheckpointStore, load_start, restore
from m2forge.train.config import CheckpointConfig, MachineConfig, MeshConfig, OptimizerConfig
from m2forge.train.engine import TrainEngine
from m2forge.train.machine import load_network
from m2forge.train.parallel import SINGLE_RANK, ProcessRanks, Ranks
from m2forge.train.position import Position, read_position
from tests.conftest import LONG
from tests.forked import forked_context
from tests.train.draw import draw_pack, small_model
from tests.train.processes import TIMEOUT_S
from tests.train.test_checkpoint_kill import FILE_EVENTS

MACHINE = MachineConfig(device="cpu", mesh=MeshConfig(shard=2))
MOMENTS = [(rank, number) for rank in (0, 1) for number in range(200)] if LONG else [(0, 14), (1, 2)]
"""Which rank is killed, at which of its touches of a file."""


def trained(ranks: Ranks, num_steps: int) -> TrainEngine:
    """Both ranks train the same packs, of which each takes half; one process takes all."""
    start = Start(small_model().config)
    machine = MACHINE if isinstance(ranks, ProcessRanks) else MachineConfig(device="cpu")
    engine = TrainEngine(load_network(start, machine, torch.float64, ranks, "seed"), OptimizerConfig(), ranks=ranks)
    for step in range(num_steps):
        engine.step_rows([draw_pack(2 * step + ranks.rank, [8])], lr=1e-2)
    return engine


def save(folder: Path, rank: int, victim: int, number: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    ranks, left = ProcessRanks(torch.device("cpu")), [number]
    store = CheckpointStore(folder / "checkpoints", CheckpointConfig())
    engines = [trained(ranks, num_steps) for num_steps in (1, 2)]
    store.save(engines[0], Position(step=1))

    def count_down(event: str, _: tuple[object, ...]) -> None:
        if event in FILE_EVENTS:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    ranks.max_int(0)
    if rank == victim:
        sys.addaudithook(count_down)
    store.save(engines[1], Position(step=2))
    # The other has the answer too.
    ranks.max_int(0)
    os._exit(0)


def dies(folder: Path, victim: int, number: int) -> bool:
    """Save twice, one rank dying in the second; whether it came to that."""
    folder.mkdir()
    context = forked_context()
    processes = [context.Process(target=save, args=(folder, rank, victim, number)) for rank in (0, 1)]
    try:
        for process in processes:
            process.start()
        processes[victim].join(TIMEOUT_S)
        code = processes[victim].exitcode
        assert code in (0, -signal.SIGKILL)
        return code != 0
    finally:
        for process in processes:
            process.kill()
            process.join()


def content(folder: Path) -> dict[str, torch.Tensor]:
    model = load_start(folder).build(torch.device("cpu"), torch.float64)
    engine = TrainEngine(model, OptimizerConfig())
    restore(engine, folder)
    return dict(model.state_dict()) | {name: rows.tensor for name, rows in engine.optimizer.held().items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of ranks that are not killed."""
    folder = tmp_path_factory.mktemp("whole") / "ranks"
    assert not dies(folder, 0, 1_000_000)
    return folder / "checkpoints"


def test_the_newest_is_complete_whichever_rank_is_killed(whole: Path, tmp_path: Path) -> None:
    newest, survived = set(), set()
    for victim, number in MOMENTS:
        if victim in survived:
            continue
        folder = tmp_path / f"{victim}-{number}"
        if not dies(folder, victim, number):
            survived.add(victim)
        store = CheckpointStore(folder / "checkpoints", CheckpointConfig())
        found = store.newest()
        assert found is not None
        newest.add(read_position(found).step)
        ours, theirs = content(found), content(whole / found.name)
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
        # One process goes on, and leaves nothing of the torn one.
        store.save(trained(SINGLE_RANK, 3), Position(step=3))
        store.save(trained(SINGLE_RANK, 4), Position(step=4))
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000003", "step-00000004"]
        shutil.rmtree(folder)
    assert 1 in newest
    assert not LONG or newest == {1, 2}
