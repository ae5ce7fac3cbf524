"""A family from a file of tasks, one JSON object a line: a path in, its tasks and their verifiers out.

    {"id": "paris", "instruction": "Name the capital of France.", "verifier": {"exact": "Paris"}}

`TaskLine` lists the fields. A line that cannot be used is refused with its number, and with it the file. The family's
name is the file's name without its ending. Either all lines have a level, without gaps, or none has; then difficulty is
measured by pass rates (`tasks/curriculum.py`). A task's metadata holds its verifier and its files, so that a stored
task does not depend on the file.

A verifier takes its specification and a submission, and returns a verdict:

    {"exact": "7G"}                                     the same text after `plain`; a list accepts any of its items
    {"numeric": 3.5, "tolerance": 0.01}                 the last number in the answer, within the tolerance
    {"regex": "(?i)\\bparis\\b"}                          the pattern occurs in the answer
    {"choice": "B", "options": ["A", "B", "C"]}         the last option that stands alone in the answer
    {"python": "my_verifier.py:verify"}                 verify(task, submission) returns a Verdict, or a perf
    {"command": ["python", "my_test.py"], "files": {…}} runs in the workspace, after `files` were written into it
    {"judge": ["It names the author."]}                 criteria that a model judges (`tasks/llm_judge.py`)

A command has perf 1 if it exits with status 0, else 0; if it does and the last line of its output is a number from 0 to
1, that is the perf. It runs in the attempt's sandbox, unless that is a plain process. Every other verifier runs in a
worker process under the limits of the table `verify`; `timeout_s` in a specification replaces the limit of time.
"""

import contextlib
import hashlib
import json
import os
import random
import re
import resource
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Annotated, Literal, Self, cast

from pydantic import Field, model_validator

from m2forge.config import Config, TomlValue, build
from m2forge.errors import ConfigError, DataError, EngineError, M2ForgeError, NotFoundError, RecordError
from m2forge.files import write_atomic
from m2forge.protocols import Command, Outcome, OutcomeReason, Sandbox
from m2forge.records import Domain, JsonValue, Submission, Task, Verdict
from m2forge.tasks.answer import chosen_option, clear_path, last_number, output_score, plain
from m2forge.tasks.config import VerifyConfig
from m2forge.tasks.family import FAMILY_KEY, SPLIT_KEY, Family, TimeLimitError, as_verdict, shown
from m2forge.tasks.llm_judge import judge, longest_s, require_judge, worker_settings
from m2forge.tasks.source import located
from m2forge.tasks.task_set import split_by_hash
from m2forge.tasks.user_code import load_object
from m2forge.text.message import Message, parse_json

KINDS = ("exact", "numeric", "regex", "choice", "python", "command", "judge")
OF_KIND = {"tolerance": "numeric", "options": "choice", "files": "command"}
"""Settings that belong to one kind."""
MAX_OUTPUT = 4000
"""Characters of a command's output, from its end, that the evidence holds."""
MAX_READ = 1 << 20
MAX_FILE_BYTES = 256 << 20
"""Limit of a file that a command writes, its output included."""
INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
"""Environment variables that a command inherits: no key of the judge reaches what the policy wrote."""
ALPHABET = tuple("ABCDEFGH")
MAX_LINE = 16 << 20


class VerifierConfig(Config):
    """The specification of a verifier: exactly one kind, and its settings."""

    exact: str | tuple[str, ...] | None = None
    numeric: float | None = None
    tolerance: Annotated[float, Field(ge=0)] = 1e-6
    """Largest absolute difference."""
    regex: str | None = None
    choice: str | None = None
    options: tuple[str, ...] = ALPHABET
    python: str | None = None
    """FILE.py:NAME relative to the folder of the task file, or PACKAGE.MODULE:NAME."""
    command: tuple[str, ...] | None = None
    files: dict[str, str] = Field(default_factory=dict)
    """Files written into the workspace before the command runs, such as tests that the agent must not see."""
    judge: tuple[str, ...] | None = None
    """Criteria; perf is the share of them that the submission meets."""
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Time limit of a verdict; None: that of the table `verify` for this kind."""

    @property
    def kind(self) -> str:
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @model_validator(mode="after")
    def _check(self) -> Self:
        kinds = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            raise ValueError(f"expected one of {', '.join(KINDS)}, received {', '.join(kinds) or 'none'}")
        for setting, kind in OF_KIND.items():
            if setting in self.model_fields_set and kind != self.kind:
                raise ValueError(f"{setting} belongs to {kind}, not to {self.kind}; leave it out")
        if getattr(self, self.kind) in ((), ""):
            raise ValueError(f"{self.kind}: expected a value, received an empty one")
        if self.regex is not None:
            try:
                re.compile(self.regex)
            except re.error as error:
                raise ValueError(f"regex: {error}, received {self.regex!r}") from error
        if self.choice is not None and self.choice not in self.options:
            raise ValueError(f"choice: expected one of the options {list(self.options)}, received {self.choice!r}")
        for path in self.files:
            require_inside(path)
        return self


def require_inside(path: str) -> None:
    """Refuse a path that leaves the workspace, or that names no file in it."""
    parts = path.split("/")
    if not path or path.startswith(("/", "~")) or "\\" in path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"files: expected paths inside the workspace, such as notes/plan.txt, received {path!r}")


def read_verifier(value: JsonValue, origin: str) -> VerifierConfig:
    """Parse a specification; `origin` names its place in errors."""
    if not isinstance(value, Mapping):
        raise ConfigError(f'{origin}: verifier: expected an object such as {{"exact": "7G"}}, received {value!r}')
    return build(VerifierConfig, cast("Mapping[str, TomlValue]", value), origin=f"{origin}: verifier")


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


# -- verdicts ---------------------------------------------------------------------------------------------------------


def verify(spec: VerifierConfig, task: Task, submission: Submission, folder: Path) -> Verdict:
    """`folder`: where relative paths of the specification begin."""
    answer = submission.answer
    match spec.kind:
        case "exact":
            accepted = (spec.exact,) if isinstance(spec.exact, str) else cast("tuple[str, ...]", spec.exact)
            perf = float(plain(answer) in [plain(text) for text in accepted])
            expected: JsonValue = accepted[0] if len(accepted) == 1 else list(accepted)
            return Verdict(perf, {"expected": expected, "received": shown(answer)})
        case "numeric":
            return _numeric(spec, answer)
        case "regex":
            perf = float(re.search(spec.regex or "", answer) is not None)
            return Verdict(perf, {"expected": spec.regex, "received": shown(answer)})
        case "choice":
            chosen = chosen_option(answer, spec.options)
            evidence: dict[str, JsonValue] = {"expected": spec.choice, "chosen": chosen, "received": shown(answer)}
            return Verdict(float(chosen == spec.choice), evidence)
        case "python":
            return as_verdict(_function(spec, folder)(task, submission), str(spec.python))
        case "command":
            return _run(spec, task, submission)
    return judge(spec.judge or (), task, submission)


def require_usable(spec: VerifierConfig, folder: Path) -> None:
    """Load what the verifier needs; raises where it cannot be used."""
    if spec.python is not None:
        _function(spec, folder)
    if spec.judge is not None:
        require_judge()


def _function(spec: VerifierConfig, folder: Path) -> Callable[[Task, Submission], object]:
    found = load_object(located(str(spec.python), folder))
    if not callable(found):
        raise ConfigError(f"{spec.python}: expected a function of a task and a submission, received {found!r}")
    return found


def _numeric(spec: VerifierConfig, answer: str) -> Verdict:
    number = last_number(answer)
    evidence: dict[str, JsonValue] = {"expected": spec.numeric, "received": shown(answer)}
    if number is None or spec.numeric is None:
        return Verdict(0.0, evidence | {"error": "no number in the answer"})
    return Verdict(float(abs(number - spec.numeric) <= spec.tolerance), evidence | {"number": shown(str(number))})


def _run(spec: VerifierConfig, task: Task, submission: Submission) -> Verdict:
    """Run the command in the workspace; whatever it started ends with it."""
    if submission.workspace is None:
        raise RecordError(f"Task {task.id}: a command needs a workspace, and the attempt had none")
    workspace = Path(submission.workspace)
    for name, content in spec.files.items():
        write_atomic(clear_path(workspace, name), content)
    env = {name: os.environ[name] for name in INHERITED if name in os.environ} | {"HOME": str(workspace)}
    assert spec.command is not None
    with TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                spec.command,
                cwd=workspace,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise RecordError(f"Task {task.id}: command {spec.command[0]!r} cannot be run: {error.strerror}") from error
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
        try:
            status = process.wait(spec.timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeLimitError(f"{spec.command[0]}: no result after {spec.timeout_s:g} s") from error
        finally:
            _kill_group(process)
        output.seek(max(0, output.tell() - MAX_READ))
        text = output.read().decode(errors="replace")
    return _judged(status, text)


async def run_inside(spec: VerifierConfig, task: Task, sandbox: Sandbox) -> Verdict:
    """Run a command in the attempt's sandbox, with its limits and without this machine's files."""
    assert spec.command is not None
    try:
        await _upload(spec.files, sandbox)
    except (DataError, NotFoundError) as error:
        # The agent has left something in the way, such as a folder that it may not write to.
        return Verdict(0.0, {"error": f"the verifier's files cannot be written: {error}"})
    outcome = await sandbox.run(
        Command(spec.command, {"HOME": sandbox.workspace}, timeout_s=spec.timeout_s, merges_stderr=True)
    )
    text = outcome.stdout.text()
    match outcome.reason:
        case OutcomeReason.EXITED | OutcomeReason.SIGNALLED:
            if sandbox.is_lost:
                raise EngineError(f"task {task.id}: the sandbox of its verifier was killed")
            if outcome.status in (126, 127) and text.startswith(f"{spec.command[0]}: cannot be run: "):
                raise RecordError(f"Task {task.id}: command {text.strip()}")
            return _judged(outcome.status, text)
        case OutcomeReason.KILLED | OutcomeReason.TAMPERED:
            raise EngineError(f"task {task.id}: the command of its verifier was killed")
        case OutcomeReason.TIMEOUT | OutcomeReason.FLOODED | OutcomeReason.MEMORY:
            raise TimeLimitError(f"{spec.command[0]}: over a limit ({outcome.reason}) after {_seconds(outcome):.1f} s")


async def _upload(files: Mapping[str, str], sandbox: Sandbox) -> None:
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            write_atomic(clear_path(Path(folder), name), content)
        if files:
            await sandbox.upload(Path(folder), sandbox.workspace)


def _seconds(outcome: Outcome) -> float:
    return outcome.finished_s - outcome.started_s


def _judged(status: int, text: str) -> Verdict:
    evidence: dict[str, JsonValue] = {"status": status, "output": text[-MAX_OUTPUT:]}
    return Verdict(output_score(text) if status == 0 else 0.0, evidence)


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
