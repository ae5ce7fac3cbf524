"""A process that works on a pool until it is done or killed.

    python -m tests.pool.worker run CONFIG FOLDER NUM_GROUPS     all of a loop: submits, plays, trains, checkpoints
    python -m tests.pool.worker grab CONFIG FOLDER NAME          takes what it can get, and prints what it got

The weights of this loop are the list of the units that they have learnt; FOLDER holds their newest checkpoint. A unit
that is to be learnt a second time is an error, so when a run is done the list tells whether each was learnt once.
"""

import json
import sys
import time
from pathlib import Path

from m2forge.files import write_atomic
from m2forge.pool.config import PoolConfig
from m2forge.pool.pool import Pool
from tests.pool.scene import VOCAB_SIZE, play, task, version

WORKER = "loop"
STEPS_PER_CHECKPOINT = 3
BATCH = 2


def run(pool: Pool, folder: Path, num_groups: int) -> None:
    checkpoint = folder / "weights.json"
    learnt: list[int] = json.loads(checkpoint.read_text()) if checkpoint.exists() else []
    step = len(learnt) // BATCH
    pool.release(WORKER)
    pool.restore(version(step))
    print("ready", flush=True)
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
    print("done", flush=True)


def num_submitted(pool: Pool) -> int:
    return pool.tally().total("submitted")


def grab(pool: Pool, folder: Path, name: str) -> None:
    """Episodes one at a time, then batches, both beside other processes that want the same."""
    print("ready", flush=True)
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
    print(json.dumps({"episodes": [lease.episode for lease in leases], "units": units}), flush=True)


def main(role: str, config: str, folder: str, argument: str) -> None:
    with Pool(PoolConfig.model_validate_json(config), VOCAB_SIZE) as pool:
        if role == "run":
            run(pool, Path(folder), int(argument))
        else:
            grab(pool, Path(folder), argument)


if __name__ == "__main__":
    main(*sys.argv[1:])
