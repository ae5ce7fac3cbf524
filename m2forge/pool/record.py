"""What happens to an attempt: calls appended, its end, its reward. Each is refused where the attempt is not the
episode's any more. These functions run inside the transaction that is handed to them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from sqlalchemy import Connection, Integer, Update, bindparam, case, func, insert, or_, select, update

from m2forge.errors import M2ForgeError, RecordError
from m2forge.pool.config import PoolConfig
from m2forge.pool.delta import StoredCall
from m2forge.pool.queue import describe_loss, drop_group, lock_unit
from m2forge.pool.schema import call_table, episode_table, unit_table
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
from m2forge.pool.stored import Lease, Outcome, reward_text
from m2forge.records import Reward


def _extending() -> Update:
    """Count calls of an attempt that is under way, if they are its next ones. A step that is NULL changes nothing."""
    episode = episode_table.c
    step = bindparam("added_step", type_=Integer)
    return (
        update(episode_table)
        .where(
            episode.id == bindparam("of_episode"),
            episode.attempt == bindparam("of_attempt"),
            episode.num_calls == bindparam("first"),
            episode.state == EpisodeState.RUNNING,
        )
        .values(
            num_calls=episode.num_calls + bindparam("added_calls"),
            num_tokens=episode.num_tokens + bindparam("added_tokens"),
            num_bytes=episode.num_bytes + bindparam("added_bytes"),
            oldest_step=case(
                (or_(episode.oldest_step.is_(None), episode.oldest_step > step), step), else_=episode.oldest_step
            ),
        )
    )


# Made once, because making them costs several times what the database takes to run them.
_EXTEND = _extending()
_STORE = insert(call_table)


@dataclass(frozen=True, slots=True)
class Append:
    lease: Lease
    call: StoredCall


def append(connection: Connection, appends: Sequence[Append]) -> list[M2ForgeError | None]:
    """Store calls; for each None, or why it was refused, which keeps none of the others.

    One that is stored already is not stored again: who does not know whether a transaction went through may repeat it.
    """
    order = sorted(range(len(appends)), key=lambda n: (appends[n].lease.episode, appends[n].call.ordinal))
    runs = [list(run) for _, run in groupby(order, lambda n: (appends[n].lease.episode, appends[n].lease.attempt))]
    refused: list[M2ForgeError | None] = [None] * len(appends)
    if appends and not _extend_all(connection, [[appends[place] for place in run] for run in runs]):
        for run in runs:
            reason = _extend_one(connection, [appends[place] for place in run])
            for place in run:
                refused[place] = reason
    return refused


def _extend_all(connection: Connection, runs: Sequence[Sequence[Append]]) -> bool:
    """Store the calls of several attempts at once, if every one of them is in order; else nothing."""
    if not all(_is_consecutive(run) for run in runs):
        return False
    # An attempt alone is counted or not; of several some may be, which is taken back.
    savepoint = connection.begin_nested() if len(runs) > 1 else None
    is_whole = connection.execute(_EXTEND, [_numbers(run) for run in runs]).rowcount == len(runs)
    if is_whole:
        connection.execute(_STORE, [_row(item) for run in runs for item in run])
    if savepoint is not None:
        savepoint.commit() if is_whole else savepoint.rollback()
    return is_whole


def _extend_one(connection: Connection, run: Sequence[Append]) -> M2ForgeError | None:
    """Store those calls of an attempt that are not stored yet, or say why none of them can be."""
    episode, lease = episode_table.c, run[0].lease
    here = (episode.id == lease.episode, episode.attempt == lease.attempt, episode.state == EpisodeState.RUNNING)
    num_calls = connection.execute(select(episode.num_calls).where(*here).with_for_update()).scalar_one_or_none()
    if num_calls is None:
        return LeaseLostError(describe_loss(connection, lease))
    left = [item for item in run if item.call.ordinal >= num_calls]
    if not left:
        return None
    if not _is_consecutive(left) or connection.execute(_EXTEND, _numbers(left)).rowcount != 1:
        ordinals = [item.call.ordinal for item in left]
        return RecordError(f"{lease.name}: expected call {num_calls} next, received {ordinals}")
    connection.execute(_STORE, [_row(item) for item in left])
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


def _row(item: Append) -> dict[str, object]:
    lease, call = item.lease, item.call
    return {"episode": lease.episode, "attempt": lease.attempt, "ordinal": call.ordinal, "data": call.data}


def finish(connection: Connection, config: PoolConfig, lease: Lease, outcome: Outcome, now_s: float) -> None:
    """End an attempt. Ending it again changes nothing."""
    unit = lock_unit(connection, lease.unit)
    episode = episode_table.c
    here = (episode.id == lease.episode, episode.attempt == lease.attempt)
    moved = move_episodes(
        connection,
        EpisodeState.FINISHED,
        *here,
        episode.state == EpisodeState.RUNNING,
        lease_until_s=None,
        finished_s=now_s,
        failure=outcome.failure,
        artifacts=json.dumps(dict(outcome.artifacts)),
    )
    if not moved:
        is_over = connection.execute(select(episode.id).where(*here, episode.state == EpisodeState.FINISHED)).first()
        if is_over is None:
            raise LeaseLostError(describe_loss(connection, lease))
    else:
        values = {"num_unfinished": unit.num_unfinished - 1}
        connection.execute(update(unit_table).where(unit_table.c.id == unit.id).values(values))
    if outcome.reward is not None:
        reward(connection, config, lease, outcome.reward, outcome.step_rewards)


def reward(
    connection: Connection, config: PoolConfig, lease: Lease, given: Reward, step_rewards: Sequence[float] | None
) -> None:
    """Reward a finished attempt. The same reward may come again; another one is refused."""
    unit = lock_unit(connection, lease.unit)
    episode = episode_table.c
    here = (episode.id == lease.episode, episode.attempt == lease.attempt)
    row = connection.execute(select(episode.state, episode.num_calls, episode.reward).where(*here)).one_or_none()
    if row is None or row.state in (EpisodeState.DROPPED, EpisodeState.FAILED):
        raise LeaseLostError(describe_loss(connection, lease))
    if row.reward is not None:
        if row.reward != reward_text(given):
            raise StateError(f"{lease.name}: it has a reward already, another one than {given.total}")
        return
    if row.state != EpisodeState.FINISHED:
        raise StateError(f"{lease.name}: expected an episode that is finished, it is {row.state}")
    if step_rewards is not None and len(step_rewards) != row.num_calls:
        raise RecordError(
            f"{lease.name}: step_rewards: expected one per call, {row.num_calls}, received {len(step_rewards)}"
        )
    values = {
        "reward": reward_text(given),
        "reward_total": given.total,
        "step_rewards": None if step_rewards is None else json.dumps(list(step_rewards), allow_nan=False),
    }
    connection.execute(update(episode_table).where(*here).values(values))
    left = {"num_unrewarded": unit.num_unrewarded - 1}
    connection.execute(update(unit_table).where(unit_table.c.id == unit.id).values(left))
    if unit.num_unrewarded == 1:
        _settle(connection, config, unit.id)


def _settle(connection: Connection, config: PoolConfig, unit_id: int) -> None:
    """All of a unit is rewarded: it is ready, or of no use."""
    unit, episode = unit_table.c, episode_table.c
    row = connection.execute(select(unit_table).where(unit.id == unit_id)).one()
    totals = (func.min(episode.reward_total), func.max(episode.reward_total))
    query = select(*totals, func.min(episode.oldest_step), func.sum(episode.num_bytes)).where(episode.unit == unit_id)
    least, most, oldest_step, num_bytes = connection.execute(query).one()
    is_flat = row.size > 1 and most - least <= config.window.signal_spread
    if is_flat and config.window.no_signal == "skip":
        drop_group(connection, config, row.group_name, DropReason.NO_SIGNAL)
    elif row.origin == Origin.DEPLOYED and not config.admit_deployed:
        drop_group(connection, config, row.group_name, DropReason.NOT_ADMITTED)
    else:
        values = {"oldest_step": oldest_step, "num_bytes": num_bytes}
        move_units(connection, UnitState.READY, unit.id == unit_id, unit.state == UnitState.OPEN, **values)
