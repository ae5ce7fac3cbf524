"""A run in one file: `report.html`, which needs no server, no network and no other file.

The page's modules are concatenated into one script, with the data beside it as JSON. Data cannot close its element or
become markup, and a content security policy in the file allows only that one script.

It contrasts a failed attempt from the beginning of the run with a solved one from its end, at similar tasks. Preferred
are two attempts at the same held-out task, from those that evaluations keep (`rl/eval.py`). Otherwise both are attempts
that were trained on, or queued for it: at the same task if there is such a pair, else at tasks of the same family and
difficulty. Of several pairs the one with the largest difference in policy versions is taken, and of those one whose
solution took several calls, since it shows more.
"""

import base64
import hashlib
import json
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from sqlalchemy import Connection, select

from m2forge.files import write_atomic
from m2forge.page.app import STATIC
from m2forge.page.episode_list import JOINED
from m2forge.page.episode_view import Episodes, show_calls, tools_of
from m2forge.page.message_part import TokenText
from m2forge.page.pool_reader import PoolMissing, PoolReader
from m2forge.page.queue_view import queue_past
from m2forge.page.run_folder import Run
from m2forge.page.tree_outline import Trajectory
from m2forge.pool.tables import episode_table, unit_table
from m2forge.records import JsonValue
from m2forge.rl.eval import HeldOutAttempt, read_attempts
from m2forge.rl.layout import Layout

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


def find_held_out(attempts: Sequence[HeldOutAttempt]) -> tuple[HeldOutAttempt, HeldOutAttempt] | None:
    """(before, after) of the attempts that evaluations have stored."""
    by_task: dict[Hashable, list[_Tried]] = {}
    for id, attempt in enumerate(attempts):
        by_task.setdefault(attempt.task.id, []).append(_Tried(id, attempt.step, len(attempt.calls), attempt.perf >= 1))
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


MODULES = ("dom", "format", "chart", "curves", "window", "turn", "stats", "theme", "report")
"""In dependency order."""
MAX_CALLS = 40
"""Maximum number of calls of each of the two trajectories."""
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) )", re.MULTILINE)
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name} · m2forge</title>
<style>{style}</style>
</head>
<body class="report">
<main>
<header class="title">
{icon}
<div class="grow"><h1>{name}</h1><p class="soft">{summary}</p></div>
<button class="icon" id="theme-button" aria-label="Light or dark" title="Light or dark">◐</button>
</header>
<div id="report"></div>
<noscript><p class="empty">The charts need JavaScript; this file contains all of it.</p></noscript>
</main>
<script type="application/json" id="data">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def write_report(run_dir: Path, out: Path, notes: Sequence[str] = ()) -> None:
    """Write a report of the run in `run_dir`, which any browser can open. `notes`: paragraphs that open it, on what the
    run's folder does not say."""
    data = collect(Run(run_dir)) | {"notes": list(notes)}
    style, script = (STATIC / "style.css").read_text(encoding="utf-8"), bundle()
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'"
    run = data["run"]
    assert isinstance(run, dict)
    page = _PAGE.format(
        policy=escape(policy),
        name=escape(str(run["name"])),
        summary=escape(_summary(run)),
        style=style,
        icon=(STATIC / "icon.svg")
        .read_text(encoding="utf-8")
        .replace("<svg ", '<svg width="42" height="42" ', 1)
        .strip(),
        data=json_for_script(data),
        script=script,
    )
    write_atomic(out, page)


def collect(run: Run) -> dict[str, JsonValue]:
    """The data of the report. What the pool cannot provide is left out, with the reason in `why`."""
    data: dict[str, JsonValue] = {"run": run.describe(), "curves": run.curves.since(-1, 0)}
    data |= {"past": None, "sides": None, "why": "this run has no data pool"}
    config = run.pool_config()
    if config is None:
        return data
    reader = PoolReader(config)
    try:
        with reader.read() as connection:
            data["past"] = queue_past(connection, config)
            pair = find_contrast(connection)
        data["why"] = "no task was failed by an early version and solved by a later one, or retention has removed it"
        held_out = find_held_out(read_attempts(Layout(run.run_dir).eval_attempts))
        if held_out is not None:
            before, after = held_out
            data["sides"] = {
                "note": "attempts at the same held-out task, by the policy of an early check and of a later one",
                "before": _held_out_side(run, before),
                "after": _held_out_side(run, after),
            }
        elif pair is not None:
            alike = "the same task" if pair.is_same_task else "tasks of the same family and difficulty"
            episodes = Episodes(run, reader)
            data["sides"] = {
                "note": f"attempts at {alike}, from training",
                "before": _side(episodes, pair.before),
                "after": _side(episodes, pair.after),
            }
    except PoolMissing as error:
        data["why"] = str(error)
    finally:
        reader.close()
    return data


def _side(episodes: Episodes, id: int) -> dict[str, JsonValue]:
    head, calls = episodes.head(id), episodes.calls(id, 0, MAX_CALLS)["calls"]
    assert isinstance(calls, list)
    num_calls = head["num_calls"]
    assert isinstance(num_calls, int)
    return {"head": head, "calls": calls, "num_left": num_calls - len(calls)}


def _held_out_side(run: Run, attempt: HeldOutAttempt) -> dict[str, JsonValue]:
    trajectory = Trajectory(attempt.tree())
    calls = show_calls(trajectory, 0, MAX_CALLS, TokenText(run.format()), tools_of(attempt.task))
    head: dict[str, JsonValue] = {
        "name": f"held-out {attempt.task.id}",
        "oldest_step": attempt.step,
        "reward": attempt.perf,
        "reward_parts": {"perf": attempt.perf},
        "task": asdict(attempt.task),
        "num_calls": len(attempt.calls),
        "failure": attempt.failure,
    }
    return {"head": head, "calls": calls, "num_left": len(attempt.calls) - len(calls)}


def bundle() -> str:
    """The modules as one script, without imports: each module's imports are defined above it."""
    parts = []
    for index, name in enumerate(MODULES):
        text = (STATIC / f"{name}.js").read_text(encoding="utf-8")
        missing = set(_IMPORT.findall(text)) - set(MODULES[:index])
        assert not missing, f"{name}.js imports {missing}, which the report lacks"
        parts.append(_EXPORT.sub("", _IMPORT.sub("", text)))
    return "\n".join(parts)


def json_for_script(value: JsonValue) -> str:
    """JSON for a script element: nothing in it can close the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _summary(run: dict[str, JsonValue]) -> str:
    step, num_steps, model = run["step"], run["num_steps"], run["model"]
    begun = f" from {model}" if model else ""
    return f"{run['stage']}{begun}: {run['state']}, step {step}" + (f" of {num_steps}" if num_steps else "")
