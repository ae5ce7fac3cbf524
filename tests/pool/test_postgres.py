"""What only PostgreSQL needs watching for: it chooses by what it has counted how it finds rows."""

from collections.abc import Mapping
from typing import cast

from sqlalchemy import Connection, event, text

from m2forge.pool.config import PoolConfig
from m2forge.pool.pool import Pool
from tests.pool.postgres import fresh_database
from tests.pool.scene import VOCAB_SIZE, task

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
