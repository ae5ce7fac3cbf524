"""Records an attempt: its calls, its end, its reward. Each is refused if another attempt of the episode has begun. The
caller passes the transaction in which these functions run.

`end_all` stores complete attempts, several at a time, and `reward_unit` rewards all attempts of a unit: a statement
costs about as much for all of them as for one. On PostgreSQL `end_alone` and `append_alone` do what `end_all` and
`append_all` do, in one statement that is a transaction of its own: each round trip to the server costs both sides more
than the work that it asks for, and on a saturated machine waits for a core twice.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

from sqlalchemy import (
    BindParameter,
    Connection,
    Integer,
    Text,
    Update,
    bindparam,
    case,
    func,
    or_,
    select,
    update,
)

from m2forge.errors import M2ForgeError, RecordError
from m2forge.pool.config import PoolConfig
from m2forge.pool.dialect import ChangedError, Database, add_calls
from m2forge.pool.lifecycle import (
    DropReason,
    EpisodeState,
    LeaseLostError,
    Origin,
    StateError,
    UnitState,
    move_episodes,
    move_units,
)
from m2forge.pool.queue import UnitRow, describe_loss, drop_group, lock_unit
from m2forge.pool.stored import Lease, Outcome, StoredCall, reward_text
from m2forge.pool.tables import episode_table, fork_table, unit_table
from m2forge.records import Reward


def _extending() -> Update:
    """Add calls to the counters of a running attempt if they are its next ones. A NULL step leaves `oldest_step`
    unchanged."""
    episode = episode_table.c
    step, fork = bindparam("added_step", type_=Integer), select(fork_table.c.step).scalar_subquery()
    counted = case((fork < step, fork), else_=step)
    return (
        _running()
        .where(episode.num_calls == bindparam("first"))
        .values(
            num_calls=episode.num_calls + bindparam("added_calls"),
            num_tokens=episode.num_tokens + bindparam("added_tokens"),
            num_bytes=episode.num_bytes + bindparam("added_bytes"),
            oldest_step=case(
                (or_(episode.oldest_step.is_(None), episode.oldest_step > counted), counted), else_=episode.oldest_step
            ),
        )
    )


def _running() -> Update:
    episode = episode_table.c
    return update(episode_table).where(
        episode.id == bindparam("of_episode"),
        episode.attempt == bindparam("of_attempt"),
        episode.state == EpisodeState.RUNNING,
    )


def _ending(update: Update) -> Update:
    return update.values(
        state=EpisodeState.FINISHED,
        lease_until_s=None,
        finished_s=bindparam("at_s"),
        failure=bindparam("new_failure", type_=Text),
        artifacts=bindparam("new_artifacts"),
    )


def _rewarding() -> Update:
    values: dict[str, BindParameter[object]] = {
        name: bindparam(f"new_{name}") for name in ("reward", "reward_total", "step_rewards")
    }
    return update(episode_table).where(episode_table.c.id == bindparam("of_episode")).values(values)


def _counting_down() -> Update:
    unit = unit_table.c
    num_unfinished = unit.num_unfinished - bindparam("num_ended", type_=Integer)
    return update(unit_table).where(unit.id == bindparam("of_unit")).values(num_unfinished=num_unfinished)


# Built once, because building them costs several times what the database takes to run them.
_EXTEND = _extending()
_END, _EXTEND_AND_END = _ending(_running()), _ending(_extending())
_REWARD = _rewarding()
_COUNT_DOWN = _counting_down()


_STORING = """
    added AS MATERIALIZED (
        SELECT * FROM json_to_recordset(CAST(%(rows)s AS json)) AS added(
            of_episode bigint, of_attempt integer, first integer,
            added_calls integer, added_tokens bigint, added_bytes bigint, added_step integer,
            at_s double precision, new_failure text, new_artifacts text
        )
    ), episodes AS MATERIALIZED (
        SELECT id FROM episode WHERE id = ANY(ARRAY(SELECT of_episode FROM added {after})) ORDER BY id FOR UPDATE
    ), moved AS (
        UPDATE episode SET
            num_calls = num_calls + coalesce(added_calls, 0),
            num_tokens = num_tokens + coalesce(added_tokens, 0),
            num_bytes = num_bytes + coalesce(added_bytes, 0),
            oldest_step = CASE WHEN added_step IS NULL THEN oldest_step
                ELSE least(oldest_step, added_step, (SELECT step FROM fork)) END
            {ending}
        FROM added
        WHERE id = of_episode AND id = ANY(ARRAY(SELECT id FROM episodes))
            AND attempt = of_attempt AND state = 'running' AND num_calls = coalesce(first, num_calls)
        RETURNING id
    ), stored AS (
        INSERT INTO call (episode, attempt, ordinal, data)
        SELECT episode, attempt, ordinal, substring(CAST(%(data)b AS bytea) FROM first_byte FOR num_bytes)
        FROM json_to_recordset(CAST(%(calls)s AS json)) AS made(
            episode bigint, attempt integer, ordinal integer, first_byte integer, num_bytes integer
        )
    )
"""
_APPEND_ALONE = f"""
    WITH {_STORING.format(after="", ending="")}
    SELECT 1 / CAST((SELECT count(*) FROM moved) = %(num_rows)s AS integer)
"""
_LOCKED_UNITS = "WHERE (SELECT count(*) FROM units) = %(num_units)s"
_ENDED = """,
            state = 'finished', lease_until_s = NULL, failure = new_failure, artifacts = new_artifacts,
            finished_s = coalesce(at_s, extract(epoch FROM clock_timestamp()))
"""
_END_ALONE = f"""
    WITH counted AS MATERIALIZED (
        SELECT * FROM json_to_recordset(CAST(%(counts)s AS json)) AS counted(of_unit bigint, num_ended integer)
    ), units AS MATERIALIZED (
        SELECT id FROM unit WHERE id = ANY(ARRAY(SELECT of_unit FROM counted)) ORDER BY place, id FOR UPDATE
    ), {_STORING.format(after=_LOCKED_UNITS, ending=_ENDED)}, counted_down AS (
        UPDATE unit SET num_unfinished = num_unfinished - num_ended
        FROM counted
        WHERE id = of_unit AND id = ANY(ARRAY(SELECT id FROM units))
        RETURNING id, num_unfinished
    )
    SELECT
        1 / CAST((SELECT count(*) FROM moved) = %(num_rows)s AS integer),
        ARRAY(SELECT id FROM counted_down WHERE num_unfinished = 0)
"""
"""Both divide by zero if an attempt is not in the expected state."""


@dataclass(frozen=True, slots=True)
class Append:
    lease: Lease
    call: StoredCall


@dataclass(frozen=True, slots=True)
class Ending:
    """An attempt that has ended, with those of its calls that are not yet stored."""

    lease: Lease
    calls: tuple[StoredCall, ...]
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Rewarding:
    lease: Lease
    reward: Reward
    step_rewards: tuple[float, ...] | None = None
    """Step rewards, one per call."""


class SomeRefused(Exception):
    """Some of several attempts cannot be stored: the caller rolls the transaction back and stores them one by one."""


def _runs(appends: Sequence[Append]) -> list[list[int]]:
    """Indices of the calls of each attempt, in order."""
    order = sorted(range(len(appends)), key=lambda n: (appends[n].lease.episode, appends[n].call.ordinal))
    return [list(run) for _, run in groupby(order, lambda n: (appends[n].lease.episode, appends[n].lease.attempt))]


def append_all(connection: Connection, appends: Sequence[Append]) -> None:
    """Store calls of several attempts at once; raises `SomeRefused`."""
    runs = _consecutive_runs(appends)
    if runs and connection.execute(_EXTEND, [_numbers(run) for run in runs]).rowcount != len(runs):
        raise SomeRefused
    add_calls(connection, [_row(item) for run in runs for item in run])


def append_alone(database: Database, appends: Sequence[Append]) -> None:
    """As `append_all`."""
    runs = _consecutive_runs(appends)
    _execute_alone(database, _APPEND_ALONE, [_numbers(run) for run in runs], runs)


def _consecutive_runs(appends: Sequence[Append]) -> list[list[Append]]:
    runs = [[appends[index] for index in run] for run in _runs(appends)]
    if not all(map(_is_consecutive, runs)):
        raise SomeRefused
    return runs


def append_each(connection: Connection, appends: Sequence[Append]) -> list[M2ForgeError | None]:
    """Store calls; returns for each None or the error that refused it, which does not affect other attempts.

    A call that is already stored is skipped, so a caller that does not know whether a transaction committed may retry.
    """
    refused: list[M2ForgeError | None] = [None] * len(appends)
    for run in _runs(appends):
        reason = _extend_one(connection, [appends[index] for index in run])
        for index in run:
            refused[index] = reason
    return refused


def _extend_one(connection: Connection, run: Sequence[Append]) -> M2ForgeError | None:
    """Store those calls of an attempt that are not yet stored, or return the error that refuses all of them."""
    episode, lease = episode_table.c, run[0].lease
    current = (episode.id == lease.episode, episode.attempt == lease.attempt, episode.state == EpisodeState.RUNNING)
    num_calls = connection.execute(select(episode.num_calls).where(*current).with_for_update()).scalar_one_or_none()
    if num_calls is None:
        return LeaseLostError(describe_loss(connection, lease))
    unstored = [item for item in run if item.call.ordinal >= num_calls]
    if not unstored:
        return None
    if not _is_consecutive(unstored) or connection.execute(_EXTEND, _numbers(unstored)).rowcount != 1:
        ordinals = [item.call.ordinal for item in unstored]
        return RecordError(f"{lease.name}: expected call {num_calls} next, received {ordinals}")
    add_calls(connection, [_row(item) for item in unstored])
    return None


def _is_consecutive(run: Sequence[Append]) -> bool:
    return all(item.call.ordinal == run[0].call.ordinal + index for index, item in enumerate(run))


def _numbers(run: Sequence[Append]) -> dict[str, int | None]:
    lease, calls = run[0].lease, [item.call for item in run]
    return {
        "of_episode": lease.episode,
        "of_attempt": lease.attempt,
        "first": calls[0].ordinal,
        "added_calls": len(calls),
        "added_tokens": sum(call.num_tokens for call in calls),
        "added_bytes": sum(len(call.data) for call in calls),
        "added_step": min((call.oldest_step for call in calls if call.oldest_step is not None), default=None),
    }


def _execute_alone(
    database: Database,
    statement: str,
    rows: Sequence[Mapping[str, object]],
    runs: Sequence[Sequence[Append]],
    **values: object,
) -> Sequence[Any]:
    """Execute one of the statements above. Numbers and texts travel as JSON, whose type never changes, so that the
    server plans the statement once."""
    calls, first_byte = [], 1
    for item in chain.from_iterable(runs):
        lease, num_bytes = item.lease, len(item.call.data)
        keys = {"episode": lease.episode, "attempt": lease.attempt, "ordinal": item.call.ordinal}
        calls.append({**keys, "first_byte": first_byte, "num_bytes": num_bytes})
        first_byte += num_bytes
    values |= {"rows": json.dumps(rows), "num_rows": len(rows), "calls": json.dumps(calls)}
    values["data"] = b"".join(item.call.data for item in chain.from_iterable(runs))
    try:
        return database.execute_alone(statement, values)
    except ChangedError as error:
        raise SomeRefused from error


def _row(item: Append) -> tuple[int, int, int, bytes]:
    return item.lease.episode, item.lease.attempt, item.call.ordinal, item.call.data


def end_each(
    connection: Connection, config: PoolConfig, endings: Sequence[Ending], now_s: float
) -> list[bool | M2ForgeError]:
    """Store calls and outcomes of attempts; returns for each whether its unit may now be complete, or the error that
    refused it, which does not affect the others. An attempt is stored completely or not at all, and skipped if it is
    already stored."""
    results: list[bool | M2ForgeError] = [True] * len(endings)
    for n in sorted(range(len(endings)), key=lambda n: endings[n].lease.episode):
        savepoint = connection.begin_nested()
        try:
            _end_one(connection, config, endings[n], now_s)
        except M2ForgeError as error:
            savepoint.rollback()
            results[n] = error
        else:
            savepoint.commit()
    return results


def end_all(connection: Connection, endings: Sequence[Ending], now_s: float) -> list[bool]:
    """Store all attempts at once; returns for each whether its unit is now complete. Raises `SomeRefused`."""
    rows, runs = _end_rows(endings, now_s)
    num_ended = Counter(ending.lease.unit for ending in endings)
    unit = unit_table.c
    units = select(unit.id, unit.num_unfinished).where(unit.id.in_(num_ended)).order_by(unit.place, unit.id)
    num_remaining = {
        row.id: row.num_unfinished - num_ended[row.id] for row in connection.execute(units.with_for_update())
    }
    if len(num_remaining) != len(num_ended):
        raise SomeRefused
    for statement, chosen in (
        (_EXTEND_AND_END, [row for row in rows if "first" in row]),
        (_END, [row for row in rows if "first" not in row]),
    ):
        if chosen and connection.execute(statement, chosen).rowcount != len(chosen):
            raise SomeRefused
    add_calls(connection, [_row(item) for run in runs for item in run])
    connection.execute(_COUNT_DOWN, [{"of_unit": id, "num_ended": num} for id, num in sorted(num_ended.items())])
    return [num_remaining[ending.lease.unit] == 0 for ending in endings]


def end_alone(database: Database, endings: Sequence[Ending], now_s: float | None) -> list[bool]:
    """As `end_all`; the time is the database's if `now_s` is None."""
    rows, runs = _end_rows(endings, now_s)
    num_ended = Counter(ending.lease.unit for ending in endings)
    counts = [{"of_unit": unit, "num_ended": num} for unit, num in num_ended.items()]
    _, complete = _execute_alone(database, _END_ALONE, rows, runs, counts=json.dumps(counts), num_units=len(counts))
    return [ending.lease.unit in complete for ending in endings]


def _end_rows(endings: Sequence[Ending], now_s: float | None) -> tuple[list[dict[str, object]], list[list[Append]]]:
    """What each attempt changes in its episode, and its calls, by episode."""
    order = sorted(endings, key=lambda ending: ending.lease.episode)
    runs = [[Append(ending.lease, call) for call in ending.calls] for ending in order]
    if any(ending.outcome.reward is not None for ending in order) or not all(map(_is_consecutive, runs)):
        raise SomeRefused
    rows = [_end_row(ending, now_s) | (_numbers(run) if run else {}) for ending, run in zip(order, runs, strict=True)]
    return rows, runs


def _end_one(connection: Connection, config: PoolConfig, ending: Ending, now_s: float) -> None:
    # Lock the unit first, as the lock order requires.
    lock_unit(connection, ending.lease.unit)
    appends = [Append(ending.lease, call) for call in ending.calls]
    reason = None if _is_over(connection, ending.lease) else next(filter(None, append_each(connection, appends)), None)
    if reason is not None:
        raise reason
    finish(connection, config, ending.lease, ending.outcome, now_s)


def _is_over(connection: Connection, lease: Lease) -> bool:
    episode = episode_table.c
    current = (episode.id == lease.episode, episode.attempt == lease.attempt, episode.state == EpisodeState.FINISHED)
    return connection.execute(select(episode.id).where(*current)).first() is not None


def _end_row(ending: Ending, now_s: float | None) -> dict[str, object]:
    return {
        "of_episode": ending.lease.episode,
        "of_attempt": ending.lease.attempt,
        "at_s": now_s,
        "new_failure": ending.outcome.stored_failure,
        "new_artifacts": json.dumps(dict(ending.outcome.artifacts)),
    }


def finish(connection: Connection, config: PoolConfig, lease: Lease, outcome: Outcome, now_s: float) -> None:
    """End an attempt; idempotent."""
    unit = lock_unit(connection, lease.unit)
    episode = episode_table.c
    current = (episode.id == lease.episode, episode.attempt == lease.attempt)
    moved = move_episodes(
        connection,
        EpisodeState.FINISHED,
        *current,
        episode.state == EpisodeState.RUNNING,
        lease_until_s=None,
        finished_s=now_s,
        failure=outcome.stored_failure,
        artifacts=json.dumps(dict(outcome.artifacts)),
    )
    if not moved:
        if not _is_over(connection, lease):
            raise LeaseLostError(describe_loss(connection, lease))
    else:
        values = {"num_unfinished": unit.num_unfinished - 1}
        connection.execute(update(unit_table).where(unit_table.c.id == unit.id).values(values))
    if outcome.reward is not None:
        reward(connection, config, lease, outcome.reward, outcome.step_rewards)


def reward(
    connection: Connection, config: PoolConfig, lease: Lease, new_reward: Reward, step_rewards: Sequence[float] | None
) -> None:
    """Reward a finished attempt. Idempotent for the same reward; a different one is refused."""
    unit = lock_unit(connection, lease.unit)
    episode = episode_table.c
    current = (episode.id == lease.episode, episode.attempt == lease.attempt)
    row = connection.execute(select(episode.state, episode.num_calls, episode.reward).where(*current)).one_or_none()
    if row is None or row.state in (EpisodeState.DROPPED, EpisodeState.FAILED):
        raise LeaseLostError(describe_loss(connection, lease))
    if row.reward is not None:
        if row.reward != reward_text(new_reward):
            raise StateError(f"{lease.name}: it already has another reward, received {new_reward.total}")
        return
    if row.state != EpisodeState.FINISHED:
        raise StateError(f"{lease.name}: expected a finished episode, received one that is {row.state}")
    if step_rewards is not None and len(step_rewards) != row.num_calls:
        raise RecordError(
            f"{lease.name}: step_rewards: expected one per call, {row.num_calls}, received {len(step_rewards)}"
        )
    _store_rewards(
        connection, config, unit, [Rewarding(lease, new_reward, None if step_rewards is None else tuple(step_rewards))]
    )


def reward_unit(connection: Connection, config: PoolConfig, rewards: Sequence[Rewarding]) -> None:
    """Reward finished attempts of one unit; raises if one is refused, so that none is rewarded."""
    unit = lock_unit(connection, rewards[0].lease.unit)
    episode = episode_table.c
    query = select(episode.id, episode.attempt, episode.num_calls).where(
        episode.unit == unit.id, episode.state == EpisodeState.FINISHED, episode.reward.is_(None)
    )
    open_calls = {(row.id, row.attempt): row.num_calls for row in connection.execute(query)}
    num_calls = {
        (item.lease.episode, item.lease.attempt): None if item.step_rewards is None else len(item.step_rewards)
        for item in rewards
    }
    is_plain = len(num_calls) == len(rewards) and all(
        attempt in open_calls and num in (None, open_calls[attempt]) for attempt, num in num_calls.items()
    )
    if is_plain:
        _store_rewards(connection, config, unit, rewards)
        return
    for item in rewards:
        reward(connection, config, item.lease, item.reward, item.step_rewards)


def _store_rewards(connection: Connection, config: PoolConfig, unit: UnitRow, rewards: Sequence[Rewarding]) -> None:
    """Store rewards that have been validated."""
    rows = [
        {
            "of_episode": item.lease.episode,
            "new_reward": reward_text(item.reward),
            "new_reward_total": item.reward.total,
            "new_step_rewards": None
            if item.step_rewards is None
            else json.dumps(list(item.step_rewards), allow_nan=False),
        }
        for item in rewards
    ]
    connection.execute(_REWARD, sorted(rows, key=itemgetter("of_episode")))
    num_remaining = unit.num_unrewarded - len(rewards)
    connection.execute(update(unit_table).where(unit_table.c.id == unit.id).values(num_unrewarded=num_remaining))
    if not num_remaining:
        _settle(connection, config, unit.id)


def _settle(connection: Connection, config: PoolConfig, unit_id: int) -> None:
    """Make a fully rewarded unit ready, or drop it."""
    unit, episode = unit_table.c, episode_table.c
    row = connection.execute(select(unit_table).where(unit.id == unit_id)).one()
    totals = (func.min(episode.reward_total), func.max(episode.reward_total))
    sums = (func.sum(episode.num_bytes), func.sum(episode.num_tokens))
    query = select(*totals, func.min(episode.oldest_step), *sums).where(episode.unit == unit_id)
    least, most, oldest_step, num_bytes, num_tokens = connection.execute(query).one()
    is_flat = row.size > 1 and most - least <= config.window.signal_spread
    if is_flat and config.window.no_signal == "skip" and row.num_skips < config.window.max_skips:
        drop_group(connection, config, row.group_name, DropReason.NO_SIGNAL)
    elif row.origin == Origin.DEPLOYED and not config.admit_deployed:
        drop_group(connection, config, row.group_name, DropReason.NOT_ADMITTED)
    else:
        values = {"oldest_step": oldest_step, "num_bytes": num_bytes, "num_tokens": num_tokens}
        move_units(connection, UnitState.READY, unit.id == unit_id, unit.state == UnitState.OPEN, **values)
