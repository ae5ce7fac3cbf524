"""The queue and its window, current state and history: rows of the pool in, JSON out.

    head(s) = the first position that was not consumed when the batch of step s was taken

A unit trained by step s is consumed by that batch; one dropped after step s is consumed before the batch of s + 1. So
the window's history follows from the units that retention has not removed. Within a batch the window moves as its head
is taken: positions from head(s) to head(s + 1) + W − 1 can have been reached.
"""

import bisect
import math
from collections import defaultdict
from itertools import accumulate

from sqlalchemy import Connection, func, select

from m2forge.pool.config import PoolConfig
from m2forge.pool.lifecycle import UnitState
from m2forge.pool.queue import read_queue, read_tally
from m2forge.pool.tables import episode_table, unit_table
from m2forge.records import JsonValue

MAX_UNITS = 512
"""Maximum number of queued units to list individually."""
MAX_TAKEN = 4000
"""Maximum number of trained units to list individually, the latest."""
MAX_PLACES = 8000
"""Number of positions that the history covers; bounded, since the page polls it."""


def queue_now(connection: Connection, config: PoolConfig) -> dict[str, JsonValue]:
    unit, window = unit_table.c, config.window
    row = read_queue(connection)
    wanted = ("place", "state", "group_name", "domain", "difficulty", "size", "num_unfinished", "oldest_step")
    query = select(*(unit[name] for name in wanted)).where(unit.is_queued).order_by(unit.place).limit(MAX_UNITS)
    units: list[JsonValue] = [
        {
            "place": found.place,
            "state": found.state,
            "group": found.group_name,
            "domain": found.domain,
            "difficulty": found.difficulty,
            "size": found.size,
            "num_ended": found.size - found.num_unfinished,
            "oldest_step": found.oldest_step,
        }
        for found in connection.execute(query)
    ]
    states = select(episode_table.c.state, func.count()).group_by(episode_table.c.state)
    tally = read_tally(connection)
    training = select(func.count()).where(unit.state == UnitState.TRAINING)
    return {
        "unit": window.unit,
        "queue": window.queue,
        "window": window.size,
        "max_staleness": window.max_staleness,
        "units": units,
        "num_queued": connection.execute(select(func.count()).where(unit.is_queued)).scalar_one(),
        "num_training": connection.execute(training).scalar_one(),
        "next_place": row.next_place,
        "num_taken": row.num_taken,
        "step": row.step,
        "durable_step": row.durable_step,
        "episodes": {row.state: row[1] for row in connection.execute(states)},
        "tally": {
            kind: {"num_units": tally.total(kind), "mean_difficulty": tally.mean_difficulty(kind)}
            for kind in tally.counts
        },
    }


def queue_past(connection: Connection, config: PoolConfig) -> dict[str, JsonValue]:
    """The positions that each step trained, the window's position, and the rewards of the domains."""
    unit = unit_table.c
    first = read_queue(connection).next_place - MAX_PLACES
    columns = (unit.place, unit.state, unit.step, unit.domain, unit.lag, unit.reason)
    rows = connection.execute(select(*columns).where(unit.place >= first).order_by(unit.place)).all()
    consumed = [(row.place, _consumed_at(row.state, row.step)) for row in rows]
    taken = [row for row in rows if row.state == UnitState.TRAINED]
    steps = sorted({row.step for row in taken})
    lost = [row for row in rows if row.state == UnitState.DROPPED]
    return {
        "window": config.window.size,
        "taken": [[row.step, row.place, row.domain, row.lag] for row in taken[-MAX_TAKEN:]],
        "lost": [[row.step, row.place, row.domain, row.reason] for row in lost[-MAX_TAKEN:]],
        "steps": list(steps),
        "heads": list(_heads(consumed, [*steps, steps[-1] + 1])) if steps else [],
        "rewards": _domain_rewards(connection, first),
    }


def _consumed_at(state: str, step: int | None) -> float:
    if state == UnitState.TRAINED and step is not None:
        return float(step)
    return math.inf if state != UnitState.DROPPED or step is None else step + 0.5


def _heads(consumed: list[tuple[int, float]], steps: list[int]) -> list[int]:
    """For each step the first position consumed at it or later; the position after the last if all are consumed."""
    latest = list(accumulate((at for _, at in consumed), max))
    places = [place for place, _ in consumed]
    found = [bisect.bisect_left(latest, step) for step in steps]
    return [places[index] if index < len(places) else places[-1] + 1 for index in found]


def _domain_rewards(connection: Connection, first: int) -> dict[str, JsonValue]:
    """For each domain [step, mean reward, episodes], by the step that trained them."""
    unit, episode = unit_table.c, episode_table.c
    query = (
        select(unit.domain, unit.step, func.avg(episode.reward_total), func.count(episode.reward_total))
        .join(episode_table, episode.unit == unit.id)
        .where(unit.state == UnitState.TRAINED, unit.place >= first)
        .group_by(unit.domain, unit.step)
        .order_by(unit.domain, unit.step)
    )
    rewards: dict[str, list[JsonValue]] = defaultdict(list)
    for domain, step, mean, number in connection.execute(query):
        if mean is not None:
            rewards[domain].append([step, mean, number])
    return dict(rewards)
