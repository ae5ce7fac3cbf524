"""Stores groups of a deployed agent's episodes, which the loop did not start, with their rewards in one transaction.
A stored group waits for a slot of its domain (`pool/queue.py`). The caller passes the transaction.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection, insert, select

from m2forge.errors import ExistsError, M2ForgeError, RecordError
from m2forge.pool.config import PoolConfig
from m2forge.pool.lifecycle import EpisodeState, Origin, move_episodes
from m2forge.pool.queue import Slot, add_unit, fresh_episode, leases_in, read_queue, unit_size
from m2forge.pool.record import Ending, Rewarding, end_each, reward_unit
from m2forge.pool.stored import Outcome, StoredCall
from m2forge.pool.tables import episode_table
from m2forge.records import Reward, Task


@dataclass(frozen=True, slots=True)
class DeployedEpisode:
    name: str
    calls: tuple[StoredCall, ...]
    reward: Reward
    step_rewards: tuple[float, ...]
    """Step rewards, one per call."""
    failure: str | None = None
    artifacts: Mapping[str, str] = field(default_factory=dict)
    """See `Outcome`."""


def known(connection: Connection, names: Collection[str]) -> set[str]:
    """The subset of `names` that are episodes of the pool."""
    query = select(episode_table.c.name).where(episode_table.c.name.in_(list(names)))
    return set(connection.execute(query).scalars())


def add_deployed(
    connection: Connection,
    config: PoolConfig,
    group: str,
    task: Task,
    episodes: Sequence[DeployedEpisode],
    now_s: float,
) -> None:
    """Store attempts at one task as a group; refuses the whole group if any name is already stored."""
    if not episodes:
        raise RecordError(f"{group}: expected one episode or more")
    stored = known(connection, [episode.name for episode in episodes])
    if stored:
        raise ExistsError(f"{group}: the episodes {sorted(stored)} are stored already; each is stored once")
    size = unit_size(config, len(episodes))
    for first in range(0, len(episodes), size):
        part = episodes[first : first + size]
        unit = add_unit(connection, read_queue(connection), Origin.DEPLOYED, group, task, size, None, Slot(None))
        connection.execute(insert(episode_table), [fresh_episode(unit, episode.name) for episode in part])
        move_episodes(connection, EpisodeState.RUNNING, episode_table.c.unit == unit, attempt=1, started_s=now_s)
        by_name = {lease.name: lease for lease in leases_in(connection, [unit])}
        leases = [by_name[episode.name] for episode in part]
        pairs = list(zip(leases, part, strict=True))
        endings = [
            Ending(lease, episode.calls, Outcome(failure=episode.failure, artifacts=episode.artifacts))
            for lease, episode in pairs
        ]
        for refusal in end_each(connection, config, endings, now_s):
            if isinstance(refusal, M2ForgeError):
                raise refusal
        reward_unit(
            connection, config, [Rewarding(lease, episode.reward, episode.step_rewards) for lease, episode in pairs]
        )
