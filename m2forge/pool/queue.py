"""Tasks in, leases on their episodes out; what becomes of an attempt that breaks, and of a group that is given up.

Places are given in the order of submission, without gaps. A lease is for one attempt; when its worker dies the episode
goes back to wait for another attempt, and what the old one still sends is refused. These functions run inside the
transaction that is handed to them.
"""

import json
from collections.abc import Sequence

from sqlalchemy import Connection, Row, delete, func, insert, select, tuple_, update

from m2forge.errors import ExistsError, RecordError
from m2forge.pool.config import PoolConfig
from m2forge.pool.schema import QUEUE_ID, call_table, episode_table, note_table, queue_table, unit_table
from m2forge.pool.state import (
    DropReason,
    EpisodeState,
    LeaseLostError,
    Origin,
    StateError,
    UnitState,
    move_episodes,
    move_units,
)
from m2forge.pool.stored import LEASE_COLUMNS, Lease, read_lease, task_text
from m2forge.pool.tally import REQUEUED, SUBMITTED, count, dropped
from m2forge.records import Task

QueueRow = Row[tuple[object, ...]]
UnitRow = Row[tuple[object, ...]]

_FRESH: dict[str, object] = {
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
"""An episode of which nothing is recorded but how often it was tried."""
_ADD_EPISODES = insert(episode_table)


def lock_queue(connection: Connection) -> QueueRow:
    """The pool's counters; nobody else changes them, or takes a batch, until this transaction ends."""
    return connection.execute(select(queue_table).where(queue_table.c.id == QUEUE_ID).with_for_update()).one()


def read_queue(connection: Connection) -> QueueRow:
    return connection.execute(select(queue_table).where(queue_table.c.id == QUEUE_ID)).one()


def lock_unit(connection: Connection, unit: int) -> UnitRow:
    row = connection.execute(select(unit_table).where(unit_table.c.id == unit).with_for_update()).one_or_none()
    if row is None:
        raise StateError(f"unit {unit} is not in the pool; it was deleted after it had been trained or dropped")
    return row


def _lock_group_of(connection: Connection, unit: int) -> UnitRow:
    """All units of its group, since those may be given up with it; the unit itself."""
    group = select(unit_table.c.group_name).where(unit_table.c.id == unit).scalar_subquery()
    query = select(unit_table).where(unit_table.c.group_name == group)
    rows = connection.execute(query.order_by(unit_table.c.place, unit_table.c.id).with_for_update()).all()
    return next((row for row in rows if row.id == unit), None) or lock_unit(connection, unit)


def num_queued(connection: Connection) -> int:
    return connection.execute(select(func.count()).where(unit_table.c.is_queued)).scalar_one()


# -- submission --------------------------------------------------------------------------------------------------------


def put(
    connection: Connection, config: PoolConfig, tasks: Sequence[tuple[Task, int]], note: str | None = None
) -> list[str]:
    """Queue groups, each a task and its number of episodes, and return their names. `note`: takes the place of the last
    one."""
    queue = lock_queue(connection)
    if any(num_episodes < 1 for _, num_episodes in tasks):
        raise RecordError("a group: expected one episode or more")
    sizes = [1 if config.window.unit == "episode" else num_episodes for _, num_episodes in tasks]
    num_units = sum(num_episodes // size for (_, num_episodes), size in zip(tasks, sizes, strict=True))
    # Units that a restore returned may have filled the queue beyond its size.
    room = max(0, config.window.queue - num_queued(connection))
    if num_units > room:
        raise StateError(f"the queue has room for {room} of {config.window.queue} units, not for {num_units}")
    place, names = queue.next_place, []
    episodes: list[dict[str, object]] = []
    for (task, num_episodes), size in zip(tasks, sizes, strict=True):
        group = f"g{place}"
        for first in range(0, num_episodes, size):
            unit = _add_unit(connection, queue, Origin.LOOP, group, task, size, place)
            episodes += [_fresh(unit, f"{group}-{index}") for index in range(first, first + size)]
            place += 1
        names.append(group)
    if episodes:
        connection.execute(_ADD_EPISODES, episodes)
    connection.execute(update(queue_table).values(next_place=place))
    difficulties = [
        task.difficulty for (task, num), size in zip(tasks, sizes, strict=True) for _ in range(0, num, size)
    ]
    count(connection, SUBMITTED, difficulties, config.difficulty_bin)
    if note is not None:
        connection.execute(delete(note_table))
        connection.execute(insert(note_table).values(id=QUEUE_ID, text=note))
    return names


def read_note(connection: Connection) -> str | None:
    return connection.execute(select(note_table.c.text)).scalar_one_or_none()


def open_deployed(connection: Connection, config: PoolConfig, name: str, task: Task, now_s: float) -> Lease:
    """An episode that somebody else's agent is at, not queued."""
    if connection.execute(select(episode_table.c.id).where(episode_table.c.name == name)).first() is not None:
        raise ExistsError(f"episode {name} exists; an episode is opened once")
    unit = _add_unit(connection, read_queue(connection), Origin.DEPLOYED, name, task, 1, None)
    made = insert(episode_table).values(_fresh(unit, name)).returning(episode_table.c.id)
    episode: int = connection.execute(made).scalar_one()
    until_s = now_s + config.deployed_s
    where = episode_table.c.id == episode
    move_episodes(connection, EpisodeState.RUNNING, where, attempt=1, started_s=now_s, lease_until_s=until_s)
    return Lease(episode, unit, 1, name, name, task, "")


def admit(connection: Connection, config: PoolConfig, num_units: int) -> int:
    """Queue rewarded episodes of deployed agents, as many as there is room for."""
    queue = lock_queue(connection)
    room = min(num_units, config.window.queue - num_queued(connection))
    unit = unit_table.c
    waiting = connection.execute(
        select(unit.id, unit.difficulty)
        .where(unit.state == UnitState.READY, unit.place.is_(None))
        .order_by(unit.id)
        .limit(max(0, room))
        .with_for_update()
    ).all()
    for place, row in enumerate(waiting, queue.next_place):
        values = {"place": place, "is_queued": True, "taken_before": queue.num_taken}
        connection.execute(update(unit_table).where(unit.id == row.id).values(values))
    connection.execute(update(queue_table).values(next_place=queue.next_place + len(waiting)))
    count(connection, SUBMITTED, [row.difficulty for row in waiting], config.difficulty_bin)
    return len(waiting)


def _add_unit(
    connection: Connection, queue: QueueRow, origin: Origin, group: str, task: Task, size: int, place: int | None
) -> int:
    values = {
        "place": place,
        "is_queued": place is not None,
        "group_name": group,
        "origin": origin,
        "domain": task.domain,
        "difficulty": float(task.difficulty),
        "task": task_text(task),
        "state": UnitState.OPEN,
        "size": size,
        "num_unfinished": size,
        "num_unrewarded": size,
        "num_requeues": 0,
        "taken_before": queue.num_taken,
        "num_bytes": 0,
    }
    id: int = connection.execute(insert(unit_table).values(values).returning(unit_table.c.id)).scalar_one()
    return id


def _fresh(unit: int, name: str) -> dict[str, object]:
    counts = {"attempt": 0, "num_failures": 0, "num_deaths": 0}
    return {"name": name, "unit": unit, "state": EpisodeState.QUEUED, **counts, **_FRESH}


# -- leases ------------------------------------------------------------------------------------------------------------


def lease(connection: Connection, config: PoolConfig, worker: str, num_episodes: int, now_s: float) -> list[Lease]:
    """The episodes that have waited longest, for this worker alone."""
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
    """Attempts that are under way, for a worker that starts again and finds its agents alive."""
    episode = episode_table.c
    running = select(episode.id).where(episode.state == EpisodeState.RUNNING, episode.worker == worker)
    return _leases(connection, list(connection.execute(running).scalars()))


def leases_in(connection: Connection, unit: int) -> list[Lease]:
    """Of all episodes of a unit, in whatever state."""
    query = select(episode_table.c.id).where(episode_table.c.unit == unit)
    return _leases(connection, list(connection.execute(query).scalars()))


def renew(connection: Connection, config: PoolConfig, leases: Sequence[Lease], now_s: float) -> list[Lease]:
    """Prolong leases, and return those that are lost: their agents are to be stopped."""
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


# -- attempts that broke, groups that are given up --------------------------------------------------------------------


def break_off(
    connection: Connection, config: PoolConfig, lease: Lease, failure: str, *, died_by_s: float | None = None
) -> EpisodeState:
    """End an attempt without an outcome: the episode waits for another one, or fails, and its group with it.
    `died_by_s`: its worker died, and the attempt ends only if its lease is over by then, since it may be renewed."""
    unit = _lock_group_of(connection, lease.unit)
    episode = episode_table.c
    here = [episode.id == lease.episode, episode.attempt == lease.attempt, episode.state == EpisodeState.RUNNING]
    if died_by_s is not None:
        here.append(episode.lease_until_s < died_by_s)
    broken = episode.num_deaths if died_by_s is not None else episode.num_failures
    num_before = connection.execute(select(broken).where(*here).with_for_update()).scalar_one_or_none()
    if num_before is None:
        raise LeaseLostError(describe_loss(connection, lease))
    values = {broken.name: num_before + 1, "failure": failure}
    limit = config.max_deaths if died_by_s is not None else config.max_failures
    if unit.origin == Origin.LOOP and num_before + 1 < limit:
        move_episodes(connection, EpisodeState.QUEUED, *here, **_FRESH | values)
        connection.execute(delete(call_table).where(call_table.c.episode == lease.episode))
        return EpisodeState.QUEUED
    move_episodes(connection, EpisodeState.FAILED, *here, lease_until_s=None, **values)
    reason = DropReason.FAILED if unit.origin == Origin.LOOP else DropReason.UNREWARDED
    drop_group(connection, config, unit.group_name, reason)
    return EpisodeState.FAILED


def expired(connection: Connection, now_s: float, limit: int) -> list[Lease]:
    episode = episode_table.c
    over = select(episode.id).where(episode.state == EpisodeState.RUNNING, episode.lease_until_s < now_s)
    found = list(connection.execute(over.order_by(episode.lease_until_s).limit(limit)).scalars())
    return sorted(_leases(connection, found), key=lambda lease: lease.unit)


def drop_group(connection: Connection, config: PoolConfig, group: str, reason: DropReason) -> int:
    """Give up all units of a group that are not trained yet; the number of them."""
    rows = _group_units(connection, group)
    ids = [row.id for row in rows]
    unit, episode = unit_table.c, episode_table.c
    num_bytes = select(func.coalesce(func.sum(episode.num_bytes), 0)).where(episode.unit == unit.id).scalar_subquery()
    step = read_queue(connection).step
    values = {"reason": reason, "is_queued": False, "step": step, "num_bytes": num_bytes}
    move_units(connection, UnitState.DROPPED, unit.id.in_(ids), **values)
    move_episodes(connection, EpisodeState.DROPPED, episode.unit.in_(ids), lease_until_s=None)
    count(connection, dropped(reason), [row.difficulty for row in rows], config.difficulty_bin)
    return len(rows)


def requeue_group(connection: Connection, config: PoolConfig, group: str) -> int:
    """Put all of a group that is not trained yet at the end of the queue, to be attempted anew as a whole: to keep the
    attempts that ended would favour the quick ones. The queue is locked already."""
    rows = _group_units(connection, group)
    queue = read_queue(connection)
    episode = episode_table.c
    for place, row in enumerate(rows, queue.next_place):
        values = {"place": place, "num_unfinished": row.size, "num_unrewarded": row.size, "oldest_step": None}
        values |= {"num_requeues": row.num_requeues + 1, "taken_before": queue.num_taken}
        move_units(connection, UnitState.OPEN, unit_table.c.id == row.id, **values)
        move_episodes(connection, EpisodeState.QUEUED, episode.unit == row.id, **_FRESH)
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
