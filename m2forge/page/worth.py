"""The advantages of an episode's calls, as its trainer computed them from the rewards of its group.

The trainer compares the episodes of a group within a batch (`forge/learner.py`); so does this, with the same function.
An episode that is not in a batch yet is compared with its whole group.
"""

import json
from collections.abc import Sequence

from sqlalchemy import Connection, select

from m2forge.pool.schema import episode_table, unit_table
from m2forge.reward.advantage import episode_advantages
from m2forge.reward.config import AdvantageConfig


def advantages_of(connection: Connection, episode: int, config: AdvantageConfig) -> list[float] | None:
    """One number per call; None while the episode, or another of its group, has no reward."""
    own, unit = episode_table.c, unit_table.c
    here = connection.execute(
        select(unit.group_name, unit.batch).join(episode_table, own.unit == unit.id).where(own.id == episode)
    ).one_or_none()
    if here is None:
        return None
    if here.batch is None:
        wanted = unit.group_name == here.group_name
    elif config.normalisation == "batch_std":
        wanted = unit.batch == here.batch
    else:
        wanted = (unit.batch == here.batch) & (unit.group_name == here.group_name)
    rows = connection.execute(
        select(own.id, unit.group_name, own.step_rewards)
        .join(unit_table, own.unit == unit.id)
        .where(wanted)
        .order_by(unit.place, unit.id, own.id)
    ).all()
    groups: dict[str, list[Sequence[float]]] = {}
    names: dict[str, list[int]] = {}
    for row in rows:
        if row.step_rewards is None:
            return None
        groups.setdefault(row.group_name, []).append(json.loads(row.step_rewards))
        names.setdefault(row.group_name, []).append(row.id)
    found = episode_advantages(list(groups.values()), config)
    place = [id for ids in names.values() for id in ids].index(episode)
    return [float(value) for value in found[place]]
