"""Moves episodes of deployed agents from the gateway into the pool.

    operator: POST /episodes → agent's calls → POST …/close, POST …/reward → loop: stored in the pool → DELETE

An operator opens the episodes with the admin key. Episodes of one task that name the same `group` form a group for the
advantage. As soon as `group_size` of them are closed and rewarded, the loop stores them in the pool in one transaction,
syncs it to disk, and then deletes the gateway's copies. If it is killed in between, it finds their names in the pool
after the restart and only deletes the copies. An episode's name in the pool contains the time at which it was opened,
so an id may be reused.

    perf of an episode     the sum of its whole-episode rewards
    r_t of a call          the sum of the rewards for that call, plus perf for the last call
    total                  the sum of r_t

As in the loop's own attempts, `reward.advantage` decides whether side calls and sub-agents are trained.

Rule and speed rewards do not apply: the loop knows neither the tools that a deployed agent offered nor how long it
waited for its user. An episode that is not stored within `pool.deployed_s` of its opening is deleted with a warning.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m2forge.errors import RecordError
from m2forge.files import write_atomic
from m2forge.gateway.episodes.closed_journal import closed_marks
from m2forge.pool.deployed_groups import DeployedEpisode
from m2forge.pool.pool import Pool, PoolWriter
from m2forge.pool.stored import CallWriter, role_artifacts
from m2forge.records import JsonValue, Reward, Task
from m2forge.rl.config import RLConfig
from m2forge.rl.gateway_admin import LOOP_EPISODE_ID, GatewayAdmin, RefusedError
from m2forge.rl.servers import Server
from m2forge.tree.token_tree import TokenTree

POLL_S = 0.5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Closed:
    """A deployed agent's closed episode, as the gateway reports it."""

    id: str
    created_s: float
    group: str
    task: Task | None
    failure: str | None
    rewards: tuple[Mapping[str, Any], ...]
    """The rewards as the operator posted them."""
    roles: tuple[str, ...] = ()
    """The roles of its calls (`CallRole`)."""

    @property
    def name(self) -> str:
        """Name of the episode in the pool. Names of the loop's own episodes contain no dot."""
        return f"deployed.{self.id}.{round(self.created_s * 1e6)}"

    @property
    def is_rewarded(self) -> bool:
        return any(reward["call"] is None for reward in self.rewards)

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> "Closed":
        """Parse the response of `GET /episodes/ID`."""
        task = None if state["task"] is None else Task.read(state["task"])
        failure = state["closed"]["failure"] or None
        rewards, roles = tuple(state["rewards"]), tuple(state["roles"])
        return cls(state["id"], state["created_s"], state["group"], task, failure, rewards, roles)


class DeployedEpisodes:
    def __init__(
        self,
        config: RLConfig,
        journal: Path,
        gateway: GatewayAdmin,
        pool: Pool,
        writer: PoolWriter,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`journal`: the gateway's journal folder. `clock`: returns seconds since the epoch, like the gateway's."""
        self._config, self._journal, self._gateway, self._pool, self._writer = config, journal, gateway, pool, writer
        self._clock = clock
        self._marks: dict[str, tuple[str, int, int]] = {}
        """The mark of each journal when its episode was last read."""
        self._closed: dict[str, Closed] = {}
        self._refused: set[str] = set()
        """Ids of episodes that cannot be trained on; the reason was logged."""

    async def watch(self) -> None:
        while True:
            await self.poll()
            await asyncio.sleep(POLL_S)

    async def poll(self) -> int:
        """Store complete groups, delete stored and too old episodes; returns how many groups were stored."""
        await self._read_changed()
        rewarded = [episode for episode in self._closed.values() if episode.is_rewarded]
        names = {episode.name: episode.id for episode in rewarded}
        known = await self._writer.run(self._pool.known, list(names)) if names else set()
        await self._delete_stored([names[name] for name in known])
        await self._delete_old()
        num_stored = 0
        for members in self._complete_groups():
            num_stored += await self._store(members)
        return num_stored

    async def _read_changed(self) -> None:
        marks = await asyncio.to_thread(closed_marks, self._journal)
        for id in [id for id in self._closed if id not in marks]:
            self._drop(id)
        for id, mark in marks.items():
            if LOOP_EPISODE_ID.fullmatch(id) or self._marks.get(id) == mark:
                continue
            state = await self._gateway.show(id)
            # Calls still running may yet be recorded.
            if state is not None and state["closed"] is not None and not state["num_running"]:
                self._marks[id], self._closed[id] = mark, Closed.read(state)

    def _complete_groups(self) -> list[list[Closed]]:
        """Groups with at least `group_size` rewarded episodes, each cut to the `group_size` opened first."""
        groups: dict[str, list[Closed]] = {}
        for episode in sorted(self._closed.values(), key=lambda episode: (episode.created_s, episode.id)):
            if not episode.is_rewarded or episode.id in self._refused:
                continue
            if episode.task is None or not episode.group:
                self._refuse([episode], "it was opened without a task or a group; give both")
            else:
                groups.setdefault(episode.group, []).append(episode)
        size = self._config.group_size
        return [group[:size] for group in groups.values() if len(group) >= size]

    async def _store(self, members: Sequence[Closed]) -> bool:
        task = members[0].task
        assert task is not None
        if any(episode.task != task for episode in members):
            self._refuse(members, f"the episodes of group {members[0].group!r} have different tasks; give them one")
            return False
        if not any(task.domain in stage.domains for stage in self._config.curriculum.stages):
            self._refuse(members, f"no stage of the curriculum has the domain {task.domain}")
            return False
        try:
            trees = [await self._gateway.take(episode.id) for episode in members]
            problem = self._sampling_problem(trees)
            if problem is not None:
                raise RecordError(f"{problem}; open episodes with `sampling`")
            pairs = list(zip(members, trees, strict=True))
            vocab_size = self._pool.vocab_size
            episodes = [await asyncio.to_thread(make_episode, *pair, vocab_size) for pair in pairs]
        except RefusedError as error:
            # The operator deleted one of the episodes meanwhile.
            _log.warning("group %s of a deployed agent is not stored yet: %s", members[0].group, error)
            return False
        except RecordError as error:
            self._refuse(members, str(error))
            return False
        group = f"deployed.{members[0].group}.{round(members[0].created_s * 1e6)}"
        await self._writer.run(self._pool.add_deployed, group, task, episodes)
        rewards = [episode.reward.total for episode in episodes]
        _log.info("stored %d episodes of a deployed agent, group %s: rewards %s", len(rewards), group, rewards)
        await self._delete_stored([episode.id for episode in members])
        return True

    def _sampling_problem(self, trees: Sequence[TokenTree]) -> str | None:
        """Reason for rejecting these calls, or None."""
        used = {call.sampling for tree in trees for call in tree.calls()}
        if not used:
            return "the group recorded no completion call"
        problems = [self._config.policy.sampling_problem(sampling) for sampling in used]
        return next((problem for problem in problems if problem is not None), None)

    async def _delete_old(self) -> None:
        before_s = self._clock() - self._config.pool.deployed_s
        old = [episode.id for episode in self._closed.values() if episode.created_s < before_s]
        if old:
            message = "%d episodes of deployed agents are deleted untrained, "
            message += "because their groups were not complete and rewarded within pool.deployed_s: %s"
            _log.warning(message, len(old), ", ".join(old[:8]))
            await self._delete(old)

    def _refuse(self, members: Sequence[Closed], reason: str) -> None:
        ids = [episode.id for episode in members]
        _log.warning("episodes of a deployed agent cannot be trained (%s): %s", ", ".join(ids), reason)
        self._refused.update(ids)

    async def _delete_stored(self, ids: Collection[str]) -> None:
        if ids:
            # A power loss must not lose the pool's copy once the gateway's is deleted.
            await self._writer.run(self._pool.flush)
        await self._delete(ids)

    async def _delete(self, ids: Collection[str]) -> None:
        if ids:
            await self._gateway.delete(ids)
        for id in ids:
            self._drop(id)

    def _drop(self, id: str) -> None:
        self._marks.pop(id, None)
        self._closed.pop(id, None)
        self._refused.discard(id)


def make_episode(episode: Closed, tree: TokenTree, vocab_size: int) -> DeployedEpisode:
    """Convert a rewarded episode to the form that the pool stores."""
    calls = CallWriter(vocab_size).write_tree(tree)
    perf = sum(float(reward["value"]) for reward in episode.rewards if reward["call"] is None)
    steps = [0.0] * len(calls)
    for reward in episode.rewards:
        if reward["call"] is not None:
            steps[reward["call"]] += float(reward["value"])
    total = perf + sum(steps)
    if steps:
        steps[-1] += perf
    evidence: dict[str, JsonValue] = {"posted": [dict(reward) for reward in episode.rewards]}
    return DeployedEpisode(
        episode.name,
        tuple(calls),
        Reward(0.0, 0.0, perf, total, evidence),
        tuple(steps),
        episode.failure,
        role_artifacts(episode.roles),
    )


async def keep_address(path: Path, gateway: Server) -> None:
    """Write the gateway's URL and admin key for operators, also after it has moved; only the file's owner may read
    it."""
    written = ""
    while True:
        if (url := gateway.url) != written:
            await asyncio.to_thread(write_atomic, path, json.dumps({"url": url, "key": gateway.key}) + "\n", mode=0o600)
            _log.info("deployed agents' episodes: the gateway serves on %s, its admin key is in %s", url, path)
            written = url
        await asyncio.sleep(POLL_S)
