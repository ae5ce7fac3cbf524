"""Deletes trained and dropped units once they are old enough, a few episodes at a time.

It keeps units that a restored checkpoint would need again, those of steps after the newest checkpoint, and dropped
units that wait for a replacement.
"""

from collections.abc import Sequence

from sqlalchemy import Connection, and_, delete, func, or_, select

from m2forge.pool.config import RetentionConfig
from m2forge.pool.queue import read_queue
from m2forge.pool.schema import call_table, episode_table, unit_table
from m2forge.pool.state import UnitState


def sweep(connection: Connection, config: RetentionConfig) -> int:
    """Delete units over the limits, oldest first; returns the number of deleted episodes, 0 when none are left."""
    queue = read_queue(connection)
    by_versions = 0 if config.versions is None else queue.step - config.versions + 1
    oldest_kept = max(by_versions, _oldest_kept(connection, config))
    unit = unit_table.c
    is_durable = or_(unit.state == UnitState.DROPPED, unit.step <= queue.durable_step)
    is_done = unit.state.in_((UnitState.TRAINED, UnitState.DROPPED))
    is_over = and_(is_done, unit.step < oldest_kept, is_durable, ~unit.is_owed)
    ids: list[int] = []
    num_episodes = 0
    query = select(unit.id, unit.size).where(is_over).order_by(unit.step, unit.id).limit(config.sweep_episodes)
    for row in connection.execute(query.with_for_update(skip_locked=True)).all():
        if ids and num_episodes + row.size > config.sweep_episodes:
            break
        ids.append(row.id)
        num_episodes += row.size
    if ids:
        _delete(connection, ids)
    return num_episodes


def _oldest_kept(connection: Connection, config: RetentionConfig) -> int:
    """The oldest step such that all units from it on fit into the byte limit."""
    if config.num_bytes is None:
        return 0
    unit = unit_table.c
    is_done = unit.state.in_((UnitState.TRAINED, UnitState.DROPPED))
    sizes = select(unit.step, func.sum(unit.num_bytes)).where(is_done).group_by(unit.step).order_by(unit.step.desc())
    total = 0
    for step, num_bytes in connection.execute(sizes):
        total += int(num_bytes)
        if total > config.num_bytes:
            return int(step) + 1
    return 0


def _delete(connection: Connection, unit_ids: Sequence[int]) -> None:
    episode = episode_table.c
    own = list(connection.execute(select(episode.id).where(episode.unit.in_(unit_ids))).scalars())
    connection.execute(delete(call_table).where(call_table.c.episode.in_(own)))
    connection.execute(delete(episode_table).where(episode.id.in_(own)))
    connection.execute(delete(unit_table).where(unit_table.c.id.in_(unit_ids)))
