"""Batches of ready units in window order, committed with the policy version that they trained.

    claim      units of the window → training, in one transaction; two processes never get the same unit
    commit     → trained, with the policy version, in one transaction; a batch is committed once, a step has one batch
    restore    the trainer resumed from a checkpoint: units it has not trained on return to ready, at their old position

The current weights train on a unit once: it is trained exactly if the current weights descend from the version that it
was committed with. The epoch counts restores; a batch claimed under an earlier epoch is refused.

Staleness is a distance in steps along the lineage of the current weights. A token records the step that sampled it;
after a restore that version may be lost, and its step number is reused for other weights. Such a token counts as
sampled at the step where its version left the lineage, the newest that both descend from; one of another lineage counts
as sampled at step 0. The loop calls `rejoin` once the sampler serves the lineage again. Until then every token after
that step counts so, and so do those of attempts that are running then. At worst a token counts as older than it is.

The caller passes the transaction in which these functions run.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Select,
    and_,
    bindparam,
    case,
    cast,
    delete,
    func,
    insert,
    literal,
    or_,
    select,
    update,
)

from m2forge.pool.config import PoolConfig
from m2forge.pool.dialect import Query, begin_with, end_with
from m2forge.pool.lifecycle import (
    DropReason,
    EpisodeState,
    Origin,
    StateError,
    UnitState,
    move_episodes,
    move_units,
)
from m2forge.pool.queue import (
    LOCKED_QUEUE,
    TRAINED,
    QueueRow,
    UnitRow,
    Watch,
    count,
    drop_group,
    lock_queue,
    requeue_group,
)
from m2forge.pool.stored import make_label, split_label
from m2forge.pool.tables import QUEUE_ID, batch_table, episode_table, fork_table, queue_table, unit_table
from m2forge.pool.window import Unit, Window
from m2forge.records import PolicyVersion


@dataclass(frozen=True, slots=True)
class Claim:
    """A batch of units that this process trains."""

    id: int
    epoch: int
    units: tuple[int, ...]
    """Unit ids in queue order."""


@dataclass(frozen=True, slots=True)
class Restored:
    num_returned: int
    """Number of units that returned to ready."""
    num_deleted: int
    """Number of units that the restored weights have not trained on, but that retention has deleted."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Requirements of a batch."""

    num_units: int
    quotas: Callable[[int], Mapping[str, int]] | None = None
    """Maps a batch size in units to the number of units per label."""
    max_tokens: int | None = None
    """Token limit; with it a batch has as many units as fit, at least one and at most `num_units`."""

    def take(self, window: Window) -> list[Unit]:
        if self.max_tokens is not None:
            return window.take_within(self.max_tokens, self.num_units, self.quotas)
        return window.take(self.num_units, None if self.quotas is None else self.quotas(self.num_units))


def claim(
    connection: Connection,
    config: PoolConfig,
    wanted: Wanted,
    version: PolicyVersion,
    now_s: Callable[[], float],
    watch: Watch[int],
) -> Claim | None:
    """Claim a batch for weights at `version`; None while the window holds too few finished units. `watch`: how long
    each unfinished unit, by queue position, has been observed; used to give up stragglers."""
    first = _QUEUED if wanted.max_tokens is None else _QUEUED_WITH_TOKENS
    queries: list[Query] = [(first, {"num_rows": config.window.size + wanted.num_units})]
    is_sqlite = connection.dialect.name == "sqlite"
    if not is_sqlite:
        queries.append((_NEXT_BATCH, {}))
    (queue,), rows, *batch = begin_with(connection, (LOCKED_QUEUE, {}), *queries)
    _require_lineage(queue, version)
    rows = _with_rare_labels(connection, rows, config.window.size, wanted)
    by_position = {row.place: row for row in rows}
    window = Window(config.window.size, [_unit(row) for row in rows], queue.num_taken)
    if config.window.max_staleness is not None:
        stale = window.give_up_stale(version.step - config.window.max_staleness)
        _give_up(
            connection, config, [by_position[unit.position] for unit in stale], config.window.stale, DropReason.STALE
        )
    taken = wanted.take(window)
    open_s = {}
    if config.window.straggler != "wait":
        open_s = watch.unchanged_s({unit.position: None for unit in window if not unit.is_finished})
    while not taken and config.window.straggler != "wait":
        # Only an unfinished head can be a straggler; the batch may be waiting for another unit.
        head = window.head
        if head is None or head.is_finished or open_s[head.position] <= config.window.straggler_s:
            break
        row = by_position[head.position]
        if not _is_straggler(connection, config, row, now_s()) or not _lock(connection, [row], UnitState.OPEN):
            break
        given_up = [by_position[unit.position] for unit in window.give_up(head.position)]
        _give_up(connection, config, given_up, config.window.straggler, DropReason.STRAGGLER)
        taken = wanted.take(window)
    chosen = [by_position[unit.position] for unit in taken]
    if not chosen:
        return None
    if not is_sqlite:
        return _take_at_end(connection, queue, chosen, batch[0][0].id)
    return _take(connection, queue, chosen) if _lock(connection, chosen, UnitState.READY) else None


def _lock(connection: Connection, rows: Sequence[UnitRow], state: UnitState) -> bool:
    """Lock units; returns whether all are still in this state, as they were when they were read. Locking all of the
    window instead would wait for each attempt that is being stored."""
    unit = unit_table.c
    query = select(unit.state).where(unit.id.in_([row.id for row in rows])).order_by(unit.place).with_for_update()
    states = connection.execute(query).scalars().all()
    return len(states) == len(rows) and {*states} == {state}


def _take(connection: Connection, queue: QueueRow, rows: Sequence[UnitRow]) -> Claim:
    values = {"epoch": queue.epoch, "num_units": len(rows), "is_open": True}
    batch: int = connection.execute(insert(batch_table).values(values).returning(batch_table.c.id)).scalar_one()
    ids = [row.id for row in rows]
    unit = unit_table.c
    # As in `Window.lag`: all units taken before this one or with it.
    lag = queue.num_taken + len(rows) - 1 - unit.taken_before
    moved = move_units(connection, UnitState.TRAINING, unit.id.in_(ids), batch=batch, is_queued=False, lag=lag)
    size = sum(row.size for row in rows)
    moved_episodes = move_episodes(connection, EpisodeState.TRAINING, episode_table.c.unit.in_(ids))
    assert (moved, moved_episodes) == (len(ids), size), "units that were locked changed"
    connection.execute(update(queue_table).values(num_taken=queue.num_taken + len(rows)))
    return Claim(batch, queue.epoch, tuple(ids))


_NEXT_BATCH = select(func.nextval(func.pg_get_serial_sequence("batch", "id")).label("id"))
_TAKE = """
    WITH locked AS MATERIALIZED (
        SELECT id, state FROM unit WHERE id = ANY(%(units)s::bigint[]) ORDER BY place FOR UPDATE
    ), made AS (
        INSERT INTO batch (id, epoch, num_units, is_open) VALUES (%(batch)s, %(epoch)s, %(num_units)s, TRUE)
    ), units AS (
        UPDATE unit SET state = 'training', batch = %(batch)s, is_queued = FALSE,
            lag = %(num_taken)s - 1 - taken_before
        WHERE id = ANY(ARRAY(SELECT id FROM locked WHERE state = 'ready')) RETURNING id
    ), episodes AS (
        UPDATE episode SET state = 'training'
        WHERE unit = ANY(ARRAY(SELECT id FROM units)) AND coalesce(state, '') = 'finished' RETURNING id
    ), counted AS (
        UPDATE queue SET num_taken = %(num_taken)s
    )
    SELECT CASE
        WHEN 1 / CAST((SELECT count(*) FROM units) = %(num_units)s AS integer) = 1
            AND (SELECT count(*) FROM episodes) <> %(num_episodes)s
        THEN CAST('episodes of locked units changed: ' || (SELECT count(*) FROM episodes) AS integer)
    END
"""
"""Divides by zero if a unit is no longer ready."""


def _take_at_end(connection: Connection, queue: QueueRow, rows: Sequence[UnitRow], batch: int) -> Claim:
    """As `_lock` and `_take`, in the round trip to PostgreSQL that also commits. A unit that changes while the
    statement waits for its lock is seen as it is afterwards; the transaction then fails with `ChangedError`."""
    claimed = Claim(batch, queue.epoch, tuple(row.id for row in rows))
    values = {
        "units": list(claimed.units),
        "batch": batch,
        "epoch": queue.epoch,
        "num_units": len(rows),
        "num_taken": queue.num_taken + len(rows),
        "num_episodes": sum(row.size for row in rows),
    }
    end_with(connection, _TAKE, values)
    return claimed


def _queued(num_tokens: ColumnElement[int]) -> Select[Any]:
    unit = unit_table.c
    columns = (unit.id, unit.place, unit.group_name, unit.origin, unit.stage, unit.domain, unit.state, unit.size)
    query = select(*columns, unit.oldest_step, unit.taken_before, num_tokens.label("num_tokens"))
    return query.where(unit.is_queued).order_by(unit.place).limit(bindparam("num_rows"))


def _unit_tokens() -> ColumnElement[int]:
    """Tokens of a finished unit; they are added up only where an earlier version finished it."""
    unit, episode = unit_table.c, episode_table.c
    total = select(func.coalesce(func.sum(episode.num_tokens), 0)).where(episode.unit == unit.id).scalar_subquery()
    return case((unit.state == UnitState.READY, func.coalesce(unit.num_tokens, cast(total, BigInteger))), else_=0)


_QUEUED, _QUEUED_WITH_TOKENS = _queued(literal(0)), _queued(_unit_tokens())


def _with_rare_labels(connection: Connection, rows: Sequence[UnitRow], size: int, wanted: Wanted) -> Sequence[UnitRow]:
    """The units that a batch may be chosen from: the first W + n queued units for a batch of n, which are `rows`, plus
    later units of labels that are rare among those, queried by label."""
    if wanted.quotas is None or len(rows) < size + wanted.num_units:
        return rows
    unit, query = unit_table.c, _QUEUED if wanted.max_tokens is None else _QUEUED_WITH_TOKENS
    rows = list(rows)
    num_in_window, behind = Counter(make_label(row.stage, row.domain) for row in rows), rows[-1].place
    for label, quota in wanted.quotas(wanted.num_units).items():
        # A smaller batch may hold one unit more of a label, by rounding.
        if num_in_window[label] <= quota:
            stage, domain = split_label(label)
            of_label = query.where(unit.place > behind, unit.stage.is_not_distinct_from(stage), unit.domain == domain)
            rows += connection.execute(of_label.limit(quota + 1)).all()
    return sorted(rows, key=lambda row: row.place)


def _unit(row: UnitRow) -> Unit:
    # Unpacked, since a window has many rows, and access to a column by its name costs as much as the rest.
    values: tuple[Any, ...] = tuple(row)
    _, position, group, _, stage, domain, state, _, oldest_step, taken_before, num_tokens = values
    label, is_finished = make_label(stage, domain), state == UnitState.READY
    return Unit(position, group, label, is_finished, oldest_step, taken_before, num_tokens)


def _is_straggler(connection: Connection, config: PoolConfig, row: UnitRow, now_s: float) -> bool:
    started = select(func.min(episode_table.c.started_s)).where(episode_table.c.unit == row.id)
    started_s = connection.execute(started).scalar_one()
    return started_s is not None and now_s - started_s > config.window.straggler_s


def _give_up(
    connection: Connection, config: PoolConfig, rows: Sequence[UnitRow], policy: str, reason: DropReason
) -> None:
    origins = {row.group_name: row.origin for row in rows}
    for group, origin in origins.items():
        # The loop cannot make a deployed agent retry.
        if policy == "requeue" and origin == Origin.LOOP:
            requeue_group(connection, config, group)
        else:
            drop_group(connection, config, group, reason)


def commit(connection: Connection, config: PoolConfig, claimed: Claim, version: PolicyVersion) -> None:
    """Mark a batch as trained: its step produced `version`."""
    queue = lock_queue(connection)
    _require_lineage(queue, version)
    if claimed.epoch != queue.epoch:
        raise StateError(f"batch {claimed.id} was claimed before the pool was restored; claim another batch")
    if version.step <= queue.step:
        raise StateError(
            f"step {version.step} of {version.lineage!r} is committed; commit a batch as step {queue.step + 1}, or "
            "restore the pool to the version that the weights are at"
        )
    batch, unit, episode = batch_table.c, unit_table.c, episode_table.c
    named = {"lineage": version.lineage, "step": version.step}
    closing = update(batch_table).where(batch.id == claimed.id, batch.is_open).values(is_open=False, **named)
    if connection.execute(closing).rowcount != 1:
        raise StateError(f"batch {claimed.id} is committed already; claim another batch")
    rows = connection.execute(select(unit.id, unit.difficulty).where(unit.batch == claimed.id)).all()
    ids = [row.id for row in rows]
    moved = move_units(connection, UnitState.TRAINED, unit.id.in_(ids), **named)
    move_episodes(connection, EpisodeState.TRAINED, episode.unit.in_(ids))
    if moved != len(claimed.units):
        raise StateError(
            f"batch {claimed.id}: only {moved} of {len(claimed.units)} units still belong to it; restore the pool to "
            "the version that the weights are at, and claim another batch"
        )
    connection.execute(update(queue_table).values(named))
    count(connection, TRAINED, [row.difficulty for row in rows], config.difficulty_bin)


def restore(connection: Connection, config: PoolConfig, version: PolicyVersion) -> Restored:
    """Restore the pool to weights at `version`: return units that they have not trained on, invalidate open batches."""
    queue = lock_queue(connection)
    refuse_behind(queue, version)
    batch, unit = batch_table.c, unit_table.c
    is_trained = and_(unit.lineage == version.lineage, unit.step <= version.step)
    untrained = and_(unit.state == UnitState.TRAINED, ~is_trained)
    difficulties = connection.execute(select(unit.difficulty).where(untrained)).scalars().all()
    is_batch_trained = and_(batch.lineage == version.lineage, batch.step <= version.step)
    undone = and_(batch.lineage.is_not(None), ~is_batch_trained)
    num_undone = connection.execute(select(func.coalesce(func.sum(batch.num_units), 0)).where(undone)).scalar_one()
    returned = _return(connection, or_(untrained, unit.state == UnitState.TRAINING))
    connection.execute(
        update(batch_table).where(or_(batch.is_open, undone)).values(is_open=False, lineage=None, step=None)
    )
    if queue.lineage not in (None, version.lineage):
        fork(connection, 0)
    elif version.step < queue.step:
        fork(connection, version.step)
    values = {"epoch": queue.epoch + 1, "lineage": version.lineage, "step": version.step}
    connection.execute(update(queue_table).values(durable_step=version.step, **values))
    count(connection, TRAINED, difficulties, config.difficulty_bin, by=-1)
    return Restored(returned, int(num_undone) - len(difficulties))


def fork(connection: Connection, step: int) -> None:
    """Record that versions after `step` are lost while the sampler may still serve one of them. Running attempts get
    the step as their oldest, too: the statement that ends one may have read an empty `fork` before this commits."""
    before = connection.execute(select(fork_table.c.step)).scalar_one_or_none()
    connection.execute(delete(fork_table))
    connection.execute(insert(fork_table).values(id=QUEUE_ID, step=step if before is None else min(before, step)))
    unit, episode = unit_table.c, episode_table.c
    is_running, is_later = episode.state == EpisodeState.RUNNING, episode.oldest_step > step
    of_episodes = or_(is_later, and_(is_running, episode.oldest_step.is_(None)))
    for table, order, locked, dated in (
        (unit_table, unit.place, unit.oldest_step > step, unit.oldest_step > step),
        (episode_table, episode.id, or_(is_later, is_running), of_episodes),
    ):
        connection.execute(select(table.c.id).where(locked).order_by(order).with_for_update()).all()
        connection.execute(update(table).where(dated).values(oldest_step=step))


def rejoin(connection: Connection, epoch: int) -> None:
    """Record that the sampler serves a version published under `epoch`; does nothing if the epoch has changed. Running
    attempts may hold tokens of lost versions, which are stored when they end."""
    queue, episode = lock_queue(connection), episode_table.c
    step = connection.execute(select(fork_table.c.step)).scalar_one_or_none()
    if queue.epoch != epoch or step is None:
        return
    is_running = episode.state == EpisodeState.RUNNING
    connection.execute(select(episode.id).where(is_running).order_by(episode.id).with_for_update()).all()
    may_be_later = or_(episode.oldest_step.is_(None), episode.oldest_step > step)
    connection.execute(update(episode_table).where(is_running, may_be_later).values(oldest_step=step))
    connection.execute(delete(fork_table))


def _return(connection: Connection, where: ColumnElement[bool]) -> int:
    """Return units to their old positions; units submitted since then no longer count them as taken."""
    unit = unit_table.c
    connection.execute(select(unit.id).where(where).order_by(unit.place).with_for_update()).all()
    move_episodes(connection, EpisodeState.FINISHED, episode_table.c.unit.in_(select(unit.id).where(where)))
    values = {"is_queued": True, "batch": None, "lag": None, "lineage": None, "step": None}
    moved = move_units(connection, UnitState.READY, where, **values)
    connection.execute(update(queue_table).values(num_taken=queue_table.c.num_taken - moved))
    num_taken = select(queue_table.c.num_taken).scalar_subquery()
    is_ahead = and_(unit.is_queued, unit.taken_before > num_taken)
    connection.execute(update(unit_table).where(is_ahead).values(taken_before=num_taken))
    return moved


def batch_sizes(connection: Connection, lineage: str) -> list[int]:
    """Number of units of each committed batch in step order, including batches whose units were deleted since."""
    batch = batch_table.c
    query = select(batch.num_units).where(batch.lineage == lineage).order_by(batch.step)
    return list(connection.execute(query).scalars())


def mark_durable(connection: Connection, version: PolicyVersion) -> None:
    """Record that a checkpoint of `version` is on disk, so that the units it trained on will not return."""
    queue = lock_queue(connection)
    _require_lineage(queue, version)
    connection.execute(update(queue_table).values(durable_step=max(queue.durable_step, version.step)))


def refuse_behind(queue: QueueRow, version: PolicyVersion) -> None:
    """Raise if the pool lacks commits of the checkpoint's steps, because it would train their units again."""
    if queue.lineage in (None, version.lineage) and queue.step < version.step:
        raise StateError(
            f"the pool has lost commits: its last one is step {queue.step}, and the checkpoint is of step "
            f"{version.step} of {version.lineage!r}; restore the pool's database of this run, or remove the "
            f"checkpoints after step {queue.step}, or start a new run from the checkpoint's model"
        )


def _require_lineage(queue: QueueRow, version: PolicyVersion) -> None:
    if queue.lineage not in (None, version.lineage):
        raise StateError(
            f"the pool follows the weights of {queue.lineage!r}, received a version of {version.lineage!r}; restore "
            f"the pool to a version of {version.lineage!r} first, or use the pool of that run"
        )
