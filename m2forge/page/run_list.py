"""A folder of runs in, one row per run out: stage, state, progress and headline figures.

    runs/demo/{pretrain,sft,rl}     runs, at any depth up to MAX_DEPTH: named by their path below the folder
    runs/demo/pages                 a corpus
    runs/base/eval                  an evaluation, also inside the directory of a run

Each call walks the folder, so that runs appear and disappear by themselves; files are parsed again only if they change.
Other folders, hidden ones and symbolic links are skipped. Below a run's directory only its evaluations are searched,
because agents write there.

An id names a run in URLs: its path with `/` as `:` and all other characters but letters, digits, `-`, `_` and `.` as
`~XX`, their UTF-8 bytes. An id is only ever looked up among the rows; it never becomes a path.
"""

import math
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from m2forge.config import TomlValue
from m2forge.corpus.manifest import MANIFEST_NAME, Kind, Manifest
from m2forge.errors import NotFoundError
from m2forge.evaluate.report import JSON_FILE, EvalReport
from m2forge.observe.metrics import FILE_NAME
from m2forge.page.cached_file import CachedFile
from m2forge.page.latest import HELD_OUT_LOSS, Latest
from m2forge.page.run_folder import Run, RunState, held_inodes
from m2forge.records import JsonValue
from m2forge.train.run_dir import CONFIG_FILE, LOCK_FILE

EVAL_FILES = {JSON_FILE, "eval.toml"}
MAX_DEPTH = 5
MAX_FOLDERS = 4000
"""Folders that one walk lists at most."""
MAX_OPEN = 24
"""Runs whose rows of metrics stay in memory, the most recently shown ones."""
WALK_SHARE = 0.05
"""Share of the time that walks may take: a walk of a slow disk is repeated less often."""
WORK_PREFIX, WORK_SUFFIX = ".", ".work"
ROOT_ID = "~"
"""Id of the folder itself, if it is a run's directory."""
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


@dataclass(frozen=True, slots=True)
class Figure:
    label: str
    value: float
    format: Literal["number", "count", "percent"] = "number"
    first: float | None = None
    """The value that the run started from, where the change is the result."""

    def to_json(self) -> dict[str, JsonValue]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Row:
    id: str
    name: str
    stage: str
    state: RunState
    has_page: bool
    """Whether it has metrics or a pool to show on a page of its own."""
    figures: tuple[Figure, ...] = ()
    model: str | None = None
    step: int | None = None
    num_steps: int | None = None
    started_s: float | None = None
    written_s: float | None = None
    failure: str | None = None
    problem: str | None = None

    def to_json(self) -> dict[str, JsonValue]:
        fields: dict[str, JsonValue] = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name != "figures"
        }
        return fields | {"figures": [figure.to_json() for figure in self.figures]}


@dataclass(slots=True)
class _Walk:
    """What one walk found, by path below the root; the path of the root itself is empty."""

    runs: dict[str, Run] = field(default_factory=dict)
    evals: dict[str, CachedFile[EvalReport | None]] = field(default_factory=dict)
    corpora: dict[str, CachedFile[Manifest | None]] = field(default_factory=dict)
    """Folders with a manifest, which may be of another program."""
    builds: list[str] = field(default_factory=list)
    """Corpora without a manifest: a process builds them, or ended before they were complete."""
    foreign: dict[str, Run] = field(default_factory=dict)
    """Folders with files of a run's names that are no runs."""
    num_folders: int = 0


class RunList:
    """Thread-safe."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise NotFoundError(
                f"{root} is not a folder; give the directory of a run, such as runs/NAME, or a folder of runs"
            )
        self.root = root
        self._lock = threading.Lock()
        self._found = _Walk()
        self._next_walk_s = 0.0
        self._open: dict[str, Run] = {}

    def is_empty(self) -> bool:
        with self._lock:
            self._walk()
            found = self._found
            return not (
                found.runs or found.evals or found.builds or any(file.read() for file in found.corpora.values())
            )

    def describe(self) -> dict[str, JsonValue]:
        with self._lock:
            self._walk()
            found, held = self._found, held_inodes()
            rows = [
                *(self._run_row(path, run, held) for path, run in found.runs.items()),
                *(self._eval_row(path, report.read()) for path, report in found.evals.items()),
                *(self._corpus_row(path, known) for path, file in found.corpora.items() if (known := file.read())),
                *(self._build_row(path, held) for path in found.builds),
            ]
        problems: list[JsonValue] = []
        if found.num_folders > MAX_FOLDERS:
            problems.append(f"only {MAX_FOLDERS:,} folders were searched for runs; give a folder further down")
        return {
            "name": self.root.absolute().name,
            "path": str(self.root),
            "now_s": time.time(),
            "runs": [row.to_json() for row in sorted(rows, key=lambda row: row.name)],
            "problems": problems,
        }

    def find(self, id: str) -> Run | None:
        """The run that has this id. Frees the metrics of the run that was shown longest ago."""
        with self._lock:
            found = self._by_id(id)
            if found is None:
                self._walk()
                found = self._by_id(id)
            if found is None or not found.run_dir.is_dir():
                return None
            self._open.pop(id, None)
            self._open[id] = found
            while len(self._open) > MAX_OPEN:
                self._open.pop(next(iter(self._open))).curves.release()
            return found

    def _by_id(self, id: str) -> Run | None:
        return next((run for path, run in self._found.runs.items() if id_of(path) == id), None)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _name(self, path: str) -> str:
        return path or self.root.absolute().name

    def _model(self, model: TomlValue | None) -> str | None:
        """The model that a run starts from: a preset's name, or a folder, by its path below the root if it is there."""
        if not isinstance(model, str):
            return None
        return model.removeprefix(f"{self.root.absolute()}/").removeprefix(f"{self.root}/")

    def _run_row(self, path: str, run: Run, held: Collection[int]) -> Row:
        latest, state = run.latest.read(), run.state(held)
        model = run.config().get("model")
        return Row(
            id=id_of(path),
            name=self._name(path),
            stage=run.stage(),
            state=state,
            has_page=True,
            figures=yield_figures(run.yields()) or run_figures(run.stage(), latest, run.checks()[0]),
            model=self._model(model),
            step=latest.step,
            num_steps=run.num_steps(),
            started_s=latest.started_s,
            written_s=None if (age_s := run.age_s()) is None else time.time() - age_s,
            failure=run.failure() if state is RunState.FAILED else None,
            problem=None if run.config() else f"{CONFIG_FILE} is missing or cannot be read",
        )

    def _eval_row(self, path: str, report: EvalReport | None) -> Row:
        return Row(
            id=id_of(path),
            name=self._name(path),
            stage="eval",
            state=RunState.FINISHED,
            has_page=False,
            figures=() if report is None else eval_figures(report),
            model=None if report is None else self._model(report.model),
            written_s=_changed_s(self.root / path / JSON_FILE),
            problem=None if report is not None else f"{JSON_FILE} cannot be read; another version may have written it",
        )

    def _corpus_row(self, path: str, manifest: Manifest) -> Row:
        return Row(
            id=id_of(path),
            name=self._name(path),
            stage="corpus",
            state=RunState.FINISHED,
            has_page=False,
            figures=corpus_figures(manifest),
            written_s=_changed_s(self.root / path / MANIFEST_NAME),
        )

    def _build_row(self, path: str, held: Collection[int]) -> Row:
        folder = work_folder(self.root / path)
        try:
            is_held = (folder / LOCK_FILE).stat().st_ino in held
        except OSError:
            is_held = False
        state = RunState.RUNNING if is_held else RunState.STOPPED
        written_s = _changed_s(folder)
        return Row(id_of(path), self._name(path), "corpus", state, has_page=False, written_s=written_s)

    # -- the walk ------------------------------------------------------------------------------------------------------

    def _walk(self) -> None:
        begun_s = time.monotonic()
        if begun_s < self._next_walk_s:
            return
        found = _Walk()
        self._search("", 0, found)
        now_s = time.monotonic()
        self._next_walk_s = now_s + (now_s - begun_s) * (1 / WALK_SHARE - 1)
        self._found = found

    def _search(self, path: str, depth: int, found: _Walk) -> None:
        """Adds the run, the evaluation or the corpus that the folder at `path` is, or those below it."""
        found.num_folders += 1
        if found.num_folders > MAX_FOLDERS:
            return
        folder, before = self.root / path, self._found
        files, folders = _entries(folder)
        if CONFIG_FILE in files or FILE_NAME in files:
            run = before.runs.get(path) or before.foreign.get(path) or Run(folder)
            if is_run(run):
                found.runs[path] = run
                for name in folders:
                    self._search_eval(below(path, name), found)
                return
            found.foreign[path] = run
        if files >= EVAL_FILES:
            self._search_eval(path, found)
            return
        if MANIFEST_NAME in files:
            manifest = before.corpora.get(path) or CachedFile(folder / MANIFEST_NAME, _parse_manifest, None)
            found.corpora[path] = manifest
            if manifest.read() is not None:
                return
        for name in folders if depth < MAX_DEPTH else ():
            if not name.startswith("."):
                self._search(below(path, name), depth + 1, found)
            elif built_name(name) and built_name(name) not in folders and (folder / name / LOCK_FILE).is_file():
                found.builds.append(below(path, built_name(name)))

    def _search_eval(self, path: str, found: _Walk) -> None:
        folder = self.root / path
        if all((folder / name).is_file() for name in EVAL_FILES):
            found.evals[path] = self._found.evals.get(path) or CachedFile(folder / JSON_FILE, _parse_report, None)


def is_run(run: Run) -> bool:
    """Whether a folder is the directory of a run: its configuration is a stage's, or its metrics are ours."""
    return run.stage() != "run" or run.latest.read().started_s is not None


# -- headline figures, by stage ----------------------------------------------------------------------------------------


def run_figures(stage: str, latest: Latest, checks: Sequence[JsonValue]) -> tuple[Figure, ...]:
    return tuple(_run_figures(stage, latest, checks))


def _run_figures(stage: str, latest: Latest, checks: Sequence[JsonValue]) -> Iterator[Figure]:
    values = latest.values
    rates = [check["success"] for check in checks if isinstance(check, Mapping)]
    successes = [rate for rate in rates if isinstance(rate, float)]
    if successes:
        yield Figure("held-out success", successes[-1], "percent", successes[0] if len(successes) > 1 else None)
    if HELD_OUT_LOSS in values:
        yield Figure("held-out loss", values[HELD_OUT_LOSS])
    if "reward" in values:
        yield Figure("reward", values["reward"])
    if "perf" in values:
        yield Figure("pass rate", values["perf"], "percent")
    if "loss" in values and stage != "rl":
        # The policy loss of RL is near zero by construction and says nothing about the result.
        yield Figure("loss", values["loss"])
    if "tokens_per_s" in values:
        yield Figure("tokens/s", values["tokens_per_s"], "count")
    elif "tokens_computed" in values and latest.step_s:
        yield Figure("tokens/s", values["tokens_computed"] / latest.step_s, "count")
    if "num_tokens" in values:
        yield Figure("tokens", values["num_tokens"], "count")


def yield_figures(yields: Mapping[str, JsonValue] | None) -> tuple[Figure, ...]:
    """Records and accepted items of a pipeline; empty for other runs."""
    if yields is None:
        return ()
    num_accepted, stages = yields["num_accepted"], yields["stages"]
    assert isinstance(num_accepted, int)
    assert isinstance(stages, list)
    records = [Figure("records", stage["num_in"], "count") for stage in stages[:1] if isinstance(stage, Mapping)]
    return (Figure("accepted", num_accepted, "count"), *records)


def eval_figures(report: EvalReport) -> tuple[Figure, ...]:
    """Held-out loss over all domains, and the score of each suite; a value that is not finite is left out."""
    figures = []
    if report.losses:
        overall = report.losses[0]
        figures.append(Figure("held-out loss", overall.nats_per_token))
        if overall.bits_per_byte is not None:
            figures.append(Figure("bits/byte", overall.bits_per_byte))
    figures += [Figure(suite, report.score(suite), "percent") for suite in report.suites]
    return tuple(figure for figure in figures if math.isfinite(figure.value))


def corpus_figures(manifest: Manifest) -> tuple[Figure, ...]:
    """Documents of long samples are in the plain sets too, so only those are counted."""
    plain = [one for one in manifest.sets if one.kind is Kind.PLAIN]
    return (
        Figure("tokens", sum(one.num_tokens for one in plain), "count"),
        Figure("documents", sum(one.num_documents for one in plain), "count"),
        Figure("domains", len({one.domain for one in plain}), "count"),
    )


# -- ids and folders ---------------------------------------------------------------------------------------------------


def id_of(path: str) -> str:
    return "".join(map(_sign, os.fsencode(path))) or ROOT_ID


def _sign(byte: int) -> str:
    return chr(byte) if byte in _PLAIN else ":" if byte == ord("/") else f"~{byte:02X}"


def below(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def work_folder(corpus: Path) -> Path:
    """The hidden folder beside a corpus in which its build stores finished stages."""
    return corpus.with_name(f"{WORK_PREFIX}{corpus.name}{WORK_SUFFIX}")


def built_name(name: str) -> str:
    """The corpus that a work folder belongs to; empty if the folder is none."""
    return name[len(WORK_PREFIX) : -len(WORK_SUFFIX)] if name.endswith(WORK_SUFFIX) else ""


def _parse_report(data: bytes) -> EvalReport | None:
    return EvalReport.model_validate_json(data)


def _parse_manifest(data: bytes) -> Manifest | None:
    return Manifest.model_validate_json(data)


def _changed_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _entries(folder: Path) -> tuple[set[str], list[str]]:
    files, folders = set(), []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                elif entry.is_file():
                    files.add(entry.name)
    except OSError:
        pass
    return files, sorted(folders)
