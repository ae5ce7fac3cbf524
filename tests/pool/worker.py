"""A process that works on a pool until it is done or killed.

    run     all of a loop: submits, plays, trains, checkpoints
    grab    takes what it can get, and reports what it got

It sends `ready` once it has opened the pool, and its result when it is done.

The weights of this loop are the list of the units that they have learnt; FOLDER holds their newest checkpoint. A unit
that is to be learnt a second time is an error, so when a run is done the list tells whether each was learnt once.
"""

import json
import time
from multiprocessing.connection import Connection
from pathlib import Path

from m2forge.files import write_atomic
from m2forge.pool.config import PoolConfig
from m2forge.pool.pool import Pool
from tests.pool.scene import VOCAB_SIZE, play, task, version

WORKER = "loop"
STEPS_PER_CHECKPOINT = 3
BATCH = 2


def run(output: Connection, config: PoolConfig, folder: Path, num_groups: int) -> None:
    with Pool(config, VOCAB_SIZE) as pool:
        _loop(output, pool, folder, num_groups)
        output.send("done")


def _loop(output: Connection, pool: Pool, folder: Path, num_groups: int) -> None:
    checkpoint = folder / "weights.json"
    learnt: list[int] = json.loads(checkpoint.read_text()) if checkpoint.exists() else []
    step = len(learnt) // BATCH
    pool.release(WORKER)
    pool.restore(version(step))
    output.send("ready")
    while len(learnt) < num_groups:
        num_put = num_submitted(pool)
        pool.put([(task(n), 2) for n in range(num_put, min(num_groups, num_put + pool.room()))])
        for lease in pool.lease(WORKER, 3):
            play(pool, lease, float(lease.episode % 2), num_calls=3, step=step)
        claimed = pool.claim(BATCH, version(step))
        if claimed is None:
            continue
        units = pool.fetch(claimed)
        assert all(len(episode.tree().samples) == 3 for unit in units for episode in unit.episodes)
        assert not set(claimed.units) & set(learnt), "a unit is trained twice"
        learnt += claimed.units
        step += 1
        # A step takes its time, and most kills hit one.
        time.sleep(0.03)
        pool.commit(claimed, version(step))
        if step % STEPS_PER_CHECKPOINT == 0 or len(learnt) == num_groups:
            write_atomic(checkpoint, json.dumps(learnt))
            pool.mark_durable(version(step))


def num_submitted(pool: Pool) -> int:
    return pool.tally().total("submitted")


def grab(output: Connection, config: PoolConfig, folder: Path, name: str) -> None:
    """Episodes one at a time, then batches, both beside other processes that want the same."""
    with Pool(config, VOCAB_SIZE) as pool:
        output.send(_grab(output, pool, folder, name))


def _grab(output: Connection, pool: Pool, folder: Path, name: str) -> dict[str, list[int]]:
    output.send("ready")
    while not (folder / "go").exists():
        time.sleep(0.005)
    leases = []
    while found := pool.lease(name, 1):
        leases += found
        play(pool, found[0], float(found[0].episode % 2), num_calls=1)
        # SQLite's lock goes to whoever asks at the right moment; nobody works on without a break.
        time.sleep(0.02)
    while pool.counts()["running"]:
        time.sleep(0.005)
    units: list[int] = []
    while claimed := pool.claim(2, version(0)):
        units += claimed.units
    return {"episodes": [lease.episode for lease in leases], "units": units}
