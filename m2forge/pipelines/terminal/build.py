"""Builds the container and the test of a task: a question and its answer in, a proven solution and its fixture out.

    candidates of the answer ──▶ fixtures ──▶ runs in sandboxes ──▶ gates ──▶ solution, fixture, expected state
              ▲                                              │
              └────────── repair: rules, then a model ◀──────┘

A candidate is accepted if, in fresh sandboxes,

    it succeeds        on the question's own samples, on the fixture of the task and on a second one
    it has an effect   files change, or it prints something; doing nothing has none
    it is repeatable   two runs on the fixture of the task, made at other times, leave the same files and print the same
    it depends on its files   what it prints differs on both generated fixtures, or on a model's and without files

If a candidate changes files, the final state is the result, and steps of the answer that change nothing are dropped;
otherwise its output is.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from m2forge.pipelines.stage import Context, Item, Rejection, Stage
from m2forge.pipelines.terminal import fixture, state
from m2forge.pipelines.terminal.config import TerminalConfig
from m2forge.pipelines.terminal.operand import Operand, Role, operands
from m2forge.pipelines.terminal.posts import Block, plain, read_blocks
from m2forge.pipelines.terminal.programs import refusals
from m2forge.pipelines.terminal.sample_file import Shown, file_names, read_shown
from m2forge.pipelines.terminal.script import candidates, is_placeholder, shown_outputs, steps, with_name
from m2forge.pipelines.terminal.shell import ShellError, SimpleCommand, functions, read_commands
from m2forge.protocols import Command, OutcomeReason, Sandbox
from m2forge.records import JsonValue
from m2forge.sandbox.backend import open_sandbox
from m2forge.sandbox.config import SandboxConfig

WORKSPACE = "/workspace"
OUTPUT = "output.txt"
"""The file for what a solution prints."""
ENV = {"LC_ALL": "C.UTF-8", "TZ": "UTC"}
MAX_FOUND = 3
"""Missing files that one candidate's fixture is given after a run."""
_MISSING = re.compile(r"(?:^|[\s:'\"‘])([\w@%+~./-]+)['\"’]?: No such file or directory|cannot open [‘'\"]?([\w./-]+)")
_BROKEN = re.compile(
    r"command not found|syntax error|No such file or directory|Permission denied|invalid option|: not found"
)
_PROGRAMS = frozenset(("bash", "sh", "python3", "python", "perl"))
_STATE_SOURCE = Path(str(state.__file__)).read_text(encoding="utf-8")

State = dict[str, dict[str, object]]


@dataclass(frozen=True, slots=True)
class Execution:
    """A script has run on a fixture."""

    status: int
    stdout: str
    stderr: str
    before: State
    after: State

    @property
    def changes(self) -> bool:
        return self.before != self.after


@dataclass(frozen=True, slots=True)
class Question:
    title: str
    blocks: list[Block]
    answer: list[Block]

    @property
    def text(self) -> str:
        return f"{self.title}\n{plain(self.blocks)}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A script that may be the solution, and the inputs of its fixtures."""

    script: str
    commands: Sequence[SimpleCommand]
    operands: Sequence[Operand]
    shown: Shown
    own_fixture: str = ""
    """Fixture that a model wrote; empty: fixtures are generated."""

    def fixture(self, question: Question, kind: int) -> str:
        if self.own_fixture:
            return self.own_fixture
        return fixture.build(
            fixture.Request(self.script, self.commands, self.operands, self.shown, question.text), kind
        )


class Unusable(ValueError):
    """Why a candidate is not accepted: reason and evidence."""

    def __init__(self, reason: str, **evidence: JsonValue) -> None:
        super().__init__(reason)
        self.rejection = Rejection(reason, evidence)


def read_question(item: Item) -> Question:
    return Question(item.text("title"), read_blocks(item.text("question")), read_blocks(item.text("answer")))


def prepare(script: str, question: Question) -> Candidate:
    """Read a script: placeholder names become those of the question, and forbidden commands are refused."""
    try:
        commands = read_commands(script)
    except ShellError as error:
        raise Unusable("not a script", error=str(error)) from error
    found = operands(commands, script)
    shown = read_shown(question.blocks, [one.path for one in found if one.role is not Role.OUTPUT])
    for old, new in _renamed(found, question, shown):
        script = with_name(script, old, new)
    commands = read_commands(script)
    found = operands(commands, script)
    shown = read_shown(question.blocks, [one.path for one in found if one.role is not Role.OUTPUT])
    made = {one.path for one in found if one.role is Role.OUTPUT}
    for reason, evidence in refusals(commands, script, functions(script) | made):
        raise Unusable(reason, found=evidence, script=script)
    for operand in found:
        if operand.path.startswith("/"):
            raise Unusable("works outside of the workspace", path=operand.path, script=script)
    if shown.setup:
        for reason, evidence in refusals(read_commands(shown.setup), shown.setup, set()):
            raise Unusable(reason, found=evidence, script=shown.setup)
        if folders := re.findall(r"(?:^|[;&\n])\s*cd (\S+)", shown.setup):
            script = f"cd {'/'.join(folders)}\n{script}"
            commands = read_commands(script)
    return Candidate(script, commands, found, shown)


def _renamed(found: Sequence[Operand], question: Question, shown: Shown) -> list[tuple[str, str]]:
    """Names that the question does not mention stand for those that it mentions and the script does not use."""
    text = question.text
    inputs = [one for one in found if one.role in (Role.FILE, Role.ANY) and not one.is_glob]
    strange = [one.path for one in inputs if one.path.rpartition("/")[2] not in text or is_placeholder(one.path)]
    strange = [path for path in strange if path not in shown.files and not re.search(rf"`{re.escape(path)}`", text)]
    used = {one.path for one in found}
    known = [name for name in [*shown.files, *file_names(text)] if name not in used and "/" not in name]
    pairs = list(zip(strange, dict.fromkeys(known), strict=False))
    for path in strange:
        base = path.rpartition("/")[2]
        if path.startswith("/") and base in text:
            pairs = [(path, base), *(pair for pair in pairs if pair[0] != path)]
    return pairs


# -- runs -------------------------------------------------------------------------------------------------------------


async def execute(made: str, script: str, config: SandboxConfig, timeout_s: float) -> Execution:
    """Run a script in a fresh sandbox, in a workspace that holds the fixture alone."""
    sandbox = await open_sandbox(config, env=ENV)
    try:
        done = await sandbox.run(Command(("/bin/bash", "-e", "-c", made), timeout_s=timeout_s, merges_stderr=True))
        if not done.is_success:
            raise Unusable("fixture fails", output=done.stdout.text()[-500:])
        before = await _state(sandbox, timeout_s)
        ran = await sandbox.run(Command(("/bin/bash", "-c", script), timeout_s=timeout_s))
        await sandbox.kill_all()
        after = await _state(sandbox, timeout_s)
    finally:
        await sandbox.close()
    if ran.stdout.num_left_out:
        raise Unusable("output too long", num_bytes=ran.stdout.num_bytes)
    status = ran.status if ran.reason is OutcomeReason.EXITED else 1000
    return Execution(status, ran.stdout.text(), ran.stderr.text(), before, after)


async def _state(sandbox: Sandbox, timeout_s: float) -> State:
    command = Command(("/usr/bin/env", "python3", "-I", "-c", _STATE_SOURCE, "show", WORKSPACE), timeout_s=timeout_s)
    done = await sandbox.run(command)
    if not done.is_success or done.stdout.num_left_out:
        raise Unusable("state cannot be read", error=done.stderr.text()[-500:])
    return cast("State", json.loads(done.stdout.text()))


def succeeded(execution: Execution, commands: Sequence[SimpleCommand]) -> bool:
    last = commands[-1].program if commands else ""
    is_fine = execution.status == 0 or (execution.status == 1 and last in ("diff", "cmp", "grep"))
    return is_fine and not _BROKEN.search(execution.stderr)


def missing_files(execution: Execution, candidate: Candidate) -> list[str]:
    """Relative paths that the script did not find."""
    found = [first or second for first, second in _MISSING.findall(execution.stderr)]
    known = {one.path for one in candidate.operands}
    return [path for path in dict.fromkeys(found) if not path.startswith(("/", "..")) and path not in known]


# -- the stage --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Proven:
    candidate: Candidate
    shown: Execution
    task: Execution
    second: Execution


class Build(Stage):
    """Adds `solution`, `fixture`, `expected` and the data of instructions."""

    name = "build"
    runs_in = "threads"

    def __init__(self, config: TerminalConfig) -> None:
        self._config = config
        update = {"image": config.base_image, "workspace": WORKSPACE, "network": "none", "max_output_bytes": 16 << 20}
        self._sandbox = SandboxConfig.model_validate(config.sandbox.model_dump() | update)

    def process(self, item: Item, context: Context) -> Item | Rejection:
        question = read_question(item)
        found = steps(question.answer)
        tried: list[JsonValue] = []
        first: Rejection | None = None
        for script in candidates(found):
            try:
                main = [step.script for step in found if not step.is_alternative]
                proven = self._try(script, question, context)
                if len(main) > 1 and script == "\n".join(main):
                    proven = self._reduced(proven, main, question, context)
                return described(item, proven, question)
            except Unusable as error:
                first = first or error.rejection
                tried.append({"reason": error.rejection.reason, "script": script, **error.rejection.evidence})
        if self._config.repair_model is not None and first is not None:
            for number in range(self._config.max_repairs):
                try:
                    return described(item, self._repaired(item, question, tried, number, context), question)
                except Unusable as error:
                    tried.append({"reason": error.rejection.reason, **error.rejection.evidence})
        return Rejection(first.reason if first else "no command in the answer", {"tried": tried})

    def _try(self, script: str, question: Question, context: Context, own_fixture: str = "") -> Proven:
        candidate = replace(prepare(script, question), own_fixture=own_fixture)
        for _ in range(MAX_FOUND):
            proven = self._runs(candidate, question, context)
            missing = missing_files(proven.task, candidate)
            if succeeded(proven.task, candidate.commands) or not missing or own_fixture:
                break
            added = [Operand(path, Role.FILE) for path in missing]
            candidate = replace(candidate, operands=[*candidate.operands, *added])
        check(proven)
        made = fixture.at_another_time(candidate.fixture(question, fixture.TASK))
        again = context.run(execute(made, candidate.script, self._sandbox, self._config.timeout_s))
        if not same(again, proven.task, is_ordered(candidate)):
            raise Unusable("not repeatable", script=candidate.script)
        return proven

    def _runs(self, candidate: Candidate, question: Question, context: Context) -> Proven:
        kinds = (fixture.SHOWN, fixture.TASK, fixture.SECOND)
        shown, task, second = (self._run(candidate, question, kind, context) for kind in kinds)
        return Proven(candidate, shown, task, second)

    def _run(self, candidate: Candidate, question: Question, kind: int, context: Context) -> Execution:
        made = candidate.fixture(question, kind)
        return context.run(execute(made, candidate.script, self._sandbox, self._config.timeout_s))

    def _reduced(self, proven: Proven, main: Sequence[str], question: Question, context: Context) -> Proven:
        """The solution without the steps that it does not need: of steps that print, the first one is the answer."""
        if not proven.task.changes:
            return self._try(main[0], question, context)
        chosen = list(main)
        for step in reversed(main):
            rest = [one for one in chosen if one is not step]
            if not rest:
                continue
            try:
                smaller = self._try("\n".join(rest), question, context)
            except Unusable:
                continue
            if smaller.task.changes and smaller.task.after == proven.task.after:
                chosen, proven = rest, smaller
        return proven

    def _repaired(
        self, item: Item, question: Question, tried: Sequence[JsonValue], number: int, context: Context
    ) -> Proven:
        """Ask the model for a script and a fixture; they pass the same gates."""
        assert self._config.repair_model is not None
        prompt = (
            "A question about the command line and its accepted answer should become a task in an empty folder. Reply "
            'with one JSON object {"fixture": bash script that creates the files, "script": bash script that solves '
            "it}, without network, root, random numbers or clock.\n\n"
            f"Question: {question.text}\n\nAnswer: {plain(question.answer)}\n\n"
            f"Tried so far: {json.dumps(tried[-3:])[:4000]}"
        )
        completion = context.ask(self._config.repair_model, [{"role": "user", "content": prompt}], draw=number)
        match = re.search(r"\{.*\}", completion.content, re.DOTALL)
        try:
            reply = json.loads(match[0]) if match else {}
            made, script = str(reply["fixture"]), str(reply["script"])
            read_commands(made)
        except (ValueError, KeyError, TypeError) as error:
            raise Unusable("the model's repair cannot be read", reply=completion.content[:500]) from error
        for reason, evidence in refusals(read_commands(made), made, functions(made)):
            raise Unusable(reason, found=evidence, script=made)
        proven = self._try(script, question, context, own_fixture=made)
        if not proven.task.changes and any(one.role is not Role.OUTPUT for one in proven.candidate.operands):
            bare = context.run(execute(":", proven.candidate.script, self._sandbox, self._config.timeout_s))
            if bare.stdout == proven.task.stdout:
                raise Unusable("result does not depend on the files", script=script)
        return proven


def check(proven: Proven) -> None:
    """The gates on the runs of a candidate."""
    script, commands = proven.candidate.script, proven.candidate.commands
    for execution in (proven.task, proven.second, proven.shown):
        if not succeeded(execution, commands):
            shown = execution.stderr[-500:]
            raise Unusable("answer fails", script=script, status=execution.status, stderr=shown)
    for execution in (proven.task, proven.second):
        if not execution.changes and not execution.stdout.strip():
            raise Unusable("no effect", script=script)
    if proven.task.changes != proven.second.changes:
        raise Unusable("no effect", script=script)
    has_inputs = any(one.role is not Role.OUTPUT for one in proven.candidate.operands)
    is_varied = has_inputs and not proven.candidate.own_fixture and proven.task.before != proven.second.before
    if is_varied and not proven.task.changes and proven.task.stdout == proven.second.stdout:
        raise Unusable("result does not depend on the files", script=script)
    if not proven.task.changes and len(proven.task.stdout) > state.MAX_TEXT:
        raise Unusable("output too long", num_bytes=len(proven.task.stdout))


def same(first: Execution, second: Execution, ordered: bool) -> bool:
    outputs = [state.lines(one.stdout, ordered) for one in (first, second)]
    return first.after == second.after and (first.changes or outputs[0] == outputs[1])


def is_ordered(candidate: Candidate) -> bool:
    """Whether the order of printed lines follows from the files: not that of folders' entries and of awk's arrays."""
    names = {command.program for command in candidate.commands}
    if "sort" in names:
        return True
    walks = "find" in names or any(
        command.program.endswith("grep") and any(re.match(r"-\w*[rR]", text) for text in command.texts)
        for command in candidate.commands
    )
    return not walks and not re.search(r"for \(\w+ in \w+\)", candidate.script)


def described(item: Item, proven: Proven, question: Question) -> Item:
    candidate, task = proven.candidate, proven.task
    shown = read_shown(question.blocks, [one.path for one in candidate.operands if one.role is not Role.OUTPUT])
    outputs = [*shown.expected, *shown_outputs(question.answer)]
    result = result_text(proven.shown)
    confirmed = any(_plain(result) == _plain(output) for output in outputs) if result else False
    return item.adding(
        solution=candidate.script,
        fixture=candidate.fixture(question, fixture.TASK),
        expected=cast("JsonValue", expected_state(proven)),
        is_confirmed=confirmed,
        prints=not task.changes,
        example=result_text(proven.second)[:2000],
        example_expected=list(shown.expected),
        inputs=sorted(path for path, entry in task.before.items() if entry["kind"] != "folder"),
        changed=changed_paths(task, optional_paths(candidate)),
    )


def _plain(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().split("\n")]


def result_text(execution: Execution) -> str:
    """The printed output, or the only text file that was written."""
    if not execution.changes:
        return execution.stdout
    texts = [
        str(entry["text"])
        for path, entry in execution.after.items()
        if "text" in entry and execution.before.get(path) != entry
    ]
    return texts[0] if len(texts) == 1 else ""


def optional_paths(candidate: Candidate) -> list[str]:
    """Scripts that a solution writes and runs: another solution need not have them."""
    made = {one.path for one in candidate.operands if one.role is Role.OUTPUT}
    used = {text for command in candidate.commands if command.program in _PROGRAMS for text in command.texts[:1]}
    return sorted(made & used)


def changed_paths(execution: Execution, optional: Sequence[str]) -> dict[str, JsonValue]:
    before, after = execution.before, execution.after
    return {
        "created": sorted(path for path in after if path not in before and path not in optional),
        "removed": sorted(path for path in before if path not in after),
        "changed": sorted(path for path in after if path in before and after[path] != before[path]),
    }


def expected_state(proven: Proven) -> dict[str, object]:
    """The expected state that `state.py check` compares with."""
    task, optional = proven.task, optional_paths(proven.candidate)
    modes = [
        path
        for path, entry in task.after.items()
        if path in task.before and entry.get("mode") != task.before[path].get("mode")
    ]
    entries = {path: {k: v for k, v in entry.items() if k != "text"} for path, entry in sorted(task.after.items())}
    if not task.changes:
        entries[OUTPUT] = {"kind": "file", "mode": "0644", "text": task.stdout}
    return {
        "entries": entries,
        "optional": optional,
        "compares_modes": bool(modes),
        "output": None if task.changes else OUTPUT,
        "is_ordered": is_ordered(proven.candidate),
    }
