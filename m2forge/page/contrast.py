"""Selects a failed attempt from the beginning of a run and a solved one from its end, at similar tasks.

Preferred are two attempts at the same held-out task, from those that evaluations keep (`forge/kept.py`). Otherwise both
are attempts that were trained on, or queued for it: at the same task if there is such a pair, else at tasks of the same
family and difficulty. Of several pairs the one with the largest difference in policy versions is taken, and of those
one whose solution took several calls, since it shows more.
"""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select

from m2forge.forge.kept import Kept
from m2forge.page.episode_list import JOINED
from m2forge.pool.schema import episode_table, unit_table

MAX_LOOKED_AT = 50_000


@dataclass(frozen=True, slots=True)
class Contrast:
    before: int
    after: int
    """Episode ids of the failed and the solved attempt."""
    is_same_task: bool


@dataclass(frozen=True, slots=True)
class _Tried:
    id: int
    version: int
    num_calls: int
    is_solved: bool


def find_held_out(attempts: Sequence[Kept]) -> tuple[Kept, Kept] | None:
    """(before, after) of the attempts that evaluations have kept."""
    by_task: dict[Hashable, list[_Tried]] = {}
    for id, kept in enumerate(attempts):
        by_task.setdefault(kept.task.id, []).append(_Tried(id, kept.step, len(kept.calls), kept.perf >= 1))
    pair = _best(by_task)
    return None if pair is None else (attempts[pair[0].id], attempts[pair[1].id])


def find_contrast(connection: Connection) -> Contrast | None:
    episode, unit = episode_table.c, unit_table.c
    query = (
        select(episode.id, episode.oldest_step, episode.num_calls, episode.reward, unit.task)
        .select_from(JOINED)
        .where(episode.reward.is_not(None), episode.oldest_step.is_not(None))
        .order_by(episode.id)
        .limit(MAX_LOOKED_AT)
    )
    by_task: dict[Hashable, list[_Tried]] = {}
    by_kind: dict[Hashable, list[_Tried]] = {}
    for row in connection.execute(query):
        task = json.loads(row.task)
        tried = _Tried(row.id, row.oldest_step, row.num_calls, json.loads(row.reward)["perf"] >= 1)
        by_task.setdefault(task["id"], []).append(tried)
        kind = (task["domain"], task["metadata"].get("family"), task["difficulty"])
        by_kind.setdefault(kind, []).append(tried)
    for alike, is_same_task in ((by_task, True), (by_kind, False)):
        pair = _best(alike)
        if pair is not None:
            return Contrast(pair[0].id, pair[1].id, is_same_task)
    return None


def _best(alike: Mapping[Hashable, list[_Tried]]) -> tuple[_Tried, _Tried] | None:
    pairs = [pair for tries in alike.values() if (pair := _furthest(tries)) is not None]
    return max(pairs, key=lambda pair: (pair[1].version - pair[0].version, pair[1].num_calls > 1), default=None)


def _furthest(tries: list[_Tried]) -> tuple[_Tried, _Tried] | None:
    """The first failure and the last success, if by a later policy version."""
    failed = [tried for tried in tries if not tried.is_solved]
    solved = [tried for tried in tries if tried.is_solved]
    if not failed or not solved:
        return None
    before = min(failed, key=lambda tried: (tried.version, tried.id))
    after = max(solved, key=lambda tried: (tried.version, tried.id))
    return (before, after) if after.version > before.version else None
