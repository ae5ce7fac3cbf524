"""Leases on queued episodes; retries of failed attempts; dropping and requeueing groups.

A lease covers one attempt; when its worker dies, the episode is queued for another attempt, and writes of the old one
are refused. The caller passes the transaction in which these functions run.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, Row, delete, func, insert, select, tuple_, update

from m2forge.errors import RecordError
from m2forge.pool.config import PoolConfig
from m2forge.pool.dialect import add_up
from m2forge.pool.lifecycle import (
    DropReason,
    EpisodeState,
    LeaseLostError,
    Origin,
    StateError,
    UnitState,
    in_state,
    move_episodes,
    move_units,
)
from m2forge.pool.stored import LEASE_COLUMNS, Lease, Queued, attempt_name, read_lease, storable, task_text
from m2forge.pool.tables import QUEUE_ID, call_table, episode_table, note_table, queue_table, tally_table, unit_table
from m2forge.records import Domain, Task

SUBMITTED, TRAINED, REQUEUED = "submitted", "trained", "requeued"


def dropped(reason: DropReason) -> str:
    return f"dropped_{reason}"


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts units by difficulty: submitted, trained, requeued, and dropped for each reason.

    Counts are stored separately from the units, so that they outlive them.
    """

    counts: dict[str, dict[float, int]]
    """Number of units by kind and by the midpoint of the difficulty bin."""

    def total(self, kind: str) -> int:
        return sum(self.counts.get(kind, {}).values())

    def mean_difficulty(self, kind: str) -> float | None:
        """Mean difficulty of a kind; compared with the submitted units it shows whether easy or hard tasks were
        lost."""
        bins = self.counts.get(kind, {})
        total = sum(bins.values())
        return sum(middle * count for middle, count in bins.items()) / total if total else None


def count(connection: Connection, kind: str, difficulties: Iterable[float], width: float, by: int = 1) -> None:
    bins = Counter((math.floor(difficulty / width) + 0.5) * width for difficulty in difficulties)
    rows = [{"kind": kind, "difficulty": middle, "num_units": by * bins[middle]} for middle in sorted(bins)]
    add_up(connection, tally_table, rows, "num_units")


def read_tally(connection: Connection) -> Tally:
    counts: dict[str, dict[float, int]] = {}
    for kind, middle, number in connection.execute(select(tally_table).order_by(*tally_table.primary_key)):
        if number:
            counts.setdefault(kind, {})[middle] = number
    return Tally(counts)


Key = TypeVar("Key")


class Watch(Generic[Key]):
    """Measures how long values have stayed unchanged, by the monotonic clock of the observing process.

    The clocks of machines and databases are adjusted at times, even by an hour. So a lease counts as unrenewed, and a
    unit as stuck, only after one process has seen it unchanged for that long; a restarted process starts counting from
    zero.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[Key, tuple[object, float]] = {}

    def unchanged_s(self, values: Mapping[Key, object]) -> dict[Key, float]:
        """Seconds since each key was first seen with its current value; keys that are not in `values` are forgotten."""
        now_s = self._clock()
        self._since = {
            key: known if (known := self._since.get(key)) is not None and known[0] == value else (value, now_s)
            for key, value in values.items()
        }
        return {key: now_s - since_s for key, (_, since_s) in self._since.items()}

    def restart(self) -> None:
        """Forget every key."""
        self._since = {}


_QUEUE = select(queue_table).where(queue_table.c.id == QUEUE_ID)
LOCKED_QUEUE = _QUEUE.with_for_update()
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
"""Column values of an episode without recorded data; its attempt counters are not among them."""


def lock_queue(connection: Connection) -> QueueRow:
    """Lock and return the pool's counters: no other process changes them or claims a batch until this transaction
    ends."""
    return connection.execute(LOCKED_QUEUE).one()


def read_queue(connection: Connection) -> QueueRow:
    return connection.execute(_QUEUE).one()


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


def lease(connection: Connection, config: PoolConfig, worker: str, num_episodes: int, now_s: float) -> list[Lease]:
    """Lease the oldest queued episodes to this worker."""
    episode = episode_table.c
    ids = connection.execute(
        select(episode.id)
        .where(in_state(episode.state, EpisodeState.QUEUED))
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
    running = select(episode.id).where(in_state(episode.state, EpisodeState.RUNNING), episode.worker == worker)
    return _leases(connection, list(connection.execute(running).scalars()))


def leases_in(connection: Connection, units: Sequence[int]) -> list[Lease]:
    """Leases of all episodes of these units, in any state."""
    query = select(episode_table.c.id).where(episode_table.c.unit.in_(units))
    return _leases(connection, list(connection.execute(query).scalars()))


def renew(connection: Connection, config: PoolConfig, leases: Sequence[Lease], now_s: float) -> list[Lease]:
    """Renew leases; returns the lost ones, whose attempts the caller must cancel."""
    if not leases:
        return []
    episode = episode_table.c
    pairs = sorted((lease.episode, lease.attempt) for lease in leases)
    renewed = connection.execute(
        update(episode_table)
        .where(tuple_(episode.id, episode.attempt).in_(pairs), episode.state == EpisodeState.RUNNING)
        .values(lease_until_s=now_s + config.lease_s)
        .returning(episode.id)
    ).scalars()
    renewed_ids = set(renewed)
    return [lease for lease in leases if lease.episode not in renewed_ids]


def _leases(connection: Connection, episode_ids: Sequence[int]) -> list[Lease]:
    if not episode_ids:
        return []
    joined = episode_table.join(unit_table, episode_table.c.unit == unit_table.c.id)
    query = select(*LEASE_COLUMNS).select_from(joined).where(episode_table.c.id.in_(episode_ids))
    return [read_lease(row) for row in connection.execute(query.order_by(episode_table.c.id))]


def fail_attempt(
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
    current = [episode.id == lease.episode, episode.attempt == lease.attempt, episode.state == EpisodeState.RUNNING]
    if until_s is not None:
        current.append(episode.lease_until_s == until_s)
    counter = episode.num_deaths if is_death else episode.num_failures
    num_before = connection.execute(select(counter).where(*current).with_for_update()).scalar_one_or_none()
    if num_before is None:
        raise LeaseLostError(describe_loss(connection, lease))
    values = {counter.name: num_before + 1, "failure": storable(failure)}
    limit = config.max_deaths if is_death else config.max_failures
    if num_before + 1 < limit:
        move_episodes(connection, EpisodeState.QUEUED, *current, **FRESH | values)
        connection.execute(delete(call_table).where(call_table.c.episode == lease.episode))
        return EpisodeState.QUEUED
    move_episodes(connection, EpisodeState.FAILED, *current, lease_until_s=None, **values)
    drop_group(connection, config, unit.group_name, DropReason.FAILED)
    return EpisodeState.FAILED


def running(connection: Connection) -> dict[tuple[int, int], float]:
    """Expiry of the leases of running attempts, by episode and attempt."""
    episode = episode_table.c
    query = select(episode.id, episode.attempt, episode.lease_until_s)
    rows = connection.execute(query.where(in_state(episode.state, EpisodeState.RUNNING)))
    return {(row.id, row.attempt): row.lease_until_s for row in rows}


def running_workers(connection: Connection) -> dict[str, str]:
    """The worker of each running attempt, by the attempt's name."""
    episode = episode_table.c
    joined = episode_table.join(unit_table, episode.unit == unit_table.c.id)
    query = select(episode.name, episode.attempt, unit_table.c.origin, episode.worker).select_from(joined)
    rows = connection.execute(query.where(in_state(episode.state, EpisodeState.RUNNING)))
    return {attempt_name(row.name, row.attempt, row.origin): row.worker for row in rows}


def leases_on(connection: Connection, episode_ids: Sequence[int]) -> list[Lease]:
    """Leases of these episodes, sorted by unit, which is the lock order."""
    return sorted(_leases(connection, episode_ids), key=lambda lease: lease.unit)


def drop_group(connection: Connection, config: PoolConfig, group: str, reason: DropReason) -> int:
    """Drop all untrained units of a group; returns how many. Other tasks replace those of a stage (`replace`)."""
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
    for position, row in enumerate(rows, queue.next_place):
        values = {"place": position, "num_unfinished": row.size, "num_unrewarded": row.size, "oldest_step": None}
        values |= {"num_requeues": row.num_requeues + 1, "taken_before": queue.num_taken}
        move_units(connection, UnitState.OPEN, unit_table.c.id == row.id, **values)
        move_episodes(connection, EpisodeState.QUEUED, episode.unit == row.id, **FRESH)
        ids = select(episode.id).where(episode.unit == row.id).scalar_subquery()
        connection.execute(delete(call_table).where(call_table.c.episode.in_(ids)))
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
        return f"{lease.name}: the episode is no longer in the pool"
    return f"{lease.name}: refused; the episode is {row.state}, at attempt {row.attempt}"


_ADD_EPISODES = insert(episode_table)


@dataclass(frozen=True, slots=True)
class UnreplacedGroup:
    """Units of a group that was dropped and not yet replaced."""

    group: str
    stage: str
    domain: Domain
    num_units: int
    num_skips: int
    """Number of consecutive groups without signal in this slot, including this group."""
    context: int | None = None
    """Maximum tokens of prompt plus completion, as in `Queued`."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A new unit's slot in the curriculum."""

    stage: str | None
    num_skips: int = 0
    context: int | None = None


class _Added:
    """The groups that one transaction queues."""

    def __init__(self, position: int) -> None:
        self.position = position
        """The first free queue position."""
        self.names: list[str] = []
        self._episodes: list[dict[str, object]] = []
        self._difficulties: list[float] = []

    def add_group(
        self, connection: Connection, queue: QueueRow, task: Task, num_episodes: int, size: int, slot: Slot
    ) -> None:
        """`size`: number of episodes per unit."""
        group = f"g{self.position}"
        for first in range(0, num_episodes, size):
            unit = add_unit(connection, queue, Origin.LOOP, group, task, size, self.position, slot)
            self._episodes += [fresh_episode(unit, f"{group}-{index}") for index in range(first, first + size)]
            self.note(task.difficulty)
        self.names.append(group)

    def note(self, difficulty: float) -> None:
        """Record that a unit took the next queue position."""
        self.position += 1
        self._difficulties.append(difficulty)

    def write(self, connection: Connection, config: PoolConfig, note: str | None) -> None:
        if self._episodes:
            connection.execute(_ADD_EPISODES, self._episodes)
        connection.execute(update(queue_table).values(next_place=self.position))
        count(connection, SUBMITTED, self._difficulties, config.difficulty_bin)
        if note is not None:
            connection.execute(delete(note_table))
            connection.execute(insert(note_table).values(id=QUEUE_ID, text=note))


def put(
    connection: Connection,
    config: PoolConfig,
    tasks: Sequence[tuple[Task, int] | Queued],
    note: str | None = None,
    stage: str | None = None,
) -> list[str]:
    """Tasks in, queued units out: batches of a stage, and replacements for dropped units.

        trained(stage, domain) + queued(stage, domain) + unreplaced(stage, domain) = submitted in batches(stage, domain)

    Units get consecutive queue positions in the order of submission. Every dropped unit of a stage, whatever the
    reason, is replaced: `replace` queues another task of the same stage and domain at the end of the queue. So the
    equation above always holds, and training finds exactly the units that the batches of a stage were drawn with. If
    deployed agents' groups are admitted, each takes the slot of a drawn task of its domain. The caller passes the
    transaction in which these functions run.

    Queue groups, each a task and its number of episodes, and return their names. `note` replaces the stored note.
    """
    queue, groups = lock_queue(connection), [Queued(*item) for item in tasks]
    if any(group.num_episodes < 1 for group in groups):
        raise RecordError(
            f"a group: expected 1 episode or more, received {min(group.num_episodes for group in groups)}"
        )
    sizes = [unit_size(config, group.num_episodes) for group in groups]
    num_units = sum(group.num_episodes // size for group, size in zip(groups, sizes, strict=True))
    # Units that a restore returned may have overfilled the queue.
    room = max(0, config.window.queue - num_queued(connection))
    if num_units > room:
        raise StateError(f"the queue has room for {room} of {config.window.queue} units, not for {num_units}")
    waiting = _deployed(connection) if config.admit_deployed else {}
    added = _Added(queue.next_place)
    for (task, num_episodes, context), size in zip(groups, sizes, strict=True):
        num_slots = num_episodes // size
        admitted, waiting[task.domain] = _cut(waiting.get(task.domain, []), num_slots)
        for unit, difficulty in admitted:
            values = {"place": added.position, "is_queued": True, "taken_before": queue.num_taken, "stage": stage}
            connection.execute(update(unit_table).where(unit_table.c.id == unit).values(values))
            added.note(difficulty)
        if len(admitted) < num_slots:
            num_remaining = num_episodes - len(admitted) * size
            added.add_group(connection, queue, task, num_remaining, size, Slot(stage, context=context))
    added.write(connection, config, note)
    return added.names


def unreplaced(connection: Connection) -> list[UnreplacedGroup]:
    """Dropped units of a stage that wait for a replacement, by group, oldest first."""
    unit = unit_table.c
    columns = (unit.id, unit.group_name, unit.stage, unit.domain, unit.num_skips, unit.reason, unit.context)
    rows = connection.execute(select(*columns).where(unit.is_owed).order_by(unit.place)).all()
    num_units = Counter(row.group_name for row in rows)
    firsts = {row.group_name: row for row in reversed(rows)}
    return [_unreplaced(firsts[group], num) for group, num in num_units.items()]


def _unreplaced(row: Row[Any], num_units: int) -> UnreplacedGroup:
    num_skips = row.num_skips + 1 if row.reason == DropReason.NO_SIGNAL else 0
    return UnreplacedGroup(row.group_name, row.stage, Domain(row.domain), num_units, num_skips, row.context)


def replace(
    connection: Connection,
    config: PoolConfig,
    replacements: Sequence[tuple[UnreplacedGroup, Task, int]],
    note: str | None = None,
) -> list[str]:
    """Queue a task with its number of episodes to replace each dropped group, even if a restore has overfilled the
    queue, because training may be waiting for exactly these."""
    queue = lock_queue(connection)
    unit = unit_table.c
    added = _Added(queue.next_place)
    for missing, task, num_episodes in replacements:
        if task.domain != missing.domain:
            raise RecordError(
                f"{missing.group}: expected a task of the domain {missing.domain}, received {task.domain}"
            )
        settled = update(unit_table).where(unit.group_name == missing.group, unit.is_owed).values(is_owed=False)
        if connection.execute(settled).rowcount != missing.num_units:
            raise StateError(
                f"{missing.group}: expected {missing.num_units} units to replace, and the pool has another number by "
                "now; read `unreplaced` again"
            )
        slot = Slot(missing.stage, missing.num_skips, missing.context)
        added.add_group(connection, queue, task, num_episodes, unit_size(config, num_episodes), slot)
    added.write(connection, config, note)
    return added.names


def read_note(connection: Connection) -> str | None:
    return connection.execute(select(note_table.c.text)).scalar_one_or_none()


def _deployed(connection: Connection) -> dict[str, list[tuple[int, float]]]:
    """Ids and difficulties of deployed agents' rewarded units that wait for a slot, by domain, oldest first."""
    unit = unit_table.c
    is_waiting = (unit.state == UnitState.READY, unit.place.is_(None))
    query = select(unit.id, unit.domain, unit.difficulty).where(*is_waiting).order_by(unit.id)
    waiting: dict[str, list[tuple[int, float]]] = {}
    for id, domain, difficulty in connection.execute(query.with_for_update()).all():
        waiting.setdefault(domain, []).append((id, difficulty))
    return waiting


def _cut(waiting: list[tuple[int, float]], num: int) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    return waiting[:num], waiting[num:]


def unit_size(config: PoolConfig, num_episodes: int) -> int:
    """Number of episodes per unit of a group of `num_episodes`."""
    return 1 if config.window.unit == "episode" else num_episodes


def add_unit(
    connection: Connection,
    queue: QueueRow,
    origin: Origin,
    group: str,
    task: Task,
    size: int,
    position: int | None,
    slot: Slot,
) -> int:
    values = {
        "place": position,
        "is_queued": position is not None,
        "is_owed": False,
        "group_name": group,
        "origin": origin,
        "stage": slot.stage,
        "domain": task.domain,
        "difficulty": float(task.difficulty),
        "task": task_text(task),
        "context": slot.context,
        "state": UnitState.OPEN,
        "size": size,
        "num_unfinished": size,
        "num_unrewarded": size,
        "num_requeues": 0,
        "num_skips": slot.num_skips,
        "taken_before": queue.num_taken,
        "num_bytes": 0,
    }
    id: int = connection.execute(insert(unit_table).values(values).returning(unit_table.c.id)).scalar_one()
    return id


def fresh_episode(unit: int, name: str) -> dict[str, object]:
    """The row of an episode that no worker has attempted."""
    counts = {"attempt": 0, "num_failures": 0, "num_deaths": 0}
    return {"name": name, "unit": unit, "state": EpisodeState.QUEUED, **counts, **FRESH}
