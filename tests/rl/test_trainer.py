"""The trainer: every unit once in the lineage of the weights, whenever it is killed."""

import errno
import itertools
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sqlalchemy import func, select

from m2forge.config import write_resolved
from m2forge.model.checkpoint import load_model
from m2forge.model.lora import is_adapter_folder
from m2forge.model.transformer import Transformer
from m2forge.observe.busy import FOLDER_VARIABLE, read_busy
from m2forge.observe.metrics import read_metrics
from m2forge.pool.batch import Claim
from m2forge.pool.lifecycle import StateError
from m2forge.pool.pool import Pool
from m2forge.pool.tables import episode_table, unit_table
from m2forge.records import PolicyVersion
from m2forge.rl.config import RLConfig
from m2forge.rl.layout import Layout
from m2forge.rl.loop import Loop, is_trained
from m2forge.rl.trainer import Trainer, train
from m2forge.train.checkpoint import CheckpointStore
from m2forge.train.engine import TrainEngine
from m2forge.train.loss.policy import PolicyLoss, policy_loss
from m2forge.train.position import Position
from m2forge.train.run_dir import CONFIG_FILE
from tests.forked import start
from tests.rl.scene import fill_pool, make_config, make_model
from tests.train.walk_step import walks_counted


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("scene"))


def open_pool(config: RLConfig, run_dir: Path) -> Pool:
    vocab_size = load_model(Path(config.model)).config.vocab_size
    return Pool(Layout(run_dir).pool(config.pool), vocab_size)


def learnt(pool: Pool) -> dict[int, int | None]:
    """The step that learnt each unit."""
    with pool.database.read() as connection:
        return {row.id: row.step for row in connection.execute(select(unit_table.c.id, unit_table.c.step))}


def same_weights(one: Path, other: Path) -> bool:
    ours, theirs = load_model(one).state_dict(), load_model(other).state_dict()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_it_learns_all_that_is_there_and_publishes_every_step(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "busy"))
    config = make_config(model)
    with open_pool(config, tmp_path) as pool:
        fill_pool(pool, 8, 2)
        trainer = Trainer(tmp_path, config)
        trainer.run()
        assert sorted(learnt(pool).values(), key=str) == [1, 1, 2, 2, 3, 3, 4, 4]
    layout = Layout(tmp_path)
    newest = layout.weight_store(config).newest()
    assert newest is not None
    assert newest[0] == PolicyVersion("run", 4, trainer.weights.branch)
    assert same_weights(newest[1], layout.model)
    assert not same_weights(model, layout.model)
    assert len(read_busy(tmp_path / "busy", "trainer")) == 4
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert all(step.values["perf"] == 0.5 and step.values["staleness"] == step.step - 1 for step in steps)


def test_a_version_is_published_beside_the_next_batch(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its update: the version has the weights of its step."""
    config, steps_run, equal = make_config(model, num_steps=3), threading.Semaphore(0), dict[int, bool]()
    with open_pool(config, tmp_path) as pool:
        fill_pool(pool, 6, 2)
        trainer = Trainer(tmp_path, config)
        publish = trainer.weights.publish

        def publish_late(network: Transformer, step: int, *others: Any) -> Path:
            weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}
            if 0 < step < config.num_steps:
                assert steps_run.acquire(timeout=60), "no batch was run while this version was published"
            time.sleep(0.2)  # an update that did not wait would change what is written
            folder = publish(network, step, *others)
            found = load_model(folder).state_dict()
            equal[step] = all(torch.equal(found[name], tensor) for name, tensor in weights.items())
            return folder

        def run_step(*given: Any) -> PolicyLoss:
            if trainer.position.step:
                steps_run.release()
            return policy_loss(*given)

        monkeypatch.setattr(trainer.weights, "publish", publish_late)
        monkeypatch.setattr("m2forge.train.engine.policy_loss", run_step)
        trainer.run()
    assert equal == {0: True, 1: True, 2: True, 3: True}


def test_a_version_that_cannot_be_written_ends_the_wait(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samplers that never get the version may never fill one."""
    config, polls = make_config(model, num_steps=2), itertools.count()

    def publish(*_: object) -> Path:
        raise OSError(errno.ENOSPC, "no space left on the device")

    def poll(_: float) -> None:
        assert next(polls) < 1000, "the trainer waits for a batch although it cannot publish"
        os.sched_yield()

    with open_pool(config, tmp_path) as pool:
        fill_pool(pool, 2, 2)
        trainer = Trainer(tmp_path, config)
        learn = trainer._learn

        def learn_once(*given: Any) -> dict[str, float]:
            monkeypatch.setattr(trainer.weights, "publish", publish)
            monkeypatch.setattr("m2forge.rl.trainer.time", SimpleNamespace(**vars(time) | {"sleep": poll}))
            return learn(*given)

        monkeypatch.setattr(trainer, "_learn", learn_once)
        with pytest.raises(OSError, match="no space left"):
            trainer.run()


def test_the_claim_is_measured_beside_the_wait(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, claim, claims = make_config(model, num_steps=1), Pool.claim, list[Claim | None]()

    def second(pool: Pool, *args: Any) -> Claim | None:
        if not claims:
            time.sleep(0.5)
        claims.append(claim(pool, *args) if claims else None)
        return claims[-1]

    monkeypatch.setattr(Pool, "claim", second)
    with open_pool(config, tmp_path) as pool:
        fill_pool(pool, 2, 2)
        Trainer(tmp_path, config).run()
    (step,) = read_metrics(tmp_path / "metrics.jsonl")
    assert step.values["waited_s"] > 0.5 > step.values["claimed_s"] > 0


@pytest.mark.parametrize("router_bias", ["frozen", "balanced"])
def test_router_biases_stay_unless_the_run_balances_them(model: Path, tmp_path: Path, router_bias: str) -> None:
    machine = {"num_threads": 1}
    train = {"machine": machine} | ({"router_bias": router_bias} if router_bias == "balanced" else {})
    config = make_config(model, num_steps=1, train=train)
    with open_pool(config, tmp_path) as pool:
        fill_pool(pool, 2, 2)
        Trainer(tmp_path, config).run()
    before, after = (load_model(folder).state_dict() for folder in (model, Layout(tmp_path).model))
    biases = [name for name in before if name.endswith("router.bias")]
    assert biases
    assert all(torch.equal(before[name], after[name]) == (router_bias == "frozen") for name in biases)


def test_a_walk_trains_as_whole_packs_do(model: Path, tmp_path: Path) -> None:
    losses = {}
    for recompute in ("none", "walk"):
        walk = {"walk": {"segment_tokens": 4}} if recompute == "walk" else {}
        machine = {"num_threads": 1, "recompute": recompute} | walk
        config = make_config(model, num_steps=2, train={"machine": machine})
        folder = tmp_path / recompute
        with open_pool(config, folder) as pool, walks_counted() as counted:
            fill_pool(pool, 4, 2)
            Trainer(folder, config).run()
        assert (counted.num_segments > counted.num_walks > 0) == (recompute == "walk")
        losses[recompute] = [step.values["loss"] for step in read_metrics(folder / "metrics.jsonl")]
    # Float32, in other sums.
    assert losses["walk"] == pytest.approx(losses["none"], rel=1e-4)


def test_adapters_are_published_and_training_goes_on(model: Path, tmp_path: Path) -> None:
    train = {"machine": {"num_threads": 1}, "checkpoint": {"every_steps": 1}, "lora": {"rank": 2}}
    config, layout = make_config(model, num_steps=2, train=train), Layout(tmp_path)
    with open_pool(config, tmp_path) as pool:
        fill_pool(pool, 4, 2)
        stopped = Trainer(tmp_path, config)
        stopped._discard_later(pool)
        stopped._learn(pool, next(stopped._batches(pool)))
        stopped._save(pool)
        stopped.checkpoints.wait()
        stopped._end_publishing()
        first = layout.weight_store(config).newest()
        assert first is not None
        assert is_adapter_folder(first[1])
        engine = Trainer(tmp_path, config).engine
        assert engine.model.lora == config.train.lora
        state, other = stopped.engine.model.state_dict(), engine.model.state_dict()
        assert [name for name, weight in state.items() if not torch.equal(weight, other[name])] == []
        Trainer(tmp_path, config).run()
    newest = layout.weight_store(config).newest()
    assert newest is not None
    assert same_weights(newest[1], layout.model)
    before, after = load_model(model).state_dict(), load_model(layout.model).state_dict()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed
    assert all(".attention." in name for name in changed)


def test_a_run_is_trained_with_its_last_checkpoint_and_model(model: Path, tmp_path: Path) -> None:
    config, layout = make_config(model, num_steps=2), Layout(tmp_path)
    assert not is_trained(layout, config)
    with open_pool(config, tmp_path) as pool:
        fill_pool(pool, 4, 2)
        Trainer(tmp_path, config).run()
    assert is_trained(layout, config)
    # A trainer that exits with 0 before its last step: there are an older checkpoint and an older model.
    assert not is_trained(layout, config.model_copy(update={"num_steps": 3}))
    shutil.rmtree(layout.model)
    assert not is_trained(layout, config)


def test_a_step_holds_no_more_than_its_tokens(model: Path, tmp_path: Path) -> None:
    """Groups have 14 to 30 tokens, so that two or three of them fit."""
    config = make_config(model, num_steps=2, batch_tokens=60, curriculum=wide_curriculum(4))
    with open_pool(config, tmp_path) as pool:
        fill_pool(pool, 8, 2)
        with pool.database.read() as connection:
            own = episode_table.c
            query = select(own.unit, func.sum(own.num_tokens)).group_by(own.unit)
            sizes = {unit: int(size) for unit, size in connection.execute(query)}
        stopped = Trainer(tmp_path, config)
        stopped._discard_later(pool)
        stopped._learn(pool, next(stopped._batches(pool)))
        stopped._save(pool)
        stopped.checkpoints.wait()
        stopped._end_publishing()
        Trainer(tmp_path, config).run()
        steps = learnt(pool)
    for step in (1, 2):
        own_sizes = [sizes[unit] for unit, other in steps.items() if other == step]
        later = [sizes[unit] for unit, other in steps.items() if other is None or other > step]
        assert len(own_sizes) < 4
        assert sum(own_sizes) <= 60 < sum(own_sizes) + later[0]
    found = read_metrics(tmp_path / "metrics.jsonl")
    assert all(step.values["tokens_computed"] <= 60 for step in found)


def test_token_limited_batches_enter_the_next_stage_when_used_up(model: Path, tmp_path: Path) -> None:
    family = {"source": "chain", "difficulty": [1, 3]}
    domains = {"agent": {"ratio": 1.0, "context": 512, "families": [family]}}
    stages = [{"name": "early", "domains": domains, "num_batches": 1}, {"name": "late", "domains": domains}]
    config = make_config(model, num_steps=3, batch_tokens=60, curriculum={"batch_groups": 2, "stages": stages})
    asked = list[tuple[int, dict[str, int]]]()

    def claim(max_tokens: int, max_units: int, version: PolicyVersion, quotas: Callable[[int], dict[str, int]]) -> Any:
        asked.append((max_units, quotas(1)))
        return SimpleNamespace(units=[0])

    pool = SimpleNamespace(batch_sizes=lambda lineage: [], claim_within=claim)
    for _ in Trainer(tmp_path, config)._batches(cast("Pool", pool)):
        pass
    assert asked == [(2, {"early/agent": 1}), (1, {"early/agent": 1}), (2, {"late/agent": 1})]


def wide_curriculum(batch_groups: int) -> dict[str, object]:
    family = {"source": "chain", "difficulty": [1, 3]}
    stage = {"name": "only", "domains": {"agent": {"ratio": 1.0, "context": 512, "families": [family]}}}
    return {"batch_groups": batch_groups, "stages": [stage]}


def test_a_trainer_that_starts_again_goes_on_from_its_checkpoint(model: Path, tmp_path: Path) -> None:
    config = make_config(model, num_steps=4)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with open_pool(config, whole) as pool:
        fill_pool(pool, 8, 2)
    Trainer(whole, config).run()
    with open_pool(config, parts) as pool:
        fill_pool(pool, 8, 2)
        stopped = Trainer(parts, config)
        stopped._discard_later(pool)
        batches = stopped._batches(pool)
        for step in range(3):
            stopped._learn(pool, next(batches))
            if step == 1:
                stopped._save(pool)
        stopped._end_publishing()
        lost = Layout(parts).weight_store(config).newest()
        assert lost is not None
        assert sum(step is not None for step in learnt(pool).values()) == 6
        # It dies here, with a batch claimed that it never commits.
        assert next(batches) is not None
        again = Trainer(parts, config)
        assert again.position.step == 2
        again.run()
        last = Layout(parts).weight_store(config).newest()
        assert last is not None
        assert last[0].branch not in ("", lost[0].branch), "another step 3 than the lost one"
        assert not lost[1].exists()
        assert sorted(learnt(pool).values(), key=str) == [1, 1, 2, 2, 3, 3, 4, 4]
    assert same_weights(Layout(parts).model, Layout(whole).model)


def test_killed_at_any_moment_it_trains_every_unit_once(model: Path, tmp_path: Path) -> None:
    config = make_config(model, num_steps=4)
    with open_pool(config, tmp_path) as pool:
        fill_pool(pool, 8, 2)
    write_resolved(config, tmp_path / CONFIG_FILE)
    rng, num_kills = random.Random(0), 0
    while True:
        process, started = start(train, tmp_path), time.monotonic()
        while process.is_alive() and num_kills < 3:
            # Anywhere between its first step and its last.
            if Layout(tmp_path).weight_store(config).newest() is not None and time.monotonic() - started > 0.05:
                time.sleep(rng.uniform(0.0, 0.4))
                process.kill()
                num_kills += 1
                break
            time.sleep(0.01)
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    with open_pool(config, tmp_path) as pool:
        assert sorted(learnt(pool).values(), key=str) == [1, 1, 2, 2, 3, 3, 4, 4]
    assert Layout(tmp_path).model.is_dir()


class Disk:
    """What a loss of power would leave of the pool: the database file, which SQLite syncs itself, and its log as it was
    when it was last synced."""

    def __init__(self, pool_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path, self._log = pool_path, pool_path.with_name(f"{pool_path.name}-wal")
        self._synced: bytes | None = None
        fsync = os.fsync

        def note(descriptor: int) -> None:
            fsync(descriptor)
            if self._log.exists() and os.path.samestat(os.fstat(descriptor), self._log.stat()):
                self._synced = self._log.read_bytes()

        monkeypatch.setattr(os, "fsync", note)

    def copy_to(self, folder: Path) -> None:
        folder.mkdir()
        shutil.copy(self._path, folder / self._path.name)
        if self._synced is not None:
            (folder / self._log.name).write_bytes(self._synced)


def test_power_loss_after_a_checkpoint_loses_no_commit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(model, num_steps=4)
    run_dir, left = tmp_path / "run", tmp_path / "left"
    with open_pool(config, run_dir) as pool:
        fill_pool(pool, 8, 2)
        disk = Disk(run_dir / "pool.db", monkeypatch)
        begin = CheckpointStore.begin

        def save_and_lose_power(store: CheckpointStore, engine: TrainEngine, position: Position) -> None:
            begin(store, engine, position)
            store.wait()
            if position.step == 2:
                disk.copy_to(left)

        monkeypatch.setattr(CheckpointStore, "begin", save_and_lose_power)
        Trainer(run_dir, config).run()
    with open_pool(config, left) as pool:
        assert pool.restore(PolicyVersion("run", 2)).num_returned == 0
        assert sorted(learnt(pool).values(), key=str) == [1, 1, 2, 2, *[None] * 4]


def test_a_pool_behind_its_checkpoint_is_refused(model: Path, tmp_path: Path) -> None:
    config = make_config(model, num_steps=2)
    with open_pool(config, tmp_path) as pool:
        fill_pool(pool, 8, 2)
    for file in tmp_path.glob("pool.db*"):
        shutil.copy(file, tmp_path / f"old-{file.name}")
    Trainer(tmp_path, config).run()
    for file in tmp_path.glob("pool.db*"):
        file.unlink()
    for file in tmp_path.glob("old-pool.db*"):
        file.rename(tmp_path / file.name.removeprefix("old-"))
    message = (
        "its last one is step 0, and the checkpoint is of step 2 of 'run'; restore the pool's database of this run"
    )
    with pytest.raises(StateError, match=message):
        Trainer(tmp_path, config).run()
    with pytest.raises(StateError, match=message):
        Loop(Layout(tmp_path), config)
