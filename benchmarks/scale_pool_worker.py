"""A process of `scale.py --part pool`: opens the pool, does its work once, prints `ready`, waits for a line, works,
reports. What a process does first compiles its statements, which costs more than the statements themselves.

write     agents of one process record attempts through a PoolWriter of an agent host's niceness, in one of two ways:
          every call as it is made (`append`), or all calls with the end of the attempt (`end`), as agent hosts do
judge     rewards groups once they are complete, as the loop does
train     claims, reads and commits batches, as the trainer does; beside each it commits one row to PostgreSQL, which
          shows what the server's disk and the machine's cores leave to any transaction

python benchmarks/scale_pool_worker.py ROLE JSON
"""

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from sqlalchemy import select, text

from m2forge.pool.config import PoolConfig
from m2forge.pool.pool import HOST_NICENESS, Pool, PoolWriter
from m2forge.pool.queue import read_queue
from m2forge.pool.record import Rewarding
from m2forge.pool.stored import Lease, Outcome, StoredCall
from m2forge.pool.tables import call_table
from m2forge.records import PolicyVersion, Reward

T = TypeVar("T")
JUDGED_AT_ONCE = 16
JUDGE_S = 0.2
"""As in the loop."""
LEASED_AT_ONCE = 32
ADD_ROW = text("INSERT INTO probe VALUES (1)")


@dataclass(frozen=True)
class Work:
    config: PoolConfig
    vocab_size: int
    name: str
    seconds: float
    """How long it works at most."""
    num_agents: int = 0
    way: Literal["append", "end"] = "end"
    patterns: tuple[int, ...] = ()
    """Episodes whose stored calls the agents record again: encoding is no work of the pool's."""
    pause_s: float = 0.0
    """Mean time between two attempts of an agent, with a uniform spread; 0: each begins the next at once."""
    batch: int = 0
    every_s: float = 0.0
    """Time between the beginnings of two claims."""


def say(found: object) -> None:
    print(json.dumps(found), flush=True)


def begin() -> float:
    say("ready")
    sys.stdin.readline()
    return time.monotonic()


def summary(times_s: list[float]) -> dict[str, float]:
    if not times_s:
        return {"num": 0, "p50_ms": 0.0, "p99_ms": 0.0, "max_ms": 0.0}
    ordered = sorted(times_s)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    ms = {"p50_ms": statistics.median(ordered), "p99_ms": p99, "max_ms": ordered[-1]}
    return {"num": len(ordered), **{name: value * 1e3 for name, value in ms.items()}}


async def write(work: Work, pool: Pool) -> None:
    patterns = [read_calls(pool, episode) for episode in work.patterns]
    num_stored = 0
    times_s: list[float] = []
    leased: list[Lease] = []
    async with PoolWriter(pool, HOST_NICENESS) as writer:
        leasing = asyncio.Lock()

        async def take() -> Lease | None:
            async with leasing:
                if not leased:
                    leased.extend(await writer.run(pool.lease, work.name, LEASED_AT_ONCE))
                return leased.pop(0) if leased else None

        async def record(lease: Lease) -> None:
            nonlocal num_stored
            calls = random.choice(patterns)
            outcome, began_s = Outcome(artifacts={"answer": "42"}), time.monotonic()
            if work.way == "append":
                for call in calls:
                    began_s = time.monotonic()
                    await writer.append(lease, call)
                    times_s.append(time.monotonic() - began_s)
                    num_stored += 1
                await writer.end(lease, (), outcome)
            else:
                await writer.end(lease, calls, outcome)
                times_s.append(time.monotonic() - began_s)
                num_stored += len(calls)

        async def agent() -> None:
            while time.monotonic() < until_s:
                await asyncio.sleep(random.uniform(0.0, 2 * work.pause_s))
                if (lease := await take()) is None:
                    break
                await record(lease)

        if (lease := await take()) is not None:
            await record(lease)
        num_stored = 0
        times_s.clear()
        until_s = begin() + work.seconds
        began_s, cpu_s = time.monotonic(), time.process_time()
        await asyncio.gather(*(agent() for _ in range(work.num_agents)))
        seconds = time.monotonic() - began_s
    say({"calls": num_stored, "seconds": seconds, "cpu_s": time.process_time() - cpu_s, **summary(times_s)})


def read_calls(pool: Pool, episode: int) -> list[StoredCall]:
    call = call_table.c
    with pool.database.read() as connection:
        rows = connection.execute(select(call.ordinal, call.data).where(call.episode == episode).order_by(call.ordinal))
        return [StoredCall(row.ordinal, row.data, 500, 0) for row in rows]


def judge(work: Work, pool: Pool) -> None:
    num_units, times_s = 0, []
    pool.unjudged(JUDGED_AT_ONCE)
    until_s, spent_s = begin() + work.seconds, time.process_time()
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        complete = pool.unjudged(JUDGED_AT_ONCE)
        times_s.append(time.monotonic() - began_s)
        for _, leases in complete:
            rewards = [rewarding(lease, float(place % 2), lease.num_calls) for place, lease in enumerate(leases)]
            pool.reward_unit(rewards)
        num_units += len(complete)
        if not complete:
            time.sleep(JUDGE_S)
    say({"units": num_units, "cpu_s": time.process_time() - spent_s, **summary(times_s)})


def rewarding(lease: Lease, total: float, num_calls: int) -> Rewarding:
    return Rewarding(lease, Reward(0.0, 0.0, total, total), (total,) * num_calls)


def train(work: Work, pool: Pool) -> None:
    claims_s: list[float] = []
    fetches_s: list[float] = []
    commits_s: list[float] = []
    num_units, num_empty = 0, 0
    version = PolicyVersion("run", newest_step(pool))

    def cycle() -> None:
        nonlocal num_units, num_empty, version
        claimed = timed(claims_s, partial(pool.claim_within, 1 << 30, work.batch, version))
        if claimed is None:
            num_empty += 1
            return
        units = timed(fetches_s, partial(pool.fetch, claimed))
        num_units += len(units)
        version = PolicyVersion("run", version.step + 1)
        timed(commits_s, partial(pool.commit, claimed, version))

    cycle()
    first_s, num_units, num_empty = claims_s[0], 0, 0
    for times_s in (claims_s, fetches_s, commits_s):
        times_s.clear()
    engine, rows_s = pool.database.engine.execution_options(isolation_level="AUTOCOMMIT"), list[float]()
    if not pool.database.is_sqlite:
        with engine.connect() as connection:
            connection.execute(text("CREATE TABLE IF NOT EXISTS probe (number INTEGER)"))
            connection.execute(ADD_ROW)
    until_s = begin() + work.seconds
    while (began_s := time.monotonic()) < until_s:
        cycle()
        if not pool.database.is_sqlite:
            with engine.connect() as connection:
                timed(rows_s, partial(connection.execute, ADD_ROW))
        time.sleep(max(0.0, began_s + work.every_s - time.monotonic()))
    found = {
        "claim": summary(claims_s),
        "fetch": summary(fetches_s),
        "commit": summary(commits_s),
        "row": summary(rows_s),
    }
    say({"units": num_units, "empty": num_empty, "first_claim_ms": first_s * 1e3, **found})


def newest_step(pool: Pool) -> int:
    with pool.database.read() as connection:
        return int(read_queue(connection).step)


def timed(times_s: list[float], call: Callable[[], T]) -> T:
    began_s = time.perf_counter()
    result = call()
    times_s.append(time.perf_counter() - began_s)
    return result


def main() -> None:
    role, text = sys.argv[1:]
    values = json.loads(text)
    work = Work(**values | {"config": PoolConfig.model_validate(values["config"])})
    with Pool(work.config, work.vocab_size) as pool:
        if role == "write":
            asyncio.run(write(work, pool))
        elif role == "judge":
            judge(work, pool)
        else:
            train(work, pool)


if __name__ == "__main__":
    main()
