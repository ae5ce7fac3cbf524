"""The directory of a run as the page sees it: the stage, the progress, the evaluations.

Everything is read as found: a configuration of another version, missing files, a partially written last line. What
cannot be read is reported in `problems` and has no other effect. The names are those of `rl/layout`, repeated here
because that module imports torch, which the page does not need.

`Curves` reads `metrics.jsonl` into columns of numbers, incrementally. Each call reads only what was appended since the
last, and only complete lines, so the file may be read while it is being written. A step that goes back, as after a
resume, replaces all later ones; then the revision changes, and a client with columns of an older revision starts over.
Lines that are not metrics are counted and skipped.
"""

import json
import math
import threading
import time
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import cast

from m2forge.cluster.process_record import read_histories, read_versions
from m2forge.config import Config, TomlValue, current_keys
from m2forge.errors import M2ForgeError, NotFoundError
from m2forge.files import whole_lines
from m2forge.observe.metrics import FILE_NAME
from m2forge.page.cached_file import CachedFile
from m2forge.page.latest import LatestMetrics
from m2forge.pipelines.config import PipelineConfig
from m2forge.pool.config import PoolConfig
from m2forge.pretrain.config import PretrainConfig
from m2forge.records import JsonValue
from m2forge.rl.config import RLConfig
from m2forge.sft.config import SFTConfig
from m2forge.text.format import ChatFormat, FormatName, make_format
from m2forge.text.message import FORMAT_NAMES
from m2forge.text.tokenizer import load_tokenizer
from m2forge.train.run_dir import CONFIG_FILE, FAILURE_FILE, LOCK_FILE

MAX_POINTS = 1500
"""More steps than this are downsampled evenly; the first and the last stay."""


@dataclass(slots=True)
class _Row:
    step: int
    time_s: float
    values: dict[str, float]


class Curves:
    """Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._forget()
        self.revision = 0

    def _forget(self) -> None:
        self._rows: list[_Row] = []
        self._end = 0
        self._num_unread = 0

    def release(self) -> None:
        """Free the rows; the next call reads the file from its start, under another revision."""
        with self._lock:
            self._forget()
            self.revision += 1

    def last_step(self) -> int:
        with self._lock:
            self._read()
            return self._rows[-1].step if self._rows else 0

    def since(self, revision: int, step: int) -> dict[str, JsonValue]:
        """Columns from `step` on, inclusive, since its line may have grown; all columns if the revision differs."""
        with self._lock:
            self._read()
            is_whole = revision != self.revision
            rows = self._rows if is_whole else [row for row in self._rows if row.step >= step]
            num_all = len(rows)
            rows = _thin(rows)
            names = sorted({name for row in rows for name in row.values})
            tokens = self._num_tokens()
            return {
                "revision": self.revision,
                "is_whole": is_whole,
                "num_steps": num_all,
                "num_unread": self._num_unread,
                "steps": [row.step for row in rows],
                "times_s": [round(row.time_s, 3) for row in rows],
                "tokens": None if tokens is None else [_number(tokens[row.step]) for row in rows],
                "series": {name: [_number(row.values.get(name)) for row in rows] for name in names},
            }

    def _num_tokens(self) -> dict[int, float] | None:
        """Tokens trained up to each step: the recorded total, or the sum over all steps so far, since a client that
        receives every tenth step cannot add them up. None if the run records neither."""
        total, totals, is_known = 0.0, {}, False
        for row in self._rows:
            if math.isfinite(num_tokens := row.values.get("num_tokens", math.nan)):
                total, is_known = num_tokens, True
            elif math.isfinite(added := row.values.get("tokens_computed", math.nan)):
                total, is_known = total + added, True
            totals[row.step] = total
        return totals if is_known else None

    def _read(self) -> None:
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._end:
                    self._forget()
                    self.revision += 1
                file.seek(self._end)
                data = file.read(size - self._end)
        except OSError:
            return
        for line in whole_lines(data):
            self._end += len(line) + 1
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            step, time_s = int(record.pop("step")), float(record.pop("time_s"))
            values = {str(name): float(value) for name, value in record.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self._num_unread += 1
            return
        rows = self._rows
        if rows and rows[-1].step > step:
            self.revision += 1
            while rows and rows[-1].step > step:
                rows.pop()
        if rows and rows[-1].step == step:
            rows[-1].values |= values
        else:
            rows.append(_Row(step, time_s, values))


def _thin(rows: list[_Row]) -> list[_Row]:
    if len(rows) <= MAX_POINTS:
        return rows
    share = (len(rows) - 1) / (MAX_POINTS - 1)
    return [rows[round(index * share)] for index in range(MAX_POINTS)]


def _number(value: float | None) -> float | None:
    """Seven digits are more than a curve shows. JSON has no NaN or infinity; they become gaps."""
    return float(f"{value:.7g}") if value is not None and math.isfinite(value) else None


CHECKS_FILE, MODEL_FOLDER, RATIOS_FOLDER, WEIGHTS_FOLDER = "checks.jsonl", "model", "ratios", "weights"
SANDBOXES_FILE, YIELDS_FILE = "sandboxes.json", "yields.json"
PROCESSES_FOLDER = "processes"
MAX_DEATHS = 8
"""Last deaths of a process that the page shows."""
POOL_FILES = ("pool.db", "pool.db-wal")
SQLITE = "sqlite:///"
_YIELD_COUNTS = ("num_in", "num_passed", "num_made", "num_asked", "num_cached", "num_prompt", "num_sampled")
QUIET_S = 30.0
"""A run that has written nothing for this long, and whose lock no process holds, has stopped."""
MAX_FAILURE = 2000
_LOCKS = Path("/proc/locks")

Table = Mapping[str, TomlValue]
_KINDS: Mapping[str, type[Config]] = {
    "rl": RLConfig,
    "pretrain": PretrainConfig,
    "sft": SFTConfig,
    "pipeline": PipelineConfig,
}


class RunState(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    """Its process ended with an error, which `FAILURE_FILE` holds."""
    STOPPED = "stopped"
    """It was interrupted or killed; the same command resumes it."""
    EMPTY = "empty"
    """Nothing is written yet."""


class Run:
    def __init__(self, run_dir: Path) -> None:
        if not run_dir.is_dir():
            raise NotFoundError(
                f"{run_dir} is not a folder; give the directory of a run, such as runs/NAME, or a folder of runs"
            )
        self.run_dir = run_dir
        self.name = run_dir.absolute().name
        self.curves = Curves(run_dir / FILE_NAME)
        self.latest = LatestMetrics(run_dir / FILE_NAME)
        self._config = CachedFile[Table](run_dir / CONFIG_FILE, _parse_config, {})
        self._checks = CachedFile[tuple[list[JsonValue], int]](run_dir / CHECKS_FILE, _parse_checks, ([], 0))
        self._yields = CachedFile[dict[str, JsonValue] | None](run_dir / YIELDS_FILE, _parse_yields, None)
        self._format: ChatFormat | None = None
        self._format_lock = threading.Lock()

    # -- configuration -------------------------------------------------------------------------------------------------

    def config(self) -> Table:
        """The configuration in the run's directory, under current keys; empty if missing or broken."""
        return self._config.read()

    def stage(self) -> str:
        return _stage_of(self.config())

    def pool_config(self) -> PoolConfig | None:
        """The pool configuration of a run that has a pool. Unknown keys are ignored."""
        table = self.config().get("pool")
        if not isinstance(table, dict):
            return None
        try:
            config = PoolConfig.model_validate(known_keys(PoolConfig, table))
        except ValueError:
            return None
        path = config.url.removeprefix(SQLITE)
        if path == config.url or path.startswith("/"):
            return config
        return config.model_copy(update={"url": f"{SQLITE}{(self.run_dir / path).absolute()}"})

    # -- the tokenizer -------------------------------------------------------------------------------------------------

    def format(self) -> ChatFormat | None:
        """The chat format of the run's own model, or of its initial model; None while neither can be read."""
        with self._format_lock:
            if self._format is None:
                self._format = self._find_format()
            return self._format

    def _find_format(self) -> ChatFormat | None:
        config = self.config()
        gateway, model = config.get("gateway"), config.get("model")
        name = gateway.get("format") if isinstance(gateway, dict) else None
        kind: FormatName = next((known for known in FORMAT_NAMES if known == name), "auto")
        folders = [self.run_dir / MODEL_FOLDER, *sorted((self.run_dir / WEIGHTS_FOLDER).glob("step-*"), reverse=True)]
        folders += [Path(model)] if isinstance(model, str) else []
        for folder in folders:
            try:
                return make_format(kind, load_tokenizer(folder))
            except (M2ForgeError, OSError, ValueError):
                continue
        return None

    # -- progress ------------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, JsonValue]:
        config = self.config()
        model, group_size = config.get("model"), config.get("group_size")
        checks, num_unread = self.checks()
        state = self.state()
        problems = [] if config else [f"{CONFIG_FILE} is missing or cannot be read; the run's settings are unknown"]
        if num_unread:
            problems.append(f"checks.jsonl: {num_unread} lines are no checks and are left out")
        return {
            "name": self.name,
            "stage": self.stage(),
            "state": state,
            "failure": self.failure() if state is RunState.FAILED else None,
            "age_s": self.age_s(),
            "step": self.curves.last_step(),
            "num_steps": self.num_steps(),
            "model": model if isinstance(model, str) else None,
            "group_size": group_size if isinstance(group_size, int) else None,
            "has_pool": self.pool_config() is not None,
            "checks": checks,
            "sandboxes": self.sandboxes(is_running=state is RunState.RUNNING),
            "processes": self.processes(is_running=state is RunState.RUNNING),
            "yields": self.yields(),
            "problems": problems,
        }

    def sandboxes(self, *, is_running: bool) -> dict[str, JsonValue] | None:
        """The sandboxes of the run's attempts: those alive, and how many were forked and failed since the loop
        started; None if the run has none. They end with the loop."""
        try:
            found = json.loads((self.run_dir / SANDBOXES_FILE).read_text(encoding="utf-8"))
            nums = {name: int(found[name]) for name in ("num_alive", "num_forked", "num_failed")}
        except (OSError, ValueError, KeyError, TypeError):
            return None
        nums["num_alive"] *= is_running
        return {"backend": str(found.get("backend", "")), **nums}

    def processes(self, *, is_running: bool) -> list[JsonValue]:
        """The run's processes: node, the step of the version that a sampler serves, starts, and the last deaths."""
        found = read_histories(self.run_dir / PROCESSES_FOLDER)
        versions = read_versions(self.run_dir / PROCESSES_FOLDER)
        return [
            {
                "name": history.name,
                "node": history.node,
                "is_running": history.is_running and is_running,
                "version": versions.get(history.name),
                "num_starts": history.num_starts,
                "num_deaths": len(history.deaths),
                "deaths": [{"at_s": at_s, "status": status} for at_s, status in history.deaths[-MAX_DEATHS:]],
            }
            for history in found
        ]

    def yields(self) -> dict[str, JsonValue] | None:
        """What became of the items of a pipeline, by stage; None for other runs."""
        return self._yields.read()

    def num_steps(self) -> int | None:
        """Total number of steps, if the configuration gives it."""
        config = self.config()
        phases = config.get("phases")
        if isinstance(phases, list):
            steps = [phase.get("steps") for phase in phases if isinstance(phase, dict)]
            return sum(step for step in steps if isinstance(step, int)) or None
        num_steps = config.get("num_steps")
        return num_steps if isinstance(num_steps, int) else None

    def state(self, held: Collection[int] | None = None) -> RunState:
        """`held`: what `held_inodes` returns, which a list of runs reads once for all of them."""
        if self._is_held(held_inodes() if held is None else held):
            return RunState.RUNNING
        if (yields := self.yields()) is not None and yields["is_finished"]:
            return RunState.FINISHED
        if (self.run_dir / MODEL_FOLDER).is_dir() and not self._is_check_due(self.checks()[0]):
            return RunState.FINISHED
        if (self.run_dir / FAILURE_FILE).is_file():
            return RunState.FAILED
        age_s = self.age_s()
        if age_s is None:
            return RunState.EMPTY
        return RunState.RUNNING if age_s < QUIET_S else RunState.STOPPED

    def failure(self) -> str | None:
        """The error that ended the run's last process."""
        try:
            return (self.run_dir / FAILURE_FILE).read_text(encoding="utf-8", errors="replace")[:MAX_FAILURE].strip()
        except OSError:
            return None

    def _is_check_due(self, checks: list[JsonValue]) -> bool:
        config = self.config()
        held_out = config.get("eval", config.get("check"))  # `check` in runs of earlier versions
        if not isinstance(held_out, dict) or not held_out.get("num_tasks"):
            return False
        last = checks[-1] if checks else None
        return not isinstance(last, dict) or last.get("step") != self.num_steps()

    def age_s(self) -> float | None:
        """Seconds since the last write."""
        names = (FILE_NAME, CHECKS_FILE, YIELDS_FILE, *POOL_FILES)
        times_s = [found for name in names if (found := _changed_s(self.run_dir / name)) is not None]
        return max(0.0, time.time() - max(times_s)) if times_s else None

    def _is_held(self, held: Collection[int]) -> bool:
        """Whether a process is training in it."""
        try:
            return (self.run_dir / LOCK_FILE).stat().st_ino in held
        except OSError:
            return False

    def checks(self) -> tuple[list[JsonValue], int]:
        """Evaluations on held-out tasks, and the number of unreadable lines."""
        return self._checks.read()


def held_inodes() -> frozenset[int]:
    """Inodes of all files that a process holds a lock on. Read from the kernel: trying a run's lock, even briefly,
    could keep the run from starting."""
    try:
        lines = _LOCKS.read_text().splitlines()
        return frozenset(int(line.split()[5].rpartition(":")[2]) for line in lines)
    except (OSError, IndexError, ValueError):
        return frozenset()


def _parse_config(data: bytes) -> Table:
    written = tomllib.loads(data.decode())
    stage = _stage_of(written)
    return written if stage == "run" else current_keys(_KINDS[stage], written)


def _parse_checks(data: bytes) -> tuple[list[JsonValue], int]:
    """A last line without a newline is still being written."""
    found: list[JsonValue] = []
    num_unread = 0
    for line in whole_lines(data):
        try:
            found.append(_read_check(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            num_unread += 1
    return found, num_unread


def _parse_yields(data: bytes) -> dict[str, JsonValue]:
    """The figures of `yields.json` that the page shows; raises ValueError if they are not there."""
    try:
        found = json.loads(data)
        stages: list[JsonValue] = [_read_stage(one) for one in found["stages"]]
        return {
            "is_finished": bool(found["is_finished"]),
            "num_accepted": int(found["num_accepted"]),
            "stages": stages,
        }
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"no yields: {error}") from error


def _read_stage(record: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    counts: dict[str, JsonValue] = {name: int(_finite(record[name])) for name in _YIELD_COUNTS}
    reasons: dict[str, JsonValue] = {
        name: {str(reason): int(_finite(num)) for reason, num in cast("Mapping[str, JsonValue]", record[name]).items()}
        for name in ("rejected", "failed")
    }
    return {"name": str(record["name"]), **counts, **reasons, "seconds": _finite(record["seconds"])}


def _stage_of(config: Table) -> str:
    if "curriculum" in config and "agent" in config:
        return "rl"
    if "replay" in config and "workers" in config:
        return "pipeline"
    return "pretrain" if "corpus" in config else "sft" if "data" in config else "run"


def _read_check(record: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """The numbers that every evaluation has; other keys are ignored."""
    by_family = record.get("by_family") or {}
    numbers = {name: _finite(record.get(name, 0.0)) for name in ("success", "margin", "seconds", "num_broken")}
    step, num_tasks = int(_finite(record["step"])), int(_finite(record.get("num_tasks", 0)))
    if not isinstance(by_family, dict):
        raise TypeError(by_family)
    shares: dict[str, JsonValue] = {str(name): _finite(value) for name, value in by_family.items()}
    versions = record.get("versions") or {}
    if not isinstance(versions, dict):
        raise TypeError(versions)
    seen: dict[str, JsonValue] = {str(int(version)): _finite(share) for version, share in versions.items()}
    known: dict[str, JsonValue] = {"step": step, "num_tasks": num_tasks, "by_family": shares, "versions": seen}
    return {**known, **numbers, "by_level": _read_levels(record.get("by_level") or {})}


def _read_levels(record: JsonValue) -> dict[str, JsonValue]:
    """Family to level to `num_tasks` and `success`."""
    if not isinstance(record, dict):
        raise TypeError(record)
    found: dict[str, JsonValue] = {}
    for family, levels in record.items():
        if not isinstance(levels, dict):
            raise TypeError(levels)
        rows: dict[str, JsonValue] = {}
        for level, row in levels.items():
            if not isinstance(row, dict):
                raise TypeError(row)
            rows[level] = {name: _finite(row[name]) for name in ("num_tasks", "success")}
        found[family] = rows
    return found


def _finite(value: JsonValue) -> float:
    number = float(value)  # type: ignore[arg-type]  # whatever is no number raises, which the caller counts
    if not math.isfinite(number):
        raise ValueError(number)
    return number


def known_keys(config: type[Config], table: Table) -> dict[str, TomlValue]:
    """The table without keys that the class does not have, recursively."""
    known: dict[str, TomlValue] = {}
    for name, value in table.items():
        field = config.model_fields.get(name)
        if field is None:
            continue
        kind: object = field.annotation
        if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, Config):
            value = known_keys(kind, value)
        known[name] = value
    return known


def _changed_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
