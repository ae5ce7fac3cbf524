"""What only SQLite needs watching for: its log, its file, its ways to sync, and that no query reads a whole table."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Connection, event, text

from m2forge.config import build
from m2forge.errors import ConfigError
from m2forge.pool.config import PoolConfig, RetentionConfig
from m2forge.pool.dialect import PoolError
from m2forge.pool.pool import Pool
from m2forge.pool.record import Append
from tests.pool.scene import VOCAB_SIZE, Clock, calls, play_all, task, version, windowed

LIMIT = 1 << 20


@pytest.fixture
def small_log(tmp_path: Path) -> PoolConfig:
    return PoolConfig(url=f"sqlite:///{tmp_path / 'pool.db'}", wal_bytes=LIMIT, busy_timeout_s=1.0)


def write_much(pool: Pool, num_calls: int) -> None:
    (lease,) = pool.lease("worker", 1)
    writer = lease.writer(VOCAB_SIZE)
    for call in calls(0, 1, num_new=600) * num_calls:
        pool.append([Append(lease, writer.write(call))])


@pytest.mark.slow
def test_readers_that_overlap_do_not_make_the_log_grow(small_log: PoolConfig) -> None:
    """One of two readers is always in the middle of a transaction, which would keep the log from starting over."""
    is_over = threading.Event()
    handed_on = [threading.Event(), threading.Event()]

    def read(own: int) -> None:
        with Pool(small_log, VOCAB_SIZE) as pool:
            while not is_over.is_set():
                with pool.database.read() as connection:
                    connection.execute(text("SELECT count(*) FROM unit")).scalar_one()
                    handed_on[own].set()
                    handed_on[1 - own].wait(0.05)
                    handed_on[1 - own].clear()

    with Pool(small_log, VOCAB_SIZE) as pool:
        pool.put([(task(), 1)])
        readers = [threading.Thread(target=read, args=(own,)) for own in (0, 1)]
        for reader in readers:
            reader.start()
        longest = 0
        try:
            (lease,) = pool.lease("worker", 1)
            writer = lease.writer(VOCAB_SIZE)
            for call in calls(0, 1, num_new=600) * 600:
                pool.append([Append(lease, writer.write(call))])
                longest = max(longest, pool.database.log_bytes())
        finally:
            is_over.set()
            for reader in readers:
                reader.join()
    # It is looked at every 64 transactions, of up to some ten pages each.
    assert longest < LIMIT + 64 * 12 * 16384


def test_a_pool_opens_and_reads_while_another_writes(small_log: PoolConfig) -> None:
    with Pool(small_log, VOCAB_SIZE) as pool:
        pool.put([(task(), 1)])
        at_once = build(PoolConfig, {"url": small_log.url, "busy_timeout_s": 0.01})
        with pool.database.write(), Pool(at_once, VOCAB_SIZE) as other:
            assert other.room() == pool.room()
            with pytest.raises(PoolError, match="locked"):
                other.lease("worker", 1)
        assert len(pool.lease("worker", 1)) == 1


@pytest.mark.slow
def test_many_make_the_same_pool_at_once(tmp_path: Path) -> None:
    def open_it(url: str) -> int:
        at_once.wait()
        with Pool(PoolConfig(url=url), VOCAB_SIZE) as pool:
            return pool.room()

    num_openers = 6
    at_once = threading.Barrier(num_openers)
    with ThreadPoolExecutor(num_openers) as threads:
        for round_ in range(40):
            url = f"sqlite:///{tmp_path / f'{round_}.db'}"
            assert len(set(threads.map(open_it, [url] * num_openers))) == 1


@pytest.mark.slow
def test_a_lingering_reader_is_named_and_the_log_truncated_later(
    small_log: PoolConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with Pool(small_log, VOCAB_SIZE) as pool, Pool(small_log, VOCAB_SIZE) as other:
        pool.put([(task(n), 1) for n in range(2)])
        with other.database.read() as connection, caplog.at_level(logging.WARNING):
            connection.execute(text("SELECT count(*) FROM unit")).scalar_one()
            write_much(pool, 150)
            assert "a reader prevents the truncation of the write-ahead log" in caplog.text
            assert pool.database.log_bytes() > LIMIT
        write_much(pool, 64)
        assert pool.database.log_bytes() <= LIMIT + 64 * 12 * 16384
        pool.database.bound_log()
        assert pool.database.log_bytes() <= LIMIT


@pytest.mark.parametrize(("sync", "level"), [("system", 1), ("disk", 2)])
def test_the_log_is_written_ahead_and_synced_as_asked(tmp_path: Path, sync: str, level: int) -> None:
    config = build(PoolConfig, {"url": f"sqlite:///{tmp_path / 'p.db'}", "sync": sync})
    with Pool(config, VOCAB_SIZE) as pool, pool.database.read() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar_one() == "wal"
        assert connection.execute(text("PRAGMA synchronous")).scalar_one() == level


def test_deleted_episodes_give_their_pages_back(tmp_path: Path) -> None:
    config = PoolConfig(
        url=f"sqlite:///{tmp_path / 'pool.db'}", retention=RetentionConfig(versions=1, sweep_episodes=100)
    )
    with Pool(config, VOCAB_SIZE) as pool:
        pool.put([(task(n), 1) for n in range(20)])
        for lease in pool.lease("worker", 20):
            writer = lease.writer(VOCAB_SIZE)
            pool.append([Append(lease, writer.write(call)) for call in calls(lease.episode, 20, num_new=300)])
        for lease in pool.leases_of("worker"):
            pool.fail(lease, "broken")
            num_pages = page_count(pool)
            pool.database.reclaim(10_000)
        assert page_count(pool) < num_pages


def page_count(pool: Pool) -> int:
    with pool.database.read() as connection:
        return int(connection.execute(text("PRAGMA page_count")).scalar_one())


def test_no_query_of_the_loop_reads_a_whole_table(tmp_path: Path) -> None:
    """SQLite says how it finds its rows: by SEARCH, or by SCAN of all of them. A change that searches by state alone
    walks through half of a table as well."""
    config = windowed(PoolConfig(url=f"sqlite:///{tmp_path / 'pool.db'}"), queue=64, max_staleness=4)
    clock = Clock()
    with Pool(config, VOCAB_SIZE, clock=clock, monotonic=clock) as pool:
        pool.put([(task(n), 2) for n in range(8)])
        plans: dict[str, list[str]] = {}

        def explain(
            connection: Connection, cursor: object, statement: str, parameters: object, context: object, many: bool
        ) -> None:
            if statement.startswith(("SELECT", "UPDATE", "DELETE")) and statement not in plans:
                raw = connection.connection.driver_connection
                assert raw is not None
                plans[statement] = []
                first = parameters[0] if many else parameters  # type: ignore[index]
                plans[statement] = [row[3] for row in raw.execute(f"EXPLAIN QUERY PLAN {statement}", first)]

        event.listen(pool.database.engine, "before_cursor_execute", explain)
        play_all(pool)
        pool.renew(pool.lease("worker", 1))
        claimed = pool.claim(2, version(0))
        assert claimed is not None
        pool.fetch(claimed)
        pool.commit(claimed, version(1))
        pool.mark_durable(version(1))
        pool.requeue_expired()
        clock.now_s += 1000
        pool.requeue_expired()
        pool.sweep()
        pool.put([(task(), 2)], stage="early")
        pool.replace([(missing, task(), 2) for missing in pool.unreplaced()])
    tables = ("SCAN unit", "SCAN episode", "SCAN call", "SCAN batch")
    # These indices hold what is queued alone, and what is owed alone.
    scans = [
        line
        for plan in plans.values()
        for line in plan
        if line.startswith(tables) and not line.endswith(("INDEX queued_by_place", "INDEX owed_by_place"))
    ]
    walks = [plan for statement, plan in plans.items() if statement.startswith("UPDATE") and "(state=?)" in str(plan)]
    assert len(plans) > 15
    assert scans + walks == []


def test_a_database_that_cannot_be_opened_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "pool.db").write_bytes(b"something else" * 100)
    with pytest.raises(PoolError, match="not a database"):
        Pool(PoolConfig(url=f"sqlite:///{tmp_path / 'pool.db'}"), VOCAB_SIZE)
    with pytest.raises(PoolError, match=r"postgres@127\.0\.0\.1:1/none"):
        Pool(PoolConfig(url="postgresql://postgres@127.0.0.1:1/none"), VOCAB_SIZE)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("mysql://h/d", "must begin with"),
        ("postgresql://u:secret@h/d", "must hold no password"),
        ("sqlite://", "must name a file"),
    ],
)
def test_urls_that_cannot_serve_are_refused(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build(PoolConfig, {"url": url})
