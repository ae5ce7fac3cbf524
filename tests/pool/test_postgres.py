"""What only PostgreSQL needs watching for: it chooses by what it has counted how it finds rows."""

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, event, insert, select, text

from m2forge.pool import batch as batches
from m2forge.pool.batch import Claim
from m2forge.pool.config import PoolConfig
from m2forge.pool.lifecycle import LeaseLostError, UnitState
from m2forge.pool.pool import Pool
from m2forge.pool.queue import QueueRow, UnitRow
from m2forge.pool.record import Append, Ending
from m2forge.pool.stored import Lease, Outcome
from m2forge.pool.tables import (
    QUEUE_ID,
    batch_table,
    call_table,
    episode_table,
    fork_table,
    queue_table,
    unit_table,
)
from tests.pool.postgres import fresh_database
from tests.pool.scene import VOCAB_SIZE, Clock, calls, play_all, task, version

_numbers = itertools.count()
NUM_TRAINED = NUM_QUEUED = 5000


def test_the_window_is_found_without_scanning_trained_units(server_url: str) -> None:
    """By the order of all places it looks as near: every second unit is a queued one, but these come last."""
    with fresh_database(server_url, "plans") as url, Pool(PoolConfig(url=url), VOCAB_SIZE) as pool:
        pool.put([(task(), 2)])
        kept = "group_name, origin, domain, difficulty, task, size, num_unfinished, num_unrewarded, num_requeues, "
        kept += "num_skips, is_owed, "
        kept += "taken_before, num_bytes"
        with pool.database.write() as connection:
            for state, is_queued, first, num in (
                ("trained", False, 1, NUM_TRAINED),
                ("ready", True, 1 + NUM_TRAINED, NUM_QUEUED),
            ):
                connection.execute(
                    text(
                        f"INSERT INTO unit (place, is_queued, state, {kept}) SELECT i, {is_queued}, '{state}', {kept} "
                        f"FROM unit, generate_series({first}, {first + num - 1}) i WHERE unit.place = 0"
                    )
                )
            connection.execute(text("ANALYZE"))
        plans: list[str] = []

        def explain(
            connection: Connection, cursor: object, statement: str, parameters: object, context: object, many: bool
        ) -> None:
            raw = connection.connection.driver_connection
            assert raw is not None
            lines = raw.execute(f"EXPLAIN {statement}", cast(Mapping[str, object], parameters)).fetchall()
            plans.append("\n".join(line for (line,) in lines))

        event.listen(pool.database.engine, "before_cursor_execute", explain)
        assert [place for place, _ in pool.queue_positions(3)] == [0, NUM_TRAINED + 1, NUM_TRAINED + 2]
        assert len(plans) == 1
        assert "queued_by_place" in plans[0]


def claimed_by_turns(server_url: str, change: str | None = None) -> list[object]:
    """Claims of two units and of three, and what they leave behind. `change`: what another process commits after the
    first claim has read the window and before it takes anything."""
    with (
        fresh_database(server_url, "claims") as url,
        Pool(PoolConfig(url=url), VOCAB_SIZE, clock=Clock()) as pool,
        Pool(PoolConfig(url=url), VOCAB_SIZE) as other,
    ):
        pool.put([(task(index), 2) for index in range(6)])
        play_all(pool)
        changes = [] if change is None else [change]

        def interfere(*arguments: object) -> object:
            for _ in range(len(changes)):
                with other.database.write() as theirs:
                    theirs.execute(text(changes.pop()))
            return took(*arguments)

        took: Callable[..., object] = batches._take_at_end
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batches, "_take_at_end", interfere)
            claims = [pool.claim(number, version(0)) for number in (2, 3)]
        assert not changes
        with pool.database.read() as connection:
            batch, *tables = (
                [{**row._mapping} for row in connection.execute(select(table).order_by(table.c.id))]
                for table in (batch_table, unit_table, queue_table, episode_table)
            )
    # One that takes nothing uses up an id.
    place = {None: None} | {row["id"]: index for index, row in enumerate(batch)}
    found: list[object] = [claimed and (place[claimed.id], claimed.epoch, claimed.units) for claimed in claims]
    found += [row | {"id": place[row["id"]]} for row in batch]
    found += [row | {"batch": place[row["batch"]]} for row in tables[0]]
    found += tables[1:]
    return found


@pytest.mark.parametrize("change", [None, "UPDATE unit SET state = 'open' WHERE place = 1"])
def test_a_claim_in_two_round_trips_is_that_of_ten(
    server_url: str, monkeypatch: pytest.MonkeyPatch, change: str | None
) -> None:
    quick = claimed_by_turns(server_url, change)
    assert (quick[0] is None) == (change is not None)

    def take(connection: Connection, queue: QueueRow, rows: Sequence[UnitRow], _: int) -> Claim | None:
        is_ready = batches._lock(connection, rows, UnitState.READY)
        return batches._take(connection, queue, rows) if is_ready else None

    monkeypatch.setattr(batches, "_take_at_end", take)
    assert quick == claimed_by_turns(server_url, change)


def stored(url: str, seed: int) -> list[object]:
    """Attempts that append calls, end, lose their lease or repeat themselves, at random; answers and tables."""
    draw = random.Random(seed)
    found: list[object] = []
    with Pool(PoolConfig(url=url), VOCAB_SIZE, clock=Clock()) as pool:
        pool.put([(task(n), draw.randint(1, 4)) for n in range(4)])
        leases = pool.lease("worker", 16)
        with pool.database.write() as connection:
            connection.execute(insert(fork_table).values(id=QUEUE_ID, step=1))
        encoders = {lease.name: lease.writer(VOCAB_SIZE) for lease in leases}
        made = {
            lease.name: [encoders[lease.name].write(call) for call in calls(n, 4, step=draw.randrange(3))]
            for n, lease in enumerate(leases)
        }
        for _ in range(8):
            chosen, appends, endings = draw.sample(leases, draw.randint(1, len(leases))), [], []
            for lease in chosen:
                first = draw.randrange(3)
                new = made[lease.name][first : first + draw.randint(0, 3)]
                if draw.random() < 0.5:
                    appends += [Append(lease, call) for call in new]
                else:
                    endings.append(Ending(lease, tuple(new), Outcome(draw.choice([None, "late"]), {"a": lease.name})))
            if draw.random() < 0.3:
                failed = draw.choice(leases)
                with contextlib.suppress(LeaseLostError):
                    pool.fail(failed, "broken")
            answers: list[object] = [*pool.append(appends), *(pool.end(endings) if endings else ())]
            found.append([repr(answer) for answer in answers])
        with pool.database.read() as connection:
            for table in (unit_table, episode_table, call_table):
                rows = connection.execute(select(table).order_by(*table.primary_key))
                found.append([{**row._mapping} for row in rows])
    return found


@given(st.integers(0, 1 << 30))
@settings(max_examples=settings().max_examples // 2)
def test_one_statement_stores_what_several_do(server_url: str, seed: int) -> None:
    with fresh_database(server_url, f"alone{next(_numbers)}") as url:
        alone = stored(url, seed)
    with pytest.MonkeyPatch.context() as patch, fresh_database(server_url, f"several{next(_numbers)}") as url:
        patch.setattr("m2forge.pool.pool.MAX_ALONE_BYTES", -1)
        assert stored(url, seed) == alone


@pytest.mark.parametrize("num_attempts", [1, 12])
def test_attempts_are_stored_in_one_round_trip(server_url: str, num_attempts: int) -> None:
    statements: list[str] = []
    with fresh_database(server_url, "trips") as url, Pool(PoolConfig(url=url), VOCAB_SIZE) as pool:
        pool.put([(task(n), 1) for n in range(num_attempts)])
        leases = pool.lease("worker", num_attempts)
        event.listen(pool.database.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
        event.listen(pool.database.engine, "commit", lambda connection: statements.append("COMMIT"))
        first = [lease.writer(VOCAB_SIZE).write(calls(0, 1)[0]) for lease in leases]
        assert pool.append([Append(*item) for item in zip(leases, first, strict=True)]) == [None] * num_attempts
        assert len(statements) == 1
        assert pool.end([Ending(lease, (), Outcome()) for lease in leases]) == [True] * num_attempts
        assert len(statements) == 2


def test_an_attempt_that_ends_in_a_restore_is_dated_to_it(server_url: str) -> None:
    """Its statement has begun, and seen no lost version, when it waits for what the restore has locked."""
    with (
        fresh_database(server_url, "dated") as url,
        Pool(PoolConfig(url=url), VOCAB_SIZE) as pool,
        Pool(PoolConfig(url=url), VOCAB_SIZE) as other,
        ThreadPoolExecutor(1) as threads,
    ):
        pool.put([(task(n), 2) for n in range(4)])
        play_all(pool, 6)
        for step in range(3):
            claimed = pool.claim(1, version(step))
            assert claimed is not None
            pool.commit(claimed, version(step + 1))
        pool.put([(task(4), 1)])  # it was submitted when three had been taken, of which the restore returns two
        leases = pool.lease("worker", 3)
        encoded = leases[-1].writer(VOCAB_SIZE).write(calls(0, 1, step=3)[0])
        fork, ended = batches.fork, []

        def end_meanwhile(connection: Connection, step: int) -> None:
            ended.append(threads.submit(other.end, [Ending(leases[-1], (encoded,), Outcome())]))
            wait_for_lock(pool)
            fork(connection, step)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batches, "fork", end_meanwhile)
            assert pool.restore(version(1)).num_returned == 2
        assert ended[0].result() == [True]
        with pool.database.read() as connection:
            column = episode_table.c
            found = connection.execute(select(column.oldest_step).where(column.id == leases[-1].episode)).scalar_one()
        assert found == 1


def wait_for_lock(pool: Pool) -> None:
    """Wait until a statement of this database waits for another's lock."""
    waiting = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    until_s = time.monotonic() + 30
    while True:
        with pool.database.read() as connection:
            if connection.execute(waiting).scalar_one():
                return
        assert time.monotonic() < until_s, "no statement waits"
        time.sleep(0.01)


def test_of_two_processes_one_finds_a_unit_complete(server_url: str) -> None:
    """Either waits for the other's lock and then sees what the other stored."""
    num_units = 40
    with (
        fresh_database(server_url, "last") as url,
        Pool(PoolConfig(url=url), VOCAB_SIZE) as one,
        Pool(PoolConfig(url=url), VOCAB_SIZE) as other,
        ThreadPoolExecutor(2) as threads,
    ):
        one.put([(task(n), 2) for n in range(num_units)])
        leases = one.lease("worker", 2 * num_units)

        def end(pool: Pool, mine: list[Lease]) -> int:
            return sum(pool.end([Ending(lease, (), Outcome())])[0] is True for lease in mine)

        ended = [threads.submit(end, one, leases[::2]), threads.submit(end, other, leases[1::2])]
        assert sum(each.result() for each in ended) == num_units
        assert len(one.unjudged(num_units + 1)) == num_units
