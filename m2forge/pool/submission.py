"""Tasks in, queued units out: batches of a stage, and replacements for dropped units.

    trained(stage, domain) + queued(stage, domain) + owed(stage, domain) = submitted in batches(stage, domain)

Units get consecutive queue positions in the order of submission. A dropped unit of a stage is owed, whatever the
reason: `replace` queues another task of the same stage and domain at the end of the queue. So the equation above always
holds, and training finds exactly the units that the batches of a stage were drawn with. If deployed agents' groups are
admitted, each takes the slot of a drawn task of its domain. The caller passes the transaction in which these functions
run.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from m2forge.errors import RecordError
from m2forge.pool.config import PoolConfig
from m2forge.pool.queue import FRESH, QueueRow, lock_queue, num_queued
from m2forge.pool.schema import QUEUE_ID, episode_table, note_table, queue_table, unit_table
from m2forge.pool.state import DropReason, EpisodeState, Origin, StateError, UnitState
from m2forge.pool.stored import Queued, task_text
from m2forge.pool.tally import SUBMITTED, count
from m2forge.records import Domain, Task

_ADD_EPISODES = insert(episode_table)


@dataclass(frozen=True, slots=True)
class Owed:
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

    def __init__(self, place: int) -> None:
        self.place = place
        """The first free queue position."""
        self.names: list[str] = []
        self._episodes: list[dict[str, object]] = []
        self._difficulties: list[float] = []

    def add_group(
        self, connection: Connection, queue: QueueRow, task: Task, num_episodes: int, size: int, slot: Slot
    ) -> None:
        """`size`: number of episodes per unit."""
        group = f"g{self.place}"
        for first in range(0, num_episodes, size):
            unit = add_unit(connection, queue, Origin.LOOP, group, task, size, self.place, slot)
            self._episodes += [fresh_episode(unit, f"{group}-{index}") for index in range(first, first + size)]
            self.note(task.difficulty)
        self.names.append(group)

    def note(self, difficulty: float) -> None:
        """Record that a unit took the next queue position."""
        self.place += 1
        self._difficulties.append(difficulty)

    def write(self, connection: Connection, config: PoolConfig, note: str | None) -> None:
        if self._episodes:
            connection.execute(_ADD_EPISODES, self._episodes)
        connection.execute(update(queue_table).values(next_place=self.place))
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
    """Queue groups, each a task and its number of episodes, and return their names. `note` replaces the stored note."""
    queue, groups = lock_queue(connection), [Queued(*given) for given in tasks]
    if any(given.num_episodes < 1 for given in groups):
        raise RecordError("a group: expected one episode or more")
    sizes = [unit_size(config, given.num_episodes) for given in groups]
    num_units = sum(given.num_episodes // size for given, size in zip(groups, sizes, strict=True))
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
            values = {"place": added.place, "is_queued": True, "taken_before": queue.num_taken, "stage": stage}
            connection.execute(update(unit_table).where(unit_table.c.id == unit).values(values))
            added.note(difficulty)
        if len(admitted) < num_slots:
            num_left = num_episodes - len(admitted) * size
            added.add_group(connection, queue, task, num_left, size, Slot(stage, context=context))
    added.write(connection, config, note)
    return added.names


def owed(connection: Connection) -> list[Owed]:
    """Dropped units of a stage that wait for a replacement, by group, oldest first."""
    unit = unit_table.c
    columns = (unit.id, unit.group_name, unit.stage, unit.domain, unit.num_skips, unit.reason, unit.context)
    rows = connection.execute(select(*columns).where(unit.is_owed).order_by(unit.place)).all()
    num_units = Counter(row.group_name for row in rows)
    firsts = {row.group_name: row for row in reversed(rows)}
    return [_owed(firsts[group], num) for group, num in num_units.items()]


def _owed(row: Row[Any], num_units: int) -> Owed:
    num_skips = row.num_skips + 1 if row.reason == DropReason.NO_SIGNAL else 0
    return Owed(row.group_name, row.stage, Domain(row.domain), num_units, num_skips, row.context)


def replace(
    connection: Connection, config: PoolConfig, given: Sequence[tuple[Owed, Task, int]], note: str | None = None
) -> list[str]:
    """Queue a task with its number of episodes to replace each owed group, even if a restore has overfilled the queue,
    because training may be waiting for exactly these."""
    queue = lock_queue(connection)
    unit = unit_table.c
    added = _Added(queue.next_place)
    for debt, task, num_episodes in given:
        if task.domain != debt.domain:
            raise RecordError(f"{debt.group}: expected a task of the domain {debt.domain}, received {task.domain}")
        settled = update(unit_table).where(unit.group_name == debt.group, unit.is_owed).values(is_owed=False)
        if connection.execute(settled).rowcount != debt.num_units:
            raise StateError(
                f"{debt.group}: other units than these {debt.num_units} are owed by now; read `owed` again"
            )
        slot = Slot(debt.stage, debt.num_skips, debt.context)
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
    found: dict[str, list[tuple[int, float]]] = {}
    for id, domain, difficulty in connection.execute(query.with_for_update()).all():
        found.setdefault(domain, []).append((id, difficulty))
    return found


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
    place: int | None,
    slot: Slot,
) -> int:
    values = {
        "place": place,
        "is_queued": place is not None,
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
