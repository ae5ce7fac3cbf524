"""The pipeline of Terminal-Gym: a dump of questions in, verified task folders out.

    posts ─▶ gate ─▶ extract ─▶ grade ─▶ build ─▶ prove ─▶ select ─▶ write

`build` runs the answer on fixtures; `prove` runs the folder as any other: its solution must have perf 1 twice, doing
nothing perf 0. `select` measures a reference solver where one is configured, and else takes the configured hints.

The gates on a question's text, and its grade:

    length      long enough to state a task, short enough to be one task
    system      asks about Linux, or about no system in particular
    form        asks how to do something, not for an explanation or an opinion
    grade       excellent, good, fair or poor; the first two stay

A variant is selected if at least one attempt passed and the one-sided 95% Clopper–Pearson bound of its pass rate is
below 0.8: with k of n attempts passed, the bound is the p at which P(at most k of n pass) = 0.05. After 4, 8, 16 and 32
attempts,

    selected      k ≥ 1 and bound(k, n) < 0.8
    dropped       no further attempts up to 32 could select it, or 32 are made
    undecided     otherwise: the number of attempts doubles

Variants are tried from the fewest hints on; the first selected one is the task. The same tests decide for all variants.
"""

import functools
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import cast

from m2forge.errors import DataError, EngineError, RunError
from m2forge.pipelines.completion import EndpointError
from m2forge.pipelines.output import WriteFolders
from m2forge.pipelines.shell_agent import Malformed, Shell, converse
from m2forge.pipelines.stage import Context, Item, Messages, Pipeline, Rejection, Rule, Source, Stage
from m2forge.pipelines.terminal.build import Build, Unusable, prepare, read_question
from m2forge.pipelines.terminal.config import SolverConfig, TerminalConfig
from m2forge.pipelines.terminal.operand import Role
from m2forge.pipelines.terminal.posts import Block, EgSource, InterCodeSource, PostsSource, plain
from m2forge.pipelines.terminal.script import candidates, steps
from m2forge.pipelines.terminal.task_folder import folder_name, instruction, instructions, task_files
from m2forge.records import JsonValue, Verdict
from m2forge.tasks.folders.environment import FolderEnvironment
from m2forge.tasks.folders.environment import prepare as prepare_folder
from m2forge.tasks.folders.folder import read_folder, write_folder
from m2forge.tasks.folders.trial import NOP, NUM_TRIES, ORACLE, attempt
from m2forge.tasks.folders.verification import verify_attempt

_OTHER_SYSTEMS_NAMES = """
windows windows-7 windows-8 windows-10 windows-11 powershell batch-file cmd cmd.exe wsl macos osx mac os-x applescript
finder homebrew bsd freebsd openbsd solaris aix hp-ux android ios cygwin mingw
"""
OTHER_SYSTEMS = frozenset(_OTHER_SYSTEMS_NAMES.split())
_SYSTEM_TEXT = re.compile(
    r"\b(?:PowerShell|Mac ?OS(?: X)?|OS X|macOS|on (?:my|a) Mac(?:book)?\b|Windows (?:7|8|10|11|XP|Server)|cmd\.exe|"
    r"FreeBSD|OpenBSD|Solaris|AIX|HP-UX|Cygwin|Task Scheduler)\b|(?<!\w)[A-Z]:\\\w"
)
_EXPLANATION = re.compile(
    r"^\W*(?:what (?:does|do|is|are|was|were)\b|what['’]s (?:the )?(?:difference|meaning|best|point)|"
    r"what (?:kind|sort)\b|why\b|when (?:should|to)\b|difference between\b|should (?:i|we)\b|"
    r"which (?:is|one|shell|editor|language|tool|distro)\b|"
    r"is (?:it|there) (?:safe|better|good|any (?:reason|advantage|difference))\b|explain\b|understanding\b|"
    r"pros and cons\b|how does\b|how is\b|who\b|best\b)|\bvs\.?\b|\bversus\b|"
    r"\bbest (?:practice|way to learn|editor|book)",
    re.IGNORECASE,
)
_GOAL = re.compile(
    r"\b(?:how (?:do|can|to|would|should|could)|i (?:want|need|have to|wish)|i['’]d (?:like|rather|love|prefer)|"
    r"would like|is there (?:a|an|any|some)|looking for|trying to|wanted|what(?:'s| is) the|what do|what am i|"
    r"should (?:be|become|give|print|get|end|have)|"
    r"convert|create|remove|replace|find|list|count|print|extract|sort|write)\b|\?",
    re.IGNORECASE,
)


class Grade(StrEnum):
    EXCELLENT = "excellent"
    """States a goal, names the files of the answer, and shows input or result."""
    GOOD = "good"
    """States a goal, and names the files of the answer, or shows input, or needs none."""
    FAIR = "fair"
    """States a goal; the files of the answer are not in the question."""
    POOR = "poor"


KEPT = (Grade.EXCELLENT, Grade.GOOD)


def gate(title: str, tags: Sequence[str], blocks: list[Block], config: TerminalConfig) -> Rejection | None:
    """The first gate that a question does not pass."""
    text = f"{title}\n{plain(blocks)}"
    if not config.min_characters <= len(text) <= config.max_characters:
        return Rejection("length", {"characters": len(text)})
    if others := sorted(set(tags) & OTHER_SYSTEMS):
        return Rejection("another system", {"tags": list(others)})
    if found := _SYSTEM_TEXT.search(text):
        return Rejection("another system", {"text": found[0]})
    if found := _EXPLANATION.search(title):
        return Rejection("asks for an explanation or opinion", {"title": title})
    return None


def grade(title: str, blocks: list[Block], operands: Sequence[str]) -> tuple[Grade, dict[str, bool]]:
    """`operands`: files and folders that the answer works on. Returns the grade and its evidence."""
    text = f"{title}\n{plain(blocks)}"
    named = [name for name in operands if _is_named(name, text)]
    facts = {
        "states a goal": bool(_GOAL.search(text)),
        "names the files": bool(operands) and len(named) == len(operands),
        "shows input or result": any(block.is_code for block in blocks),
        "needs no files": not operands,
    }
    if not facts["states a goal"]:
        return Grade.POOR, facts
    if facts["names the files"] and facts["shows input or result"]:
        return Grade.EXCELLENT, facts
    if facts["names the files"] or facts["shows input or result"] or facts["needs no files"]:
        return Grade.GOOD, facts
    return Grade.FAIR, facts


def _is_named(operand: str, text: str) -> bool:
    """Whether the question names a file or folder; of a glob, its longest literal part."""
    first = max(re.split(r"[*?]|\[[^\]]*\]", operand.removeprefix("./").split("/")[0]), key=len)
    return bool(first.strip(".")) and first in text


# -- the stages --------------------------------------------------------------------------------------------------------

FOLDER = "tasks"
NUM_PROOFS = 2
_PROMPT = (
    "Solve this task in a Linux container. Reply with one bash script in a code block; it runs once, in the working "
    "directory, without network.\n\n"
)
_SHELL_PROMPT = (
    "Solve this task in a Linux container with the tool. Each command runs in a shell of its own, in the working "
    "directory, without network. When the task is done, reply without a call.\n\n"
)


def make_pipeline(config: TerminalConfig) -> Pipeline:
    return Pipeline(
        make_source(config),
        (
            Rule("gate", lambda item: check_gates(item, config)),
            Rule("extract", lambda item: extract(item, config)),
            Rule("grade", check_grade),
            Build(config),
            Prove(config),
            Select(config),
            WriteFolders(FOLDER, lambda item, context: (folder_name(item), task_files(item))),
        ),
    )


def make_source(config: TerminalConfig) -> Source:
    if config.posts is not None:
        return PostsSource(Path(config.posts), config)
    if config.eg is not None:
        return EgSource(Path(config.eg))
    assert config.intercode is not None
    return InterCodeSource(Path(config.intercode))


def check_gates(item: Item, config: TerminalConfig) -> Item | Rejection:
    question = read_question(item)
    if len(plain(question.answer)) > config.max_characters:
        return Rejection("length", {"characters": len(plain(question.answer))})
    rejection = gate(question.title, cast("Sequence[str]", item.data["tags"]), question.blocks, config)
    return rejection or item


def extract(item: Item, config: TerminalConfig) -> Item | Rejection:
    """Commands that can run: at least one candidate of the answer uses only programs that the image has."""
    question = read_question(item)
    found = candidates(steps(question.answer))
    if not found:
        return Rejection("no command in the answer", {"answer": plain(question.answer)[:300]})
    first: Unusable | None = None
    for script in found:
        try:
            candidate = prepare(script, question)
        except Unusable as error:
            first = first or error
            continue
        if len(candidate.commands) > config.max_commands:
            return Rejection("too many commands", {"commands": len(candidate.commands), "script": script})
        inputs = [one.path for one in candidate.operands if one.role is not Role.OUTPUT and one.path != "."]
        return item.adding(operands=cast("JsonValue", inputs))
    assert first is not None
    return first.rejection


def check_grade(item: Item) -> Item | Rejection:
    question = read_question(item)
    found, facts = grade(question.title, question.blocks, cast("Sequence[str]", item.data["operands"]))
    if found not in KEPT:
        return Rejection(f"graded {found}", dict(facts))
    return item.adding(grade=str(found))


class _Trials:
    """A task folder in the run's scratch folder, with its image; both are removed at the end."""

    def __init__(self, item: Item, text: str, hints: int, config: TerminalConfig, context: Context) -> None:
        self._item = item.adding(instruction=text, hints=hints)
        self._config, self._context = config, context

    def __enter__(self) -> "_Trials":
        scratch = self._context.run_dir / "scratch"
        scratch.mkdir(exist_ok=True)
        self._root = Path(tempfile.mkdtemp(dir=scratch))
        path = self._root / folder_name(self._item)
        write_folder(path, task_files(self._item))
        folder = read_folder(path)
        self._environment: FolderEnvironment = self._context.run(
            prepare_folder(folder, self._config.sandbox, self._config.base_image)
        )
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    def run(self, agent: str) -> Verdict:
        return _retried(lambda: self._context.run(attempt(self._environment, agent)))

    def converse(self, solver: SolverConfig, text: str, number: int) -> Verdict:
        """An attempt of a model with a shell; a malformed completion ends it."""
        return _retried(lambda: self._converse(solver, text, number))

    def _converse(self, solver: SolverConfig, text: str, number: int) -> Verdict:
        assert solver.model is not None
        sandbox = self._context.run(self._environment.open())
        try:
            shell = Shell(sandbox, command_s=solver.command_s, max_characters=solver.max_output)
            messages: Messages = [{"role": "user", "content": _SHELL_PROMPT + text}]
            with suppress(Malformed):
                converse(
                    shell, self._item, self._context, solver.model, messages, draw=number, max_turns=solver.max_turns
                )
            return self._context.run(verify_attempt(self._environment, sandbox))
        finally:
            self._context.run(sandbox.close())


def _retried(run: Callable[[], Verdict]) -> Verdict:
    """The verdict of an attempt whose sandboxes worked. Raises if they fail repeatedly, or an endpoint does: then the
    item is failed, and the attempt does not count."""
    for number in range(1, NUM_TRIES + 1):
        try:
            return run()
        except (EndpointError, RunError):
            raise
        except (EngineError, OSError):
            if number == NUM_TRIES:
                raise
    raise AssertionError


class Prove(Stage):
    """The written folder must accept its solution and refuse an attempt that does nothing."""

    name = "prove"
    runs_in = "threads"

    def __init__(self, config: TerminalConfig) -> None:
        self._config = config

    def process(self, item: Item, context: Context) -> Item | Rejection:
        hints = self._config.hints
        try:
            with _Trials(item, instruction(item, hints), hints, self._config, context) as trials:
                for _ in range(NUM_PROOFS):
                    golden = trials.run(ORACLE)
                    if golden.perf != 1:
                        return Rejection("solution fails its tests", {"evidence": dict(golden.evidence)})
                nothing = trials.run(NOP)
        except DataError as error:
            return Rejection("no valid task folder", {"error": str(error)})
        if nothing.perf != 0:
            return Rejection("doing nothing passes", {"evidence": dict(nothing.evidence)})
        return item


class Select(Stage):
    """Adds the instruction: of the variant with the fewest hints that the solver passes sometimes but not too often."""

    name = "select"
    runs_in = "threads"

    def __init__(self, config: TerminalConfig) -> None:
        self._config = config

    def process(self, item: Item, context: Context) -> Item | Rejection:
        if self._config.solver is None:
            hints = self._config.hints
            return item.adding(instruction=instruction(item, hints), hints=hints)
        measured: list[JsonValue] = []
        for hints, text in enumerate(texts := instructions(item)):
            if text in texts[:hints]:
                continue
            with _Trials(item, text, hints, self._config, context) as trials:
                found = measure(lambda number: self._attempt(trials, text, number, context))  # noqa: B023
            entry: dict[str, JsonValue] = {"hints": hints, "decision": str(found.decision)}
            entry |= {"passed": found.num_passed, "attempts": found.num_attempts, "bound": round(found.bound, 4)}
            measured.append(entry)
            if found.decision is Decision.SELECTED:
                return item.adding(instruction=text, hints=hints, measured=measured)
            if found.decision is Decision.TOO_EASY:
                # More hints make it easier still.
                break
        last = cast("dict[str, JsonValue]", measured[-1])
        return Rejection(str(last["decision"]), {"measured": measured})

    def _attempt(self, trials: _Trials, text: str, number: int, context: Context) -> bool:
        solver = self._config.solver
        assert solver is not None
        if solver.command is not None:
            return trials.run(f"export M2FORGE_ATTEMPT={number}; {solver.command}").perf == 1
        if solver.form == "shell":
            return trials.converse(solver, text, number).perf == 1
        assert solver.model is not None
        completion = context.ask(solver.model, [{"role": "user", "content": _PROMPT + text}], draw=number)
        script = read_script(completion.content)
        return bool(script) and trials.run(script).perf == 1


def read_script(content: str) -> str:
    """The first code block of a completion, else all of it."""
    _, fence, rest = content.partition("```")
    return rest.partition("\n")[2].partition("```")[0] if fence else content


# -- the choice of a variant -------------------------------------------------------------------------------------------

NUM_ATTEMPTS = (4, 8, 16, 32)
MAX_PASS_RATE = 0.8
CONFIDENCE = 0.95
_NUM_STEPS = 60


class Decision(StrEnum):
    SELECTED = "selected"
    TOO_EASY = "too easy"
    UNSOLVED = "never solved"


@dataclass(frozen=True, slots=True)
class Measured:
    decision: Decision
    num_passed: int
    num_attempts: int
    bound: float


@functools.cache
def upper_bound(num_passed: int, num_attempts: int) -> float:
    """Clopper–Pearson, one-sided, found by bisection: the probability of at most k passes falls with the pass rate."""
    if num_passed >= num_attempts:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_NUM_STEPS):
        middle = (low + high) / 2
        if _at_most(num_passed, num_attempts, middle) > 1 - CONFIDENCE:
            low = middle
        else:
            high = middle
    return high


def _at_most(num_passed: int, num_attempts: int, rate: float) -> float:
    return math.fsum(
        math.comb(num_attempts, k) * rate**k * (1 - rate) ** (num_attempts - k) for k in range(num_passed + 1)
    )


def measure(attempt: Callable[[int], bool]) -> Measured:
    """`attempt`: makes the attempt of a number, from 0 on, and returns whether it passed."""
    num_passed = num_made = 0
    for number in NUM_ATTEMPTS:
        num_passed += sum(attempt(index) for index in range(num_made, number))
        num_made = number
        bound = upper_bound(num_passed, num_made)
        if num_passed and bound < MAX_PASS_RATE:
            return Measured(Decision.SELECTED, num_passed, num_made, bound)
        if upper_bound(num_passed, NUM_ATTEMPTS[-1]) >= MAX_PASS_RATE:
            return Measured(Decision.TOO_EASY, num_passed, num_made, bound)
    decision = Decision.TOO_EASY if num_passed else Decision.UNSOLVED
    return Measured(decision, num_passed, num_made, upper_bound(num_passed, num_made))
