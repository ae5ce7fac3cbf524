"""The pipeline of Terminal-Gym: a dump of questions in, verified task folders out.

    posts ─▶ gate ─▶ extract ─▶ grade ─▶ build ─▶ prove ─▶ select ─▶ write

`build` runs the answer on fixtures; `prove` runs the folder as any other: its solution must have perf 1, doing nothing
perf 0, each twice. `select` measures a reference solver where one is configured, and else takes the configured hints.
"""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from m2forge.errors import DataError, EngineError
from m2forge.pipelines.output import WriteFolders
from m2forge.pipelines.stage import Context, Item, Pipeline, Rejection, Rule, Source, Stage
from m2forge.pipelines.terminal import answer, gate, selection
from m2forge.pipelines.terminal.build import Build, Unusable, prepare, read_question
from m2forge.pipelines.terminal.config import TerminalConfig
from m2forge.pipelines.terminal.instruction import instruction
from m2forge.pipelines.terminal.markup import plain
from m2forge.pipelines.terminal.operand import Role
from m2forge.pipelines.terminal.package import EgSource, InterCodeSource
from m2forge.pipelines.terminal.posts import PostsSource
from m2forge.pipelines.terminal.task_folder import folder_name, task_files
from m2forge.records import JsonValue, Verdict
from m2forge.tasks.folders.environment import FolderEnvironment
from m2forge.tasks.folders.environment import prepare as prepare_folder
from m2forge.tasks.folders.folder import read_folder, write_folder
from m2forge.tasks.folders.trial import NOP, NUM_TRIES, ORACLE, attempt

FOLDER = "tasks"
NUM_PROOFS = 2
_PROMPT = (
    "Solve this task in a Linux container. Reply with one bash script in a code block; it runs once, in the working "
    "directory, without network.\n\n"
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
    rejection = gate.gate(question.title, cast("Sequence[str]", item.data["tags"]), question.blocks, config)
    return rejection or item


def extract(item: Item, config: TerminalConfig) -> Item | Rejection:
    """Commands that can run: at least one candidate of the answer uses only programs that the image has."""
    question = read_question(item)
    found = answer.candidates(answer.steps(question.answer))
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
    found, facts = gate.grade(question.title, question.blocks, cast("Sequence[str]", item.data["operands"]))
    if found not in gate.KEPT:
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
        for number in range(1, NUM_TRIES + 1):
            try:
                return self._context.run(attempt(self._environment, agent))
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
        for hints in range(4):
            text = instruction(item, hints)
            with _Trials(item, text, hints, self._config, context) as trials:
                found = selection.measure(lambda number: self._attempt(trials, text, number, context))  # noqa: B023
            entry: dict[str, JsonValue] = {"hints": hints, "decision": str(found.decision)}
            entry |= {"passed": found.num_passed, "attempts": found.num_attempts, "bound": round(found.bound, 4)}
            measured.append(entry)
            if found.decision is selection.Decision.SELECTED:
                return item.adding(instruction=text, hints=hints, measured=measured)
            if found.decision is selection.Decision.TOO_EASY:
                # More hints make it easier still.
                break
        last = cast("dict[str, JsonValue]", measured[-1])
        return Rejection(str(last["decision"]), {"measured": measured})

    def _attempt(self, trials: _Trials, text: str, number: int, context: Context) -> bool:
        solver = self._config.solver
        assert solver is not None
        if solver.command is not None:
            return trials.run(f"export M2FORGE_ATTEMPT={number}; {solver.command}").perf == 1
        assert solver.model is not None
        completion = context.ask(solver.model, [{"role": "user", "content": _PROMPT + text}], draw=number)
        script = read_script(completion.content)
        return bool(script) and trials.run(script).perf == 1


def read_script(content: str) -> str:
    """The first code block of a completion, else all of it."""
    _, fence, rest = content.partition("```")
    return rest.partition("\n")[2].partition("```")[0] if fence else content
