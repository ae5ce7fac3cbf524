"""One episode of the pool, its calls page by page: stored bytes in, JSON out.

The first calls of an episode are read without the others; a whole episode is read once and cached, since users browse
from call to call.

Importance ratios of its tokens are shown if the run stores those of the step that trained it. The advantages of its
calls are computed as the trainer computes them from the rewards of its group. The trainer compares the episodes of a
group within a batch (`rl/trainer.py`); so does this, with the same function. An episode that is not in a batch yet is
compared with its whole group.

The files of its task are shown with paths, sizes and texts, within limits. A task of a JSONL file carries its files'
texts; that of a task folder names the folder, whose files are read as they are now. Files that are not text, or are too
large, are listed without their text. Links are not followed.
"""

import json
import math
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from sqlalchemy import Connection, select

from m2forge.errors import M2ForgeError, NotFoundError
from m2forge.page.episode_list import JOINED, SHOWN, summary
from m2forge.page.message_part import LOOK_BACK, Part, TokenText, cut_completion, cut_prompt
from m2forge.page.pool_reader import PoolReader
from m2forge.page.run_folder import RATIOS_FOLDER, Run, known_keys
from m2forge.page.tree_outline import Trajectory
from m2forge.pool.lifecycle import EpisodeState
from m2forge.pool.queue import read_queue
from m2forge.pool.stored import TOOLS, read_roles, read_task, read_tree
from m2forge.pool.tables import call_table, episode_table, unit_table
from m2forge.records import FloatArray, JsonValue, Task
from m2forge.reward.advantage import episode_advantages, select_rewards, trained_calls
from m2forge.reward.config import AdvantageConfig
from m2forge.rl.importance_ratio import path_of, read_ratios
from m2forge.tasks.catalog import family_of
from m2forge.tasks.family import family_key_of
from m2forge.tasks.source import SourceKind, parse_source
from m2forge.text.message import Tool, tool_from_openai
from m2forge.text.parser import Completion, ProblemKind
from m2forge.tree.token_tree import Sample


@dataclass(frozen=True, slots=True)
class EpisodeRatios:
    by_call: Mapping[int, FloatArray] = field(default_factory=dict)
    """log r of the tokens that each call sampled."""
    absence: str | None = None
    """Why there are no ratios."""


class Ratios:
    """Caches the last file read, since users browse the episodes of a step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._key: tuple[int, int] | None = None
        self._read: Mapping[str, FloatArray] | None = None

    def of_episode(self, connection: Connection, episode: int) -> EpisodeRatios:
        query = select(*SHOWN).select_from(JOINED).where(episode_table.c.id == episode)
        row = connection.execute(query).one_or_none()
        if row is None:
            raise NotFoundError(f"episode {episode} is not in the pool; retention may have removed it")
        if row.state != EpisodeState.TRAINED:
            return EpisodeRatios(absence="it has not been trained")
        found = self._of_step(row.unit_step)
        if found is None:
            return EpisodeRatios(absence=f"those of step {row.unit_step} are not stored")
        names = {call: f"{summary(row)['name']}/{call}" for call in range(row.num_calls)}
        by_call = {call: found[name] for call, name in names.items() if name in found}
        return EpisodeRatios(by_call, None if by_call else f"step {row.unit_step} refused its calls")

    def _of_step(self, step: int) -> Mapping[str, FloatArray] | None:
        with self._lock:
            try:
                # A step that was run again has a different file.
                key = (step, path_of(self._folder, step).stat().st_mtime_ns)
            except OSError:
                return None
            if key != self._key:
                self._key, self._read = key, read_ratios(self._folder, step)
            return self._read


def advantages_of(connection: Connection, episode: int, config: AdvantageConfig) -> list[float | None] | None:
    """One number per call, None for a call that is not trained; None while the episode, or another of its group, has no
    reward."""
    columns, unit = episode_table.c, unit_table.c
    here = connection.execute(
        select(unit.group_name, unit.batch).join(episode_table, columns.unit == unit.id).where(columns.id == episode)
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
        select(columns.id, unit.group_name, columns.step_rewards, columns.artifacts)
        .join(unit_table, columns.unit == unit.id)
        .where(wanted)
        .order_by(unit.place, unit.id, columns.id)
    ).all()
    groups: dict[str, list[Sequence[float]]] = {}
    names: dict[str, list[int]] = {}
    trained: dict[int, list[int]] = {}
    shown: list[float | None] = []
    for row in rows:
        if row.step_rewards is None:
            return None
        rewards = json.loads(row.step_rewards)
        trained[row.id] = trained_calls(read_roles(json.loads(row.artifacts)), len(rewards), config)
        groups.setdefault(row.group_name, []).append(select_rewards(rewards, trained[row.id]))
        if row.id == episode:
            shown = [None] * len(rewards)
        names.setdefault(row.group_name, []).append(row.id)
    found = episode_advantages(list(groups.values()), config)
    index = [id for ids in names.values() for id in ids].index(episode)
    for call, value in zip(trained[episode], found[index], strict=True):
        shown[call] = float(value)
    return shown


FIRST_CALLS = 48
"""Number of calls that are read without the rest of their episode."""
MAX_CACHED = 4
"""Half the number of trajectories to cache, whole episodes and prefixes of them."""
PART_TOKENS = 1200
"""Tokens of one part that are sent with its call; the rest is requested separately."""
PAGE_TOKENS = 24_000
"""Tokens after which a page of calls ends; it has at least one call."""
MAX_FOUND = 5000
"""Maximum number of calls in a search result."""
MAX_TOKENS = 20_000
"""Maximum tokens per response."""
FILES_KEY, FOLDER_KEY = "files", "folder"
"""Metadata keys: texts by path, and the path of a task folder."""
MAX_FILES = 100
MAX_FILE_CHARS = 64 << 10
MAX_ALL_FILES_CHARS = 1 << 20
MAX_LOG_RATIO = 20.0
"""Log ratios are clipped here; larger ones look alike."""

Json: TypeAlias = dict[str, JsonValue]


@dataclass(frozen=True, slots=True)
class _Key:
    episode: int
    attempt: int
    num_calls: int
    """Number of calls read: a prefix, or all."""


class Episodes:
    def __init__(self, run: Run, reader: PoolReader) -> None:
        self._run, self._reader = run, reader
        self._ratios = Ratios(run.run_dir / RATIOS_FOLDER)
        self._cache: OrderedDict[_Key, Trajectory] = OrderedDict()
        self._lock = threading.Lock()
        self._load_locks: dict[_Key, threading.Lock] = {}

    # -- requests ------------------------------------------------------------------------------------------------------

    def head(self, episode: int) -> Json:
        """Everything except the calls."""
        config = self._advantage_config()
        with self._reader.read() as connection:
            more = [episode_table.c[name] for name in ("reward", "step_rewards", "artifacts")]
            query = select(*[*SHOWN, *more]).select_from(JOINED).where(episode_table.c.id == episode)
            row = connection.execute(query).one_or_none()
            if row is None:
                raise NotFoundError(f"episode {episode} is not in the pool; retention may have removed it")
            advantages = None if config is None else advantages_of(connection, episode, config)
            group = _group(connection, row.group_name)
            no_ratios = self._ratios.of_episode(connection, episode).absence
        return summary(row) | {
            "task": json.loads(row.task),
            "reward_parts": None if row.reward is None else json.loads(row.reward),
            "step_rewards": None if row.step_rewards is None else json.loads(row.step_rewards),
            "no_ratios": no_ratios,
            "advantages": None
            if advantages is None
            else [None if value is None else round(value, 5) for value in advantages],
            "artifacts": json.loads(row.artifacts),
            "roles": [*read_roles(json.loads(row.artifacts))],
            "group_episodes": group,
            "files": task_files(json.loads(row.task).get("metadata") or {}),
            "has_text": self._run.format() is not None,
        }

    def outline(self, episode: int) -> Json:
        """The shape of the token tree: for each call its parent, where it branches off, and its length."""
        trajectory = self._trajectory(episode)
        legs, samples = trajectory.legs, trajectory.samples
        return {
            "num_calls": len(legs),
            "num_tokens": trajectory.tree.num_tokens,
            "num_input_tokens": trajectory.tree.num_input_tokens,
            "parents": [leg.parent for leg in legs],
            "starts": [leg.start for leg in legs],
            "prompts": [leg.num_prompt for leg in legs],
            "ends": [leg.num_tokens for leg in legs],
            "chains": list(trajectory.chains),
            "lanes": list(trajectory.lanes),
            "logprobs": [
                round(float(sample.logprobs.mean()), 4) if sample.logprobs.size else None for sample in samples
            ],
            "started_s": [round(sample.started_s, 3) for sample in samples],
            "durations_s": [round(sample.finished_s - sample.started_s, 3) for sample in samples],
        }

    def calls(self, episode: int, start: int, end: int) -> Json:
        """Calls from `start` on, split into parts; fewer than requested if they are long."""
        trajectory = self._trajectory(episode, end)
        tools, log_ratios = self._tools(episode), self._log_ratios(episode)
        shown = show_calls(trajectory, start, end, TokenText(self._run.format()), tools, log_ratios)
        return {"first": start, "calls": shown}

    def tokens(self, episode: int, call: int, start: int, end: int) -> Json:
        """Texts, logprobs and ratios of some tokens of a call's path."""
        trajectory = self._trajectory(episode, call + 1)
        if call >= len(trajectory.legs):
            raise NotFoundError(f"episode {episode} has {len(trajectory.legs)} calls, no call {call}")
        end = min(end, start + MAX_TOKENS, trajectory.legs[call].num_tokens)
        log_ratios = self._log_ratios(episode).get(call)
        return _show_tokens(trajectory, call, start, end, TokenText(self._run.format()), log_ratios)

    def search(self, episode: int, text: str) -> Json:
        """Calls whose own tokens, not those shared with earlier ones, contain `text`, ignoring case."""
        trajectory = self._trajectory(episode)
        writer, wanted = TokenText(self._run.format()), text.casefold()
        calls: list[JsonValue] = []
        total = 0
        for call, leg in enumerate(trajectory.legs):
            ids = trajectory.tokens(call, min(leg.start, leg.num_prompt), leg.num_tokens).tolist()
            number = writer.text(ids).casefold().count(wanted)
            if number:
                total += number
                if len(calls) < MAX_FOUND:
                    calls.append([call, number])
        return {"total": total, "calls": calls}

    # -- reading -------------------------------------------------------------------------------------------------------

    def _trajectory(self, episode: int, num_calls: int | None = None) -> Trajectory:
        """At least the first `num_calls` calls, or all."""
        with self._reader.read() as connection:
            attempt, num_all = self._extent(connection, episode)
        full_key = _Key(episode, attempt, num_all)
        with self._lock:
            if full_key in self._cache:
                self._cache.move_to_end(full_key)
                return self._cache[full_key]
        key = (
            full_key
            if num_calls is None or num_calls > FIRST_CALLS
            else _Key(episode, attempt, min(FIRST_CALLS, num_all))
        )
        with self._lock:
            lock = self._load_locks.setdefault(key, threading.Lock())
        # One thread reads; others that need the same key wait for it.
        with lock:
            with self._lock:
                if key in self._cache:
                    return self._cache[key]
            trajectory = self._read(key)
            with self._lock:
                self._cache[key] = trajectory
                self._load_locks.pop(key, None)
                while len(self._cache) > 2 * MAX_CACHED:
                    self._cache.popitem(last=False)
        return trajectory

    def _extent(self, connection: Connection, episode: int) -> tuple[int, int]:
        columns = (episode_table.c.attempt, episode_table.c.num_calls)
        row = connection.execute(select(*columns).where(episode_table.c.id == episode)).one_or_none()
        if row is None:
            raise NotFoundError(f"episode {episode} is not in the pool; retention may have removed it")
        return row.attempt, row.num_calls

    def _read(self, key: _Key) -> Trajectory:
        call = call_table.c
        query = select(call.data).where(call.episode == key.episode, call.attempt == key.attempt)
        with self._reader.read() as connection:
            vocab_size: int = read_queue(connection).vocab_size
            stored = list(connection.execute(query.order_by(call.ordinal).limit(key.num_calls)).scalars())
        return Trajectory(read_tree(stored, vocab_size, f"episode {key.episode}"))

    def _tools(self, episode: int) -> tuple[Tool, ...] | None:
        """The tools that the attempt had: as stored with it, or those of an embedded family; None if unknown."""
        with self._reader.read() as connection:
            columns = (unit_table.c.task, episode_table.c.artifacts)
            query = select(*columns).select_from(JOINED).where(episode_table.c.id == episode)
            task, artifacts = connection.execute(query).one()
        try:
            stored = json.loads(artifacts).get(TOOLS)
            if stored is not None:
                return tuple(tool_from_openai(tool) for tool in json.loads(stored))
            return tools_of(read_task(task))
        except (ValueError, TypeError, KeyError):
            return None

    def _log_ratios(self, episode: int) -> Mapping[int, FloatArray]:
        with self._reader.read() as connection:
            return self._ratios.of_episode(connection, episode).by_call

    def _advantage_config(self) -> AdvantageConfig | None:
        reward = self._run.config().get("reward")
        table = reward.get("advantage") if isinstance(reward, dict) else None
        if not isinstance(table, dict):
            return AdvantageConfig()
        try:
            return AdvantageConfig.model_validate(known_keys(AdvantageConfig, table))
        except ValueError:
            return None


def _group(connection: Connection, name: str) -> list[JsonValue]:
    """All attempts at the same task, including this one."""
    columns = (episode_table.c.id, episode_table.c.state, episode_table.c.reward_total)
    query = select(*columns).select_from(JOINED).where(unit_table.c.group_name == name).order_by(episode_table.c.id)
    return [{"id": row.id, "state": row.state, "reward": row.reward_total} for row in connection.execute(query)]


def tools_of(task: Task) -> tuple[Tool, ...] | None:
    """The tools that an embedded family offers; None for any other family, whose code runs in worker processes only."""
    try:
        if parse_source(family_key_of(task)).kind is not SourceKind.EMBEDDED:
            return None
        return tuple(family_of(task).tools(task))
    except (M2ForgeError, ValueError, TypeError, KeyError):
        return None


def show_calls(
    trajectory: Trajectory,
    start: int,
    end: int,
    text: TokenText,
    tools: tuple[Tool, ...] | None,
    log_ratios: Mapping[int, FloatArray] = MappingProxyType({}),
) -> list[JsonValue]:
    """Calls from `start` on, split into parts; fewer than requested if they are long. `log_ratios`: by call, where
    known."""
    found: list[JsonValue] = []
    num_tokens = 0
    for call in range(start, min(end, len(trajectory.legs))):
        if found and num_tokens > PAGE_TOKENS:
            break
        shown, size = _show_call(trajectory, call, text, tools, log_ratios.get(call))
        found.append(shown)
        num_tokens += size
    return found


def _show_call(
    trajectory: Trajectory, call: int, text: TokenText, tools: tuple[Tool, ...] | None, log_ratios: FloatArray | None
) -> tuple[Json, int]:
    """A call, and the number of tokens written out for it."""
    leg, sample = trajectory.legs[call], trajectory.samples[call]
    start = min(leg.start, leg.num_prompt)
    before = trajectory.tokens(call, max(0, start - LOOK_BACK), start).tolist()
    ids = trajectory.tokens(call, start, leg.num_tokens).tolist()
    num_new = leg.num_prompt - start
    prompt, response = text.texts(ids[:num_new]), text.texts(ids[num_new:])
    parts = cut_prompt(ids[:num_new], prompt, before, text.format)
    answer, completion = cut_completion(response, text.format, tools or ())
    shown = [_show_part(part, prompt, start) for part in parts]
    for part in answer:
        end = min(part.end, part.start + PART_TOKENS)
        shown.append(_show_part(part, response, leg.num_prompt) | _numbers(sample, log_ratios, part.start, end))
    steps = np.unique(sample.versions)
    return {
        "call": call,
        "parts": shown,
        "tools": [] if completion is None else [made.name for made in completion.tool_calls],
        "problems": _problems(completion, tools),
        "finish_reason": sample.finish_reason,
        "versions": [int(steps[0]), int(steps[-1])] if steps.size else None,
        "temperature": sample.sampling.temperature,
        "asked": None if sample.requested is None else asdict(sample.requested),
        "notices": list(sample.notices),
    }, sum(min(part.end - part.start, PART_TOKENS) for part in [*parts, *answer])


def _show_part(part: Part, texts: Sequence[str], offset: int) -> Json:
    return {
        "kind": part.kind,
        "start": offset + part.start,
        "num_tokens": part.end - part.start,
        "texts": list(texts[part.start : min(part.end, part.start + PART_TOKENS)]),
    }


def _show_tokens(
    trajectory: Trajectory, call: int, start: int, end: int, text: TokenText, log_ratios: FloatArray | None
) -> Json:
    leg, sample = trajectory.legs[call], trajectory.samples[call]
    shown: Json = {"start": start, "texts": list(text.texts(trajectory.tokens(call, start, end).tolist()))}
    if start >= leg.num_prompt:
        shown |= _numbers(sample, log_ratios, start - leg.num_prompt, end - leg.num_prompt)
    return shown


def _numbers(sample: Sample, log_ratios: FloatArray | None, start: int, end: int) -> Json:
    """Logprobs and ratios of some of the tokens that a call sampled."""
    shown: Json = {"logprobs": [round(value, 3) for value in sample.logprobs[start:end].tolist()]}
    if log_ratios is not None and log_ratios.size == sample.logprobs.size:
        ratios = np.exp(log_ratios[start:end].clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)).tolist()
        # A step with non-finite numbers has NaN here.
        shown["ratios"] = [None if math.isnan(ratio) else float(f"{ratio:.4g}") for ratio in ratios]
    return shown


def _problems(completion: Completion | None, tools: tuple[Tool, ...] | None) -> list[JsonValue]:
    """The parser's problems; unknown tools are omitted if the offered tools are not known."""
    if completion is None:
        return []
    return [
        {"kind": problem.kind, "detail": problem.detail}
        for problem in completion.problems
        if tools is not None or problem.kind != ProblemKind.UNKNOWN_TOOL
    ]


def task_files(metadata: Mapping[str, JsonValue]) -> list[JsonValue]:
    """One object for each file: `path`, `num_bytes`, and `text`, which is None where it is left out."""
    shown: list[JsonValue] = []
    left = MAX_ALL_FILES_CHARS
    for path, num_bytes, text in _listed_files(metadata):
        if len(shown) == MAX_FILES:
            break
        is_shown = text is not None and len(text) <= min(MAX_FILE_CHARS, left)
        left -= len(text) if text is not None and is_shown else 0
        shown.append({"path": path, "num_bytes": num_bytes, "text": text if is_shown else None})
    return shown


def _listed_files(metadata: Mapping[str, JsonValue]) -> Iterator[tuple[str, int, str | None]]:
    files, folder = metadata.get(FILES_KEY), metadata.get(FOLDER_KEY)
    if isinstance(files, Mapping):
        for path, text in sorted(files.items()):
            if isinstance(text, str):
                yield path, len(text.encode(errors="replace")), text
    if isinstance(folder, str):
        yield from _folder_files(Path(folder))


def _folder_files(folder: Path) -> Iterator[tuple[str, int, str | None]]:
    for root, names, files in os.walk(folder):
        names.sort()
        for name in sorted(files):
            path = Path(root) / name
            try:
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    yield path.relative_to(folder).as_posix(), status.st_size, _file_text(path, status.st_size)
            except OSError:
                continue  # It was removed meanwhile.


def _file_text(path: Path, num_bytes: int) -> str | None:
    if num_bytes > 4 * MAX_FILE_CHARS:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
