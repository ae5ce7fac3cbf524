"""What the pool returns: leases on queued episodes, and units with their calls, outcomes and rewards."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import NamedTuple

from sqlalchemy import Connection, Row, select

from m2forge.errors import RecordError
from m2forge.pool.delta import CallWriter, read_tree
from m2forge.pool.schema import call_table, episode_table, unit_table
from m2forge.pool.state import Origin
from m2forge.records import Domain, Episode, Reward, Task
from m2forge.tree.token_tree import TokenTree


class Queued(NamedTuple):
    """A group to queue."""

    task: Task
    num_episodes: int
    context: int | None = None
    """Maximum tokens of prompt plus completion; None: the model's limit."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to record one attempt of an episode."""

    episode: int
    unit: int
    attempt: int
    name: str
    """Name of the attempt, unique to it, so that each attempt is a separate gateway episode with its own API key."""
    group: str
    task: Task
    worker: str
    num_calls: int = 0
    """Number of recorded calls when the lease was read."""
    context: int | None = None
    """Maximum tokens of prompt plus completion; None: the model's limit."""

    def writer(self, vocab_size: int) -> CallWriter:
        return CallWriter(vocab_size, self.num_calls)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended."""

    failure: str | None = None
    """Why the attempt failed, for example a timeout; such an attempt counts, with its reward, like the others."""
    artifacts: Mapping[str, str] = field(default_factory=dict)
    """Artifacts of the attempt by name, such as the answer."""
    reward: Reward | None = None
    """Reward of the attempt; None if it is given later."""
    step_rewards: tuple[float, ...] | None = None
    """Step rewards, one per call."""

    def __post_init__(self) -> None:
        if self.reward is None and self.step_rewards is not None:
            raise RecordError("Outcome: step_rewards: expected none without a reward")


@dataclass(frozen=True, slots=True)
class StoredEpisode:
    name: str
    """Name of the attempt that counts."""
    state: str
    task: Task
    calls: tuple[bytes, ...]
    vocab_size: int
    reward: Reward | None
    step_rewards: tuple[float, ...] | None
    failure: str | None
    artifacts: Mapping[str, str]
    num_attempts: int

    def tree(self) -> TokenTree:
        """Rebuild the recorder's tree."""
        return read_tree(self.calls, self.vocab_size, self.name)

    def episode(self, tree: TokenTree | None = None) -> Episode:
        """The episode's record. `tree`: its tree, if already built."""
        tree = tree or self.tree()
        return Episode(self.name, self.task, tuple(tree.calls()), self.reward, self.failure)


@dataclass(frozen=True, slots=True)
class StoredUnit:
    place: int | None
    group: str
    task: Task
    episodes: tuple[StoredEpisode, ...]
    lag: int | None = None
    """Number of units taken between its submission and its own claim."""
    oldest_step: int | None = None


def attempt_name(name: str, attempt: int, origin: str) -> str:
    """Name of an attempt; a deployed agent's episode has one attempt, which keeps the episode's name."""
    return name if origin == Origin.DEPLOYED else f"{name}-{attempt}"


def make_label(stage: str | None, domain: str) -> str:
    """The label that quotas count: a domain of a stage, or a domain alone."""
    return domain if stage is None else f"{stage}/{domain}"


def split_label(label: str) -> tuple[str | None, str]:
    stage, slash, domain = label.rpartition("/")
    return (stage if slash else None), domain


def task_text(task: Task) -> str:
    return json.dumps(asdict(task), allow_nan=False, separators=(",", ":"))


def read_task(text: str) -> Task:
    fields = json.loads(text)
    return Task(**fields | {"domain": Domain(fields["domain"])})


def reward_text(reward: Reward) -> str:
    return json.dumps(asdict(reward), allow_nan=False, separators=(",", ":"))


def read_lease(row: Row[tuple[object, ...]]) -> Lease:
    """Build a lease from a row of `LEASE_COLUMNS`."""
    return Lease(
        episode=row.id,
        unit=row.unit,
        attempt=row.attempt,
        name=attempt_name(row.name, row.attempt, row.origin),
        group=row.group_name,
        task=read_task(row.task),
        worker=row.worker,
        num_calls=row.num_calls,
        context=row.context,
    )


LEASE_COLUMNS = (
    *(episode_table.c[name] for name in ("id", "unit", "attempt", "name", "worker", "num_calls", "state")),
    *(unit_table.c[name] for name in ("origin", "group_name", "task", "context")),
)


_STORED_COLUMNS = (
    *(episode_table.c[name] for name in ("id", "unit", "name", "attempt", "state", "reward", "step_rewards")),
    *(episode_table.c[name] for name in ("failure", "artifacts")),
    *(unit_table.c[name] for name in ("place", "group_name", "origin", "task", "lag", "oldest_step")),
)


def read_units(connection: Connection, unit_ids: Sequence[int], vocab_size: int) -> list[StoredUnit]:
    """Read units with all of their recorded data, in queue order."""
    unit, episode = unit_table.c, episode_table.c
    query = select(*_STORED_COLUMNS).join_from(unit_table, episode_table, unit.id == episode.unit)
    query = query.where(unit.id.in_(unit_ids)).order_by(unit.place, unit.id, episode.id)
    rows = connection.execute(query).all()
    calls = _read_calls(connection, [row.id for row in rows])
    units = []
    for _, group in groupby(rows, lambda row: row.unit):
        first, *others = group
        task = read_task(first.task)
        episodes = tuple(_read_episode(row, task, calls.get(row.id, []), vocab_size) for row in (first, *others))
        units.append(StoredUnit(first.place, first.group_name, task, episodes, first.lag, first.oldest_step))
    return units


def _read_calls(connection: Connection, episode_ids: Sequence[int]) -> dict[int, list[bytes]]:
    """Calls by episode, in order. The table holds only those of the attempt that counts."""
    call = call_table.c
    query = select(call.episode, call.data).where(call.episode.in_(episode_ids))
    calls: dict[int, list[bytes]] = {}
    for episode, data in connection.execute(query.order_by(call.episode, call.attempt, call.ordinal)).all():
        calls.setdefault(episode, []).append(data)
    return calls


def _read_episode(row: Row[tuple[object, ...]], task: Task, calls: list[bytes], vocab_size: int) -> StoredEpisode:
    return StoredEpisode(
        name=attempt_name(row.name, row.attempt, row.origin),
        state=row.state,
        task=task,
        calls=tuple(calls),
        vocab_size=vocab_size,
        reward=None if row.reward is None else Reward(**json.loads(row.reward)),
        step_rewards=None if row.step_rewards is None else tuple(json.loads(row.step_rewards)),
        failure=row.failure,
        artifacts=json.loads(row.artifacts),
        num_attempts=row.attempt,
    )
