"""Leases on queued episodes; retries of failed attempts; dropping and requeueing groups.

A lease covers one attempt; when its worker dies, the episode is queued for another attempt, and writes of the old one
are refused. The caller passes the transaction in which these functions run.
"""

import json
from collections.abc import Sequence

from sqlalchemy import Connection, Row, delete, func, select, tuple_, update

from m2forge.pool.config import PoolConfig
from m2forge.pool.schema import QUEUE_ID, call_table, episode_table, queue_table, unit_table
from m2forge.pool.state import (
    DropReason,
    EpisodeState,
    LeaseLostError,
    StateError,
    UnitState,
    move_episodes,
    move_units,
)
from m2forge.pool.stored import LEASE_COLUMNS, Lease, read_lease
from m2forge.pool.tally import REQUEUED, count, dropped

QueueRow = Row[tuple[object, ...]]
UnitRow = Row[tuple[object, ...]]

FRESH: dict[str, object] = {
    "worker": "",
    "lease_until_s": None,
    "started_s": None,
    "finished_s": None,
    "num_calls": 0,
    "num_tokens": 0,
    "num_bytes": 0,
    "oldest_step": None,
    "failure": None,
    "reward_total": None,
    "reward": None,
    "step_rewards": None,
    "artifacts": json.dumps({}),
}
"""Column values of an episode without recorded data; its attempt counters are kept."""


def lock_queue(connection: Connection) -> QueueRow:
    """Lock and return the pool's counters: no other process changes them or claims a batch until this transaction
    ends."""
    return connection.execute(select(queue_table).where(queue_table.c.id == QUEUE_ID).with_for_update()).one()


def read_queue(connection: Connection) -> QueueRow:
    return connection.execute(select(queue_table).where(queue_table.c.id == QUEUE_ID)).one()


def lock_unit(connection: Connection, unit: int) -> UnitRow:
    row = connection.execute(select(unit_table).where(unit_table.c.id == unit).with_for_update()).one_or_none()
    if row is None:
        raise StateError(f"unit {unit} is not in the pool; it was deleted after it had been trained or dropped")
    return row


def _lock_group_of(connection: Connection, unit: int) -> UnitRow:
    """Lock all units of its group, since they may be dropped with it; returns the unit itself."""
    group = select(unit_table.c.group_name).where(unit_table.c.id == unit).scalar_subquery()
    query = select(unit_table).where(unit_table.c.group_name == group)
    rows = connection.execute(query.order_by(unit_table.c.place, unit_table.c.id).with_for_update()).all()
    return next((row for row in rows if row.id == unit), None) or lock_unit(connection, unit)


def num_queued(connection: Connection) -> int:
    return connection.execute(select(func.count()).where(unit_table.c.is_queued)).scalar_one()


# -- leases ------------------------------------------------------------------------------------------------------------


def lease(connection: Connection, config: PoolConfig, worker: str, num_episodes: int, now_s: float) -> list[Lease]:
    """Lease the oldest queued episodes to this worker."""
    episode = episode_table.c
    ids = connection.execute(
        select(episode.id)
        .where(episode.state == EpisodeState.QUEUED)
        .order_by(episode.id)
        .limit(num_episodes)
        .with_for_update(skip_locked=True)
    ).scalars()
    chosen = list(ids)
    if not chosen:
        return []
    values = {"worker": worker, "lease_until_s": now_s + config.lease_s, "started_s": now_s}
    moved = move_episodes(
        connection, EpisodeState.RUNNING, episode.id.in_(chosen), attempt=episode.attempt + 1, **values
    )
    assert moved == len(chosen), "rows that were locked changed"
    return _leases(connection, chosen)


def leases_of(connection: Connection, worker: str) -> list[Lease]:
    """Leases of a worker's running attempts, for a worker that restarts."""
    episode = episode_table.c
    running = select(episode.id).where(episode.state == EpisodeState.RUNNING, episode.worker == worker)
    return _leases(connection, list(connection.execute(running).scalars()))


def leases_in(connection: Connection, unit: int) -> list[Lease]:
    """Leases of all episodes of a unit, in any state."""
    query = select(episode_table.c.id).where(episode_table.c.unit == unit)
    return _leases(connection, list(connection.execute(query).scalars()))


def renew(connection: Connection, config: PoolConfig, leases: Sequence[Lease], now_s: float) -> list[Lease]:
    """Renew leases; returns the lost ones, whose attempts the caller must cancel."""
    if not leases:
        return []
    episode = episode_table.c
    pairs = sorted((lease.episode, lease.attempt) for lease in leases)
    kept = connection.execute(
        update(episode_table)
        .where(tuple_(episode.id, episode.attempt).in_(pairs), episode.state == EpisodeState.RUNNING)
        .values(lease_until_s=now_s + config.lease_s)
        .returning(episode.id)
    ).scalars()
    alive = set(kept)
    return [lease for lease in leases if lease.episode not in alive]


def _leases(connection: Connection, episode_ids: Sequence[int]) -> list[Lease]:
    if not episode_ids:
        return []
    joined = episode_table.join(unit_table, episode_table.c.unit == unit_table.c.id)
    query = select(*LEASE_COLUMNS).select_from(joined).where(episode_table.c.id.in_(episode_ids))
    return [read_lease(row) for row in connection.execute(query.order_by(episode_table.c.id))]


# -- failed attempts, dropped and requeued groups ---------------------------------------------------------------------


def break_off(
    connection: Connection,
    config: PoolConfig,
    lease: Lease,
    failure: str,
    *,
    is_death: bool = False,
    until_s: float | None = None,
) -> EpisodeState:
    """End an attempt without an outcome: the episode is queued for a retry, or fails and its group is dropped.
    `is_death`: its worker died, which has its own counter. `until_s`: end the attempt only if its lease still expires
    then, since it may have been renewed."""
    unit = _lock_group_of(connection, lease.unit)
    episode = episode_table.c
    here = [episode.id == lease.episode, episode.attempt == lease.attempt, episode.state == EpisodeState.RUNNING]
    if until_s is not None:
        here.append(episode.lease_until_s == until_s)
    broken = episode.num_deaths if is_death else episode.num_failures
    num_before = connection.execute(select(broken).where(*here).with_for_update()).scalar_one_or_none()
    if num_before is None:
        raise LeaseLostError(describe_loss(connection, lease))
    values = {broken.name: num_before + 1, "failure": failure}
    limit = config.max_deaths if is_death else config.max_failures
    if num_before + 1 < limit:
        move_episodes(connection, EpisodeState.QUEUED, *here, **FRESH | values)
        connection.execute(delete(call_table).where(call_table.c.episode == lease.episode))
        return EpisodeState.QUEUED
    move_episodes(connection, EpisodeState.FAILED, *here, lease_until_s=None, **values)
    drop_group(connection, config, unit.group_name, DropReason.FAILED)
    return EpisodeState.FAILED


def running(connection: Connection) -> dict[tuple[int, int], float]:
    """Expiry of the leases of running attempts, by episode and attempt."""
    episode = episode_table.c
    query = select(episode.id, episode.attempt, episode.lease_until_s)
    rows = connection.execute(query.where(episode.state == EpisodeState.RUNNING))
    return {(row.id, row.attempt): row.lease_until_s for row in rows}


def leases_on(connection: Connection, episode_ids: Sequence[int]) -> list[Lease]:
    """Leases of these episodes, sorted by unit, which is the lock order."""
    return sorted(_leases(connection, episode_ids), key=lambda lease: lease.unit)


def drop_group(connection: Connection, config: PoolConfig, group: str, reason: DropReason) -> int:
    """Drop all untrained units of a group; returns how many. Units of a stage become owed: other tasks replace them
    (`pool/submission.py`)."""
    rows = _group_units(connection, group)
    ids = [row.id for row in rows]
    unit, episode = unit_table.c, episode_table.c
    num_bytes = select(func.coalesce(func.sum(episode.num_bytes), 0)).where(episode.unit == unit.id).scalar_subquery()
    step = read_queue(connection).step
    values = {"reason": reason, "is_queued": False, "step": step, "num_bytes": num_bytes}
    values["is_owed"] = unit.stage.is_not(None)
    move_units(connection, UnitState.DROPPED, unit.id.in_(ids), **values)
    move_episodes(connection, EpisodeState.DROPPED, episode.unit.in_(ids), lease_until_s=None)
    count(connection, dropped(reason), [row.difficulty for row in rows], config.difficulty_bin)
    return len(rows)


def requeue_group(connection: Connection, config: PoolConfig, group: str) -> int:
    """Move all untrained units of a group to the end of the queue and restart all of their attempts: keeping finished
    ones would bias towards fast attempts. The caller has locked the queue."""
    rows = _group_units(connection, group)
    queue = read_queue(connection)
    episode = episode_table.c
    for place, row in enumerate(rows, queue.next_place):
        values = {"place": place, "num_unfinished": row.size, "num_unrewarded": row.size, "oldest_step": None}
        values |= {"num_requeues": row.num_requeues + 1, "taken_before": queue.num_taken}
        move_units(connection, UnitState.OPEN, unit_table.c.id == row.id, **values)
        move_episodes(connection, EpisodeState.QUEUED, episode.unit == row.id, **FRESH)
        own = select(episode.id).where(episode.unit == row.id).scalar_subquery()
        connection.execute(delete(call_table).where(call_table.c.episode.in_(own)))
    connection.execute(update(queue_table).values(next_place=queue.next_place + len(rows)))
    count(connection, REQUEUED, [row.difficulty for row in rows], config.difficulty_bin)
    return len(rows)


def _group_units(connection: Connection, group: str) -> Sequence[UnitRow]:
    unit = unit_table.c
    untrained = unit.state.in_((UnitState.OPEN, UnitState.READY))
    query = select(unit_table).where(unit.group_name == group, untrained)
    return connection.execute(query.order_by(unit.place, unit.id).with_for_update()).all()


def describe_loss(connection: Connection, lease: Lease) -> str:
    row = connection.execute(
        select(episode_table.c.state, episode_table.c.attempt).where(episode_table.c.id == lease.episode)
    ).one_or_none()
    if row is None:
        return f"{lease.name}: the episode is not in the pool any more"
    return f"{lease.name}: refused; the episode is {row.state}, at attempt {row.attempt}"
