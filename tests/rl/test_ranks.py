"""A policy trained by several ranks: the steps of one process, each unit once, whatever dies."""

import errno
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select

from m2forge.cluster.launcher import FATAL_STATUS
from m2forge.errors import ConfigError
from m2forge.model.checkpoint import load_model
from m2forge.model.transformer import Transformer
from m2forge.observe.metrics import read_metrics
from m2forge.pool.pool import Pool
from m2forge.pool.tables import unit_table
from m2forge.rl.config import RLConfig
from m2forge.rl.importance_ratio import read_ratios
from m2forge.rl.layout import Layout
from m2forge.rl.ranks import deal, log_path, num_ranks, run_ranks
from m2forge.rl.trainer import Trainer
from m2forge.train.config import MachineConfig, MeshConfig
from m2forge.train.parallel import ProcessRanks
from m2forge.weights.store import Share
from tests.rl.scene import fill_pool, make_config, make_model
from tests.train import processes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("scene"))


def on_mesh(model: Path, **mesh: int) -> RLConfig:
    train = {"checkpoint": {"every_steps": 2}, "machine": {"num_threads": 1, "mesh": mesh}}
    return make_config(model, num_steps=3, train=train)


def fill(config: RLConfig, run_dir: Path) -> None:
    with Pool(Layout(run_dir).pool(config.pool), load_model(Path(config.model)).config.vocab_size) as pool:
        fill_pool(pool, 6, 2)


def steps_of_units(config: RLConfig, run_dir: Path) -> list[int | None]:
    with (
        Pool(Layout(run_dir).pool(config.pool), load_model(Path(config.model)).config.vocab_size) as pool,
        pool.database.read() as connection,
    ):
        return sorted(row.step for row in connection.execute(select(unit_table.c.step)))


def work(ranks: ProcessRanks, run_dir: Path, config: RLConfig, dies_after: int | None) -> None:
    trainer = Trainer(run_dir, config, ranks)
    if dies_after is not None:
        step = trainer._step

        def take_step(*arguments: object) -> object:
            if trainer.position.step == dies_after:
                raise KeyboardInterrupt
            return step(*arguments)  # type: ignore[arg-type]

        trainer._step = take_step  # type: ignore[method-assign,assignment]
    trainer.run()


def fail_to_publish(ranks: ProcessRanks, run_dir: Path, config: RLConfig, step: int) -> None:
    trainer = Trainer(run_dir, config, ranks)
    publish = trainer.weights.publish

    def publish_until(model: Transformer, now: int, share: Share | None, send: object) -> Path:
        if now == step and not ranks.rank:
            raise OSError(errno.ENOSPC, "no space left on the device")
        return publish(model, now, share, send)  # type: ignore[arg-type]

    trainer.weights.publish = publish_until  # type: ignore[method-assign,assignment]
    trainer.run()


@pytest.mark.parametrize("step", [1, 2])  # the next batch is ready, or a checkpoint is due
def test_a_version_that_rank_0_cannot_write_ends_all_ranks(model: Path, tmp_path: Path, step: int) -> None:
    """The others wait for its part, and would answer no collective."""
    config, run_dir = on_mesh(model, replicate=2), tmp_path / "run"
    fill(config, run_dir)
    with pytest.raises(AssertionError, match="no space left"):
        processes.run_ranks(partial(fail_to_publish, run_dir=run_dir, config=config, step=step), tmp_path / "ranks")
    newest = Layout(run_dir).weight_store(config).newest()
    assert newest is not None
    assert newest[0].step == step - 1


def largest_difference(one: Path, other: Path) -> float:
    ours, theirs = load_model(one).state_dict(), load_model(other).state_dict()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


@pytest.mark.parametrize("mesh", [{"replicate": 2}, {"shard": 2, "expert": 2}, {"context": 2}])
def test_two_ranks_train_as_one_process_does_and_resume(model: Path, tmp_path: Path, mesh: dict[str, int]) -> None:
    alone = make_config(model, num_steps=3, train=on_mesh(model).train.model_dump())
    fill(alone, tmp_path / "one")
    Trainer(tmp_path / "one", alone).run()
    config, run_dir = on_mesh(model, **mesh), tmp_path / "two"
    fill(config, run_dir)
    # They die in the third step, which the newest checkpoint, of the second, lacks; then they resume.
    with pytest.raises(AssertionError, match="KeyboardInterrupt"):
        processes.run_ranks(partial(work, run_dir=run_dir, config=config, dies_after=2), tmp_path / "died")
    assert Layout(run_dir).weight_store(config).newest()[0].step == 2  # type: ignore[index]
    processes.run_ranks(partial(work, run_dir=run_dir, config=config, dies_after=None), tmp_path / "resumed")
    assert steps_of_units(config, run_dir) == [1, 1, 2, 2, 3, 3]
    found, expected = (read_metrics(folder / "metrics.jsonl") for folder in (run_dir, tmp_path / "one"))
    assert [step.step for step in found] == [1, 2, 3]
    for ours, theirs in zip(found, expected, strict=True):
        # Float32, in other sums.
        names = ("loss", "tokens_computed", "num_edges", "num_units", "reward", "grad_norm")
        assert [ours.values[name] for name in names] == pytest.approx([theirs.values[name] for name in names], rel=1e-4)
    assert largest_difference(Layout(run_dir).model, Layout(tmp_path / "one").model) < 1e-5
    newest = Layout(run_dir).weight_store(config).newest()
    assert newest is not None
    assert largest_difference(newest[1], Layout(run_dir).model) == 0
    assert {path.name[:14] for path in newest[1].glob("*.safetensors")} == {"model-rank0000"}
    assert len(list(newest[1].glob("*.safetensors"))) == 2, "each rank has written its share"
    # Rank 0 has the ratios of both ranks' samples.
    ratios, whole = (read_ratios(Layout(folder).ratios, 3) for folder in (run_dir, tmp_path / "one"))
    assert ratios is not None
    assert whole is not None
    assert ratios.keys() == whole.keys()


@given(
    costs=st.lists(st.floats(0, 1e12), max_size=30),
    number=st.integers(1, 8),
)
def test_trees_are_dealt_once_and_evenly(costs: list[float], number: int) -> None:
    dealt = deal(costs, number)
    assert len(dealt) == number
    assert sorted(index for indices in dealt for index in indices) == list(range(len(costs)))
    loads = [sum(costs[index] for index in indices) for indices in dealt]
    assert max(loads) - min(loads) <= max(costs, default=0.0) * (1 + 1e-9)


RANK = """
import os, pathlib, sys, time
rank = int(os.environ["RANK"])
assert os.environ["WORLD_SIZE"] == "2" and os.environ["MASTER_ADDR"] == "127.0.0.1"
print("rank", rank, flush=True)
if rank == int(sys.argv[2]):
    print("because", file=sys.stderr, flush=True)
    sys.exit(int(sys.argv[3]))
if sys.argv[2] != "-1":
    time.sleep(60)
    pathlib.Path(sys.argv[1], "outlived").touch()
"""


@pytest.mark.parametrize(("failing", "status"), [(-1, 0), (0, 3), (1, 3), (1, FATAL_STATUS)])
def test_a_rank_that_fails_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], failing: int, status: int
) -> None:
    (tmp_path / "rank_program.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    command = ("rank_program", str(tmp_path), str(failing), str(status))
    assert run_ranks(command, 2, tmp_path / "log") == status
    assert not (tmp_path / "outlived").exists()
    out, err = capfd.readouterr()
    assert "rank 1" not in out
    assert "rank 1" in log_path(tmp_path / "log", 1).read_text() or failing == 0
    # The loop ends the run with the last line of the trainer's log.
    assert err.endswith("because\n") == (failing == 0 or status == FATAL_STATUS)


def test_a_mesh_of_unknown_size_is_refused_on_a_cpu() -> None:
    machine = MachineConfig(device="cpu", mesh=MeshConfig(shard="auto"))
    with pytest.raises(ConfigError, match='"auto" counts GPUs, and this run trains on a CPU; give a number'):
        num_ranks(machine)
    assert num_ranks(MachineConfig(device="cpu", mesh=MeshConfig(replicate=2, shard=2))) == 4
