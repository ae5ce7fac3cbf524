"""A family from a file of tasks, one JSON object a line: a path in, its tasks and their verifiers out.

    {"id": "paris", "instruction": "Name the capital of France.", "verifier": {"exact": "Paris"}}

`TaskLine` lists the fields. A line that cannot be used is refused with its number, and with it the file. The family's
name is the file's name without its ending. Either all lines have a level, without gaps, or none has; then difficulty is
measured by pass rates (`tasks/curriculum.py`). A task's metadata holds its verifier and its files, so that a stored
task does not depend on the file.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, cast

from pydantic import Field, model_validator

from m2forge.config import Config, TomlValue, build
from m2forge.errors import ConfigError, DataError, M2ForgeError, NotFoundError
from m2forge.records import Domain, JsonValue, Submission, Task, Verdict
from m2forge.tasks.config import VerifyConfig
from m2forge.tasks.family import FAMILY_KEY, SPLIT_KEY, Family
from m2forge.tasks.llm_judge import longest_s, worker_settings
from m2forge.tasks.task_set import split_by_hash
from m2forge.tasks.verifier import VerifierConfig, read_verifier, require_inside, require_usable, verify
from m2forge.text.message import Message, parse_json

MAX_LINE = 16 << 20


class TaskLine(Config):
    id: str | None = Field(default=None, min_length=1, max_length=200)
    """Unique in the file; None: a hash of the line."""
    instruction: str = Field(min_length=1)
    files: dict[str, str] = Field(default_factory=dict)
    """Texts of files, by their path in the workspace, that are there when the attempt begins."""
    domain: Domain | None = None
    """None: the domain under which the configuration lists the file."""
    level: Annotated[int, Field(ge=0)] | None = None
    split: Literal["train", "held_out"] | None = None
    """None: by a hash of the instruction (`tasks/task_set.py`)."""
    reference: str | None = None
    """An answer that solves the task: a demonstration, and what `m2forge tasks check` verifies."""
    reference_files: dict[str, str] = Field(default_factory=dict)
    """Files that an attempt that solves the task leaves in the workspace."""
    verifier: VerifierConfig

    @model_validator(mode="after")
    def _check(self) -> Self:
        for path in (*self.files, *self.reference_files):
            require_inside(path)
        return self


class JsonlFamily(Family):
    name: str
    domain: Domain
    levels: range

    def __init__(self, path: Path, domain: Domain | None = None) -> None:
        """`domain`: take only the tasks of this domain, and those without one; None: all, which must have one
        domain."""
        lines = _read_lines(path)
        self._folder, self._path = path.parent, path
        self.name, self.domain = path.stem, domain or _domain_of(path, lines)
        chosen = [(number, line) for number, line in lines if line.domain in (None, self.domain)]
        if not chosen:
            raise ConfigError(f"{path}: none of its {len(lines)} tasks belongs to the domain {self.domain}")
        levels = _levels_of(path, chosen)
        self.levels, self.has_levels = levels or range(1), levels is not None
        for number, line in chosen:
            try:
                require_usable(line.verifier, self._folder)
            except M2ForgeError as error:
                raise ConfigError(f"{path}, line {number}: verifier: {error}") from error
        self.tasks = tuple(self._task(line) for _, line in chosen)

    def _task(self, line: TaskLine) -> Task:
        metadata: dict[str, JsonValue] = {FAMILY_KEY: self.name, "verifier": _verifier_of(line.verifier)}
        if line.files:
            metadata["files"] = line.files
        if line.reference is not None:
            metadata["reference"] = line.reference
        if line.reference_files:
            metadata["reference_files"] = line.reference_files
        metadata[SPLIT_KEY] = line.split or split_by_hash(self.name, line.instruction)
        id = line.id or hashlib.blake2b(line.model_dump_json().encode(), digest_size=8).hexdigest()
        return Task(f"{self.name}-{id}", self.domain, line.instruction, float(line.level or 0), metadata)

    def draw(self, difficulty: int, seed: int) -> Task:
        return random.Random(seed).choice([task for task in self.tasks if task.difficulty == difficulty])

    def verify(self, task: Task, submission: Submission) -> Verdict:
        spec = read_verifier(task.metadata.get("verifier"), f"Task {task.id}")
        return verify(spec, task, submission, self._folder)

    def answer_check(self, task: Task) -> dict[str, JsonValue]:
        spec = read_verifier(task.metadata.get("verifier"), f"Task {task.id}")
        match spec.kind:
            case "exact":
                return {"exact": [spec.exact] if isinstance(spec.exact, str) else list(spec.exact or ())}
            case "numeric":
                return {"numeric": spec.numeric, "tolerance": spec.tolerance}
            case "regex":
                return {"regex": spec.regex}
            case "choice":
                return {"choice": spec.choice, "options": list(spec.options)}
            case "command":
                return {"command": list(spec.command or ()), "files": spec.files, "timeout_s": spec.timeout_s}
        raise DataError(
            f"{self._path}: task {task.id}: a {spec.kind} verifier needs this package; it stays where it is"
        )

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        reference = task.metadata.get("reference")
        if not isinstance(reference, str):
            raise DataError(f"{self._path}: task {task.id} has no reference; add one for a demonstration")
        return [Message("user", task.instruction), Message("assistant", reference)]


def _read_lines(path: Path) -> list[tuple[int, TaskLine]]:
    """The tasks with their line numbers; blank lines are skipped."""
    try:
        texts = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise NotFoundError(
            f"{path}: cannot be read ({error.strerror}); relative paths count from the working directory"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error}") from error
    lines: list[tuple[int, TaskLine]] = []
    seen: dict[str, int] = {}
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        line = _read_line(text, f"{path}, line {number}")
        if line.id is not None:
            if line.id in seen:
                raise DataError(f"{path}, line {number}: id {line.id!r} is already that of line {seen[line.id]}")
            seen[line.id] = number
        lines.append((number, line))
    if not lines:
        raise DataError(f"{path}: no tasks; write one JSON object a line")
    return lines


def _read_line(text: str, origin: str) -> TaskLine:
    if len(text) > MAX_LINE:
        raise DataError(f"{origin}: {len(text)} characters, at most {MAX_LINE}")
    try:
        value = parse_json(text)
    except ValueError as error:
        raise DataError(f"{origin}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{origin}: expected a JSON object, received {str(value)[:80]!r}")
    return build(TaskLine, cast("dict[str, TomlValue]", value), origin=origin)


def _domain_of(path: Path, lines: Sequence[tuple[int, TaskLine]]) -> Domain:
    domains = sorted({line.domain or Domain.GENERAL for _, line in lines})
    if len(domains) > 1:
        raise ConfigError(
            f"{path}: tasks of several domains ({', '.join(domains)}); name one: {path.name}#{domains[0]}"
        )
    return domains[0]


def _levels_of(path: Path, lines: Sequence[tuple[int, TaskLine]]) -> range | None:
    """The range of levels; None if no line has one."""
    having = [(number, line.level) for number, line in lines if line.level is not None]
    if not having:
        return None
    if len(having) < len(lines):
        lacking = next(number for number, line in lines if line.level is None)
        raise ConfigError(
            f"{path}, line {lacking}: it has no level, but line {having[0][0]} has; give all lines a level, or none"
        )
    levels = {level for _, level in having}
    found = range(min(levels), max(levels) + 1)
    gaps = [level for level in found if level not in levels]
    if gaps:
        raise ConfigError(f"{path}: no task has level {gaps[0]}; number the levels from {found[0]} on without gaps")
    return found


def _verifier_of(spec: VerifierConfig) -> JsonValue:
    """The specification as JSON, with its time limit where the table `verify` has one for its kind."""
    stored: dict[str, JsonValue] = json.loads(spec.model_dump_json(exclude_unset=True))
    settings: VerifyConfig = worker_settings()
    if spec.command is not None:
        stored.setdefault("timeout_s", settings.command_timeout_s)
    if spec.judge is not None and settings.judge is not None:
        stored.setdefault("timeout_s", longest_s(settings.judge))
    return stored
