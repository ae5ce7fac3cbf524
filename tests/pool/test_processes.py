"""Several processes on one pool, and processes that are killed, on both databases."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import cast

from sqlalchemy import func, select

from m2forge.pool.config import PoolConfig
from m2forge.pool.pool import Pool
from m2forge.pool.tables import batch_table, call_table, episode_table, queue_table, unit_table
from tests.forked import forked_context
from tests.forked import start as forked_start
from tests.pool.scene import VOCAB_SIZE, task, version, windowed
from tests.pool.worker import grab, run

NUM_KILLS = 50 if os.environ.get("M2FORGE_LONG") == "1" else 5
NUM_GROUPS = 10 * NUM_KILLS
ENDED = ("finished", "training", "trained")


@dataclass(frozen=True, slots=True)
class Worker:
    process: ForkServerProcess
    output: Connection

    def receive(self) -> object:
        assert self.output.poll(300)
        return self.output.recv()

    def wait(self) -> None:
        """Waits until the process has ended by itself, without an error."""
        self.process.join(300)
        assert self.process.exitcode == 0
        self.output.close()


def start(work: Callable[..., None], *arguments: object) -> Worker:
    ours, theirs = forked_context().Pipe(duplex=False)
    worker = Worker(forked_start(work, theirs, *arguments), ours)
    theirs.close()
    return worker


def test_a_loop_killed_anywhere_loses_and_repeats_nothing(config: PoolConfig, tmp_path: Path) -> None:
    config = windowed(config, queue=8, window=0.5)
    moments = random.Random(0)
    for _ in range(NUM_KILLS):
        worker = start(run, config, tmp_path, NUM_GROUPS)
        assert worker.receive() == "ready"
        time.sleep(moments.uniform(0.0, 0.4))
        worker.process.kill()
        worker.process.join()
        assert worker.process.exitcode == -signal.SIGKILL, "the run must be long enough to be killed"
        worker.output.close()
        with Pool(config, VOCAB_SIZE) as pool:
            check(pool)
            counts = pool.counts()
            assert counts["failed"] == counts["dropped"] == 0
    worker = start(run, config, tmp_path, NUM_GROUPS)
    assert [worker.receive(), worker.receive()] == ["ready", "done"]
    worker.wait()
    learnt = json.loads((tmp_path / "weights.json").read_text())
    with Pool(config, VOCAB_SIZE) as pool:
        check(pool)
        with pool.database.read() as connection:
            units = list(connection.execute(select(unit_table.c.id)).scalars())
        assert sorted(learnt) == sorted(units), "each unit once in the lineage of the weights"
        assert len(units) == NUM_GROUPS
        assert pool.counts()["trained"] == 2 * NUM_GROUPS


def check(pool: Pool) -> None:
    """No state is half-written: what one table says, the others say too."""
    with pool.database.read() as connection:
        queue = connection.execute(select(queue_table)).one()
        units = connection.execute(select(unit_table)).all()
        episodes = connection.execute(select(episode_table)).all()
        batches = connection.execute(select(batch_table)).all()
        stored = connection.execute(
            select(call_table.c.episode, call_table.c.attempt, func.count(), func.max(call_table.c.ordinal)).group_by(
                call_table.c.episode, call_table.c.attempt
            )
        ).all()
    calls = {(episode, attempt): (number, last + 1) for episode, attempt, number, last in stored}
    for episode in episodes:
        number, last = calls.pop((episode.id, episode.attempt), (0, 0))
        assert number == last == episode.num_calls
    assert calls == {}, "calls of attempts that are over"
    assert sorted(unit.place for unit in units) == list(range(queue.next_place)), "positions without gaps"
    for unit in units:
        own = [episode for episode in episodes if episode.unit == unit.id]
        assert len(own) == unit.size
        assert unit.num_unfinished == sum(episode.state not in ENDED for episode in own)
        assert unit.num_unrewarded == sum(episode.reward is None for episode in own)
        assert unit.is_queued == (unit.state in ("open", "ready"))
        if unit.state != "open":
            expected = {"ready": "finished"}.get(unit.state, unit.state)
            assert {episode.state for episode in own} == {expected}
        if unit.state == "trained":
            assert (unit.lineage, unit.step) in {(batch.lineage, batch.step) for batch in batches}
    for batch in batches:
        own_units = [unit for unit in units if unit.batch == batch.id]
        is_alive = batch.is_open or batch.lineage is not None
        assert len(own_units) == (batch.num_units if is_alive else 0)
        assert {unit.state for unit in own_units} <= {"training" if batch.is_open else "trained"}
    assert queue.num_taken == sum(unit.state in ("training", "trained") for unit in units)


def test_processes_that_want_the_same_get_different_ones(config: PoolConfig, tmp_path: Path) -> None:
    config = windowed(config, queue=40, window=40)
    with Pool(config, VOCAB_SIZE) as pool:
        pool.put([(task(n), 2) for n in range(40)])
        workers = [start(grab, config, tmp_path, f"worker{n}") for n in range(3)]
        assert [worker.receive() for worker in workers] == ["ready"] * 3
        (tmp_path / "go").touch()
        got = [cast("dict[str, list[int]]", worker.receive()) for worker in workers]
        for worker in workers:
            worker.wait()
        check(pool)
        assert sorted(episode for one in got for episode in one["episodes"]) == list(range(1, 81))
        assert sorted(unit for one in got for unit in one["units"]) == list(range(1, 41))
        assert all(one["episodes"] for one in got), "all of them were at work"
        assert pool.claim(1, version(0)) is None


def test_processes_that_open_a_pool_at_once_make_one(config: PoolConfig, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    workers = [start(grab, config, tmp_path, "w") for _ in range(2)]
    for worker in workers:
        assert [worker.receive(), worker.receive()] == ["ready", {"episodes": [], "units": []}]
        worker.wait()
