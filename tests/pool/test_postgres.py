"""What only PostgreSQL needs watching for: it chooses by what it has counted how it finds rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import pytest
from sqlalchemy import Connection, event, select, text

from m2forge.pool import batch as batches
from m2forge.pool.batch import Claim
from m2forge.pool.config import PoolConfig
from m2forge.pool.lifecycle import UnitState
from m2forge.pool.pool import Pool
from m2forge.pool.queue import QueueRow, UnitRow
from m2forge.pool.tables import batch_table, episode_table, queue_table, unit_table
from tests.pool.postgres import fresh_database
from tests.pool.scene import VOCAB_SIZE, Clock, play_all, task, version

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
