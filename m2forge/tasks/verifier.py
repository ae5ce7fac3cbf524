"""The verifiers that a line of a task file can name: its specification and a submission in, a verdict out.

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
import math
import os
import re
import resource
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Annotated, Self, cast

from pydantic import Field, model_validator

from m2forge.config import Config, TomlValue, build
from m2forge.errors import ConfigError, DataError, EngineError, NotFoundError, RecordError
from m2forge.files import write_atomic
from m2forge.protocols import Command, Outcome, OutcomeReason, Sandbox
from m2forge.records import JsonValue, Submission, Task, Verdict
from m2forge.tasks.answer import chosen_option, clear_path, last_number, output_score, plain
from m2forge.tasks.family import shown
from m2forge.tasks.llm_judge import judge, require_judge
from m2forge.tasks.source import located
from m2forge.tasks.user_code import load_object

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


class TimeLimitError(Exception):
    """A command that ran over its time limit: a verdict with the reason `limit`."""


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


def as_verdict(value: object, where: str) -> Verdict:
    """A verdict from what a function returned: a verdict, or a perf."""
    if isinstance(value, Verdict):
        return value
    if isinstance(value, int | float):
        return Verdict(float(value))
    received = "nothing" if value is None else repr(value)[:100]
    raise RecordError(f"{where}: expected a Verdict or a number from 0 to 1, received {received}; return Verdict(perf)")


def _function(spec: VerifierConfig, folder: Path) -> Callable[[Task, Submission], object]:
    found = load_object(located(str(spec.python), folder))
    if not callable(found):
        raise ConfigError(f"{spec.python}: expected a function of a task and a submission, received {found!r}")
    return found


def find_reward(reference: str) -> Callable[[Task, Submission, Verdict], object]:
    """The function of `reward.function`."""
    found = load_object(reference)
    if not callable(found):
        raise ConfigError(f"{reference}: expected a function of a task, a submission and a verdict, received {found!r}")
    return found


def call_reward(reference: str, task: Task, submission: Submission, verdict: Verdict) -> float | tuple[float, ...]:
    """The reward of an episode, or of each of its steps."""
    value = find_reward(reference)(task, submission, verdict)
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    if not isinstance(value, list | tuple) or not all(
        isinstance(one, int | float) and math.isfinite(one) for one in value
    ):
        received = "nothing" if value is None else repr(value)[:100]
        raise RecordError(f"{reference}: expected a finite number, or one for each step, received {received}")
    if len(value) != len(submission.steps):
        raise RecordError(
            f"{reference}: expected one reward for each of {len(submission.steps)} steps, received {len(value)}"
        )
    return tuple(float(one) for one in value)


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


def read_verifier(value: JsonValue, origin: str) -> VerifierConfig:
    """Parse a specification; `origin` names its place in errors."""
    if not isinstance(value, Mapping):
        raise ConfigError(f'{origin}: verifier: expected an object such as {{"exact": "7G"}}, received {value!r}')
    return build(VerifierConfig, cast("Mapping[str, TomlValue]", value), origin=f"{origin}: verifier")
