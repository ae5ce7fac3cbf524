"""Episodes of the pool that match a filter, paginated: rows in, JSON out."""

import json
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, Row, func, or_, select

from m2forge.pool.stored import attempt_name
from m2forge.pool.tables import episode_table, unit_table
from m2forge.records import JsonValue

MAX_INSTRUCTION = 300
"""Maximum characters of an instruction in a list."""


@dataclass(frozen=True, slots=True)
class Filter:
    domain: str = ""
    state: str = ""
    task: str = ""
    """Substring of the task's JSON: its id, family or instruction."""
    text: str = ""
    """Substring of any stored text: name, task, answer, evidence, failure."""
    least: float | None = None
    most: float | None = None
    """Bounds on the reward."""
    order: str = "newest"
    upto: int | None = None
    """Episodes with a higher id are excluded, so that the pages of a list stay stable."""


ORDERS = {
    "newest": (episode_table.c.id.desc(),),
    "oldest": (episode_table.c.id.asc(),),
    "best": (episode_table.c.reward_total.desc().nulls_last(), episode_table.c.id.desc()),
    "worst": (episode_table.c.reward_total.asc().nulls_last(), episode_table.c.id.desc()),
    "longest": (episode_table.c.num_calls.desc(), episode_table.c.id.desc()),
}
SHOWN = (
    *(episode_table.c[name] for name in ("id", "name", "state", "attempt", "num_calls", "num_tokens", "reward_total")),
    *(episode_table.c[name] for name in ("started_s", "finished_s", "failure", "oldest_step")),
    *(unit_table.c[name] for name in ("group_name", "domain", "difficulty", "task", "origin", "place", "reason")),
    unit_table.c.step.label("unit_step"),
)
JOINED = episode_table.join(unit_table, episode_table.c.unit == unit_table.c.id)


def list_episodes(connection: Connection, wanted: Filter, offset: int, limit: int) -> dict[str, JsonValue]:
    where = _conditions(wanted)
    query = select(*SHOWN).select_from(JOINED).where(*where).order_by(*ORDERS[wanted.order])
    counted = select(func.count()).select_from(JOINED).where(*where)
    domains = select(unit_table.c.domain).distinct().order_by(unit_table.c.domain)
    return {
        "newest": connection.execute(select(func.max(episode_table.c.id))).scalar_one(),
        "total": connection.execute(counted).scalar_one(),
        "offset": offset,
        "episodes": [summary(row) for row in connection.execute(query.offset(offset).limit(limit))],
        "domains": list(connection.execute(domains).scalars()),
    }


def _conditions(wanted: Filter) -> list[ColumnElement[bool]]:
    episode, unit = episode_table.c, unit_table.c
    where: list[ColumnElement[bool]] = []
    if wanted.upto is not None:
        where.append(episode.id <= wanted.upto)
    if wanted.domain:
        where.append(unit.domain == wanted.domain)
    if wanted.state:
        where.append(episode.state == wanted.state)
    if wanted.least is not None:
        where.append(episode.reward_total >= wanted.least)
    if wanted.most is not None:
        where.append(episode.reward_total <= wanted.most)
    if wanted.task:
        where.append(unit.task.icontains(_as_json(wanted.task), autoescape=True))
    if wanted.text:
        plain = [column.icontains(wanted.text, autoescape=True) for column in (episode.name, episode.failure)]
        searched = (unit.task, episode.artifacts, episode.reward)
        where.append(or_(*plain, *(column.icontains(_as_json(wanted.text), autoescape=True) for column in searched)))
    return where


def _as_json(text: str) -> str:
    """The text as it is escaped inside a JSON column."""
    return json.dumps(text)[1:-1]


def summary(row: Row[tuple[object, ...]]) -> dict[str, JsonValue]:
    """Summarize a row of `SHOWN`."""
    task = json.loads(row.task)
    duration_s = row.finished_s - row.started_s if row.finished_s and row.started_s else None
    return {
        "id": row.id,
        "name": attempt_name(row.name, row.attempt, row.origin),
        "state": row.state,
        "group": row.group_name,
        "domain": row.domain,
        "difficulty": row.difficulty,
        "family": str(task.get("metadata", {}).get("family", "")),
        "instruction": str(task.get("instruction", ""))[:MAX_INSTRUCTION],
        "num_calls": row.num_calls,
        "num_tokens": row.num_tokens,
        "reward": row.reward_total,
        "failure": row.failure,
        "duration_s": duration_s,
        "oldest_step": row.oldest_step,
        "step": row.unit_step,
        "place": row.place,
        "reason": row.reason,
    }
