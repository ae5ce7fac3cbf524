"""The pipeline `questions`: tasks of any source in, verified task folders and trajectories for fine-tuning out.

    tasks → expand* → length → dedup → rubric* → gates → write → teach → verify → select → write-lines

The gates of a task: its reference answer has perf 1, an empty submission has less, and a task folder can hold it.
Without teachers the trajectories are the source's demonstrations. Stages with a * need a model and are left out without
one. Folders are written to `tasks/`, trajectories to `trajectories.jsonl`.
"""

import asyncio
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import ClassVar, Literal, cast

from m2forge.errors import ConfigError, DataError
from m2forge.pipelines.config import QuestionsConfig
from m2forge.pipelines.output import WriteFolders, WriteLines
from m2forge.pipelines.shared_stage import (
    Dedup,
    Expand,
    Fields,
    Rubric,
    Select,
    Teach,
    Teacher,
    Verify,
    model_scores,
    model_teacher,
    model_texts,
)
from m2forge.pipelines.stage import Context, Item, Messages, Passed, Pipeline, Rejection, Rule, SetStage, Source, Stage
from m2forge.records import ROLLOUT_KEY, JsonValue, Submission, Task, Verdict
from m2forge.tasks.check import write_files
from m2forge.tasks.family import SPLIT_KEY
from m2forge.tasks.folders.export import draw_tasks, folder_name, task_files
from m2forge.tasks.folders.folder import FolderFile
from m2forge.tasks.runner import TaskRunner
from m2forge.tasks.source import SourceKind, located, parse_source
from m2forge.tasks.task_set import FamilyInfo, split_of
from m2forge.text.message import message_to_openai, tool_to_openai

DEMONSTRATION = "demonstration"
"""The teacher of a pipeline without models."""
REWRITE = (
    "Rewrite the instruction of a task in other words, each time differently. Every number, name and condition stays, "
    "and so does the form of the answer that it asks for."
)


def make_pipeline(config: QuestionsConfig) -> Pipeline:
    tasks = _TaskSource(config)
    stages: list[Stage | SetStage] = []
    if config.writer is not None:
        texts = model_texts(config.writer, REWRITE, config.num_variants)
        stages.append(Expand(lambda item, context: _rewritten(item, texts(_instruction(item), context))))
    stages.append(Rule("length", lambda item: _fits(item, config.min_words, config.max_words)))
    stages.append(Dedup(_instruction, threshold=config.threshold))
    if config.judge is not None:
        stages.append(Rubric(model_scores(config.judge, config.criteria, _instruction), config.min_score))
    answers = _Answers(config)
    teachers: dict[str, Teacher] = {name: model_teacher(name, _prompt) for name in config.teachers}
    stages += [
        _Gates(config),
        WriteFolders("tasks", tasks.folder),
        Teach(teachers or {DEMONSTRATION: _demonstrated}, config.num_draws if teachers else 1),
        answers,
        Select(lambda item: str(_fields(item)["id"]), _brevity, config.max_per_task),
        WriteLines("trajectories.jsonl", _line),
    ]
    return Pipeline(tasks, tuple(stages))


# -- items -------------------------------------------------------------------------------------------------------------


def _fields(item: Item) -> Fields:
    return cast("Fields", item.data["task"])


def _instruction(item: Item) -> str:
    return str(_fields(item)["instruction"])


def _rewritten(item: Item, texts: list[str]) -> list[Fields]:
    task = _fields(item)
    return [
        {"task": {**task, "id": f"{task['id']}-v{number}", "instruction": text}} for number, text in enumerate(texts, 1)
    ]


def _fits(item: Item, least: int, most: int) -> Passed | Rejection:
    num_words = len(_instruction(item).split())
    if least <= num_words <= most:
        return item
    return Rejection("too short" if num_words < least else "too long", {"num_words": num_words})


def _prompt(item: Item) -> Messages:
    return [{"role": "user", "content": _instruction(item)}]


def _demonstrated(item: Item, context: Context, draw: int) -> Messages:
    return cast("Messages", item.data["demonstration"])


def _brevity(item: Item) -> float:
    return -float(sum(len(str(message.get("content") or "")) for message in cast("Messages", item.data["messages"])))


def _line(item: Item) -> dict[str, JsonValue]:
    task = _fields(item)
    return {
        "id": item.id,
        "messages": item.data["messages"],
        "tools": item.data["tools"],
        "metadata": {"task": task["id"], "teacher": item.data["teacher"], "verdict": item.data["verdict"]},
    }


# -- stages that run the family's code ---------------------------------------------------------------------------------


class _TaskSource(Source):
    name = "tasks"

    def __init__(self, config: QuestionsConfig) -> None:
        self._config = config
        if parse_source(config.source).kind is SourceKind.FOLDERS:
            raise ConfigError(f"questions.source {config.source!r}: these are task folders already")
        self._info: FamilyInfo | None = None

    def fingerprint(self) -> str:
        """The source, and the size and time of its file."""
        text = located(self._config.source)
        source = parse_source(text)
        if source.kind not in (SourceKind.FILE, SourceKind.JSONL):
            return text
        path = Path(source.target)
        if not path.is_file():
            raise ConfigError(
                f"questions.source: {path}: no such file; relative paths count from the working directory"
            )
        return f"{text} {path.stat().st_size} {path.stat().st_mtime_ns}"

    def read(self, context: Context) -> Iterator[Item | Rejection]:
        info, tasks = context.run(self._draw(context))
        self._info = info
        for task in tasks:
            # Variants of a task belong to its split, whatever their own hash.
            fixed = replace(task, metadata={**task.metadata, SPLIT_KEY: split_of(task)})
            yield Item(task.id, {"task": asdict(fixed)})

    def folder(self, item: Item, context: Context) -> tuple[str, Mapping[str, FolderFile]]:
        if self._info is None:
            self._info = context.run(self._describe(context))
        task = Task.read(_fields(item))
        return folder_name(task.id), task_files(task, cast("Fields", item.data["portable"]), self._info)

    async def _draw(self, context: Context) -> tuple[FamilyInfo, list[Task]]:
        config = self._config
        async with TaskRunner(config.verify, _workers(context, self.name)) as runner:
            info = await runner.describe(config.source)
            return info, await draw_tasks(runner, config.source, info, config.num, config.level, context.seed)

    async def _describe(self, context: Context) -> FamilyInfo:
        async with TaskRunner(self._config.verify, _workers(context, self.name)) as runner:
            return await runner.describe(self._config.source)


class _Runs(Stage):
    """A stage with worker processes for the family's code."""

    runs_in: ClassVar[Literal["main", "threads", "processes"]] = "threads"

    def __init__(self, config: QuestionsConfig) -> None:
        self._config = config
        self._runner: TaskRunner | None = None
        self._context: Context | None = None

    def open(self, context: Context) -> None:
        self._context = context
        self._runner = TaskRunner(self._config.verify, _workers(context, self.name))
        context.run(self._runner.__aenter__())

    def close(self) -> None:
        if self._runner is not None and self._context is not None:
            self._context.run(self._runner.__aexit__(None, None, None))
            self._runner = None

    @property
    def runner(self) -> TaskRunner:
        assert self._runner is not None
        return self._runner

    async def verdict(self, task: Task, answer: str, files: JsonValue, workspace: Path) -> Verdict:
        """The verdict on an answer and files in a fresh workspace."""
        write_files(workspace, task.metadata.get("files"))
        write_files(workspace, files)
        try:
            return await self.runner.verify(task, Submission(answer, str(workspace)))
        finally:
            await asyncio.to_thread(shutil.rmtree, workspace)


class _Gates(_Runs):
    name = "gates"

    def process(self, item: Item, context: Context) -> Passed | Rejection:
        return context.run(self._judge(item, context))

    async def _judge(self, item: Item, context: Context) -> Passed | Rejection:
        task, workspace = Task.read(_fields(item)), _workers(context, self.name) / folder_name(item.id)
        if ROLLOUT_KEY in task.metadata:
            return Rejection("drives its own rollouts")
        files = task.metadata.get("reference_files")
        try:
            messages = await self.runner.demonstrate(task, task.id)
        except DataError as error:
            return Rejection("no reference", {"error": str(error)})
        golden = await self.verdict(task, messages[-1].content, files, workspace)
        if golden.perf < 1:
            return Rejection("reference fails", {"verdict": _json(golden)})
        empty = await self.verdict(task, "", None, workspace)
        if empty.perf >= 1:
            return Rejection("empty submission passes", {"verdict": _json(empty)})
        try:
            portable = await self.runner.portable(task)
        except DataError as error:
            return Rejection("no folder can hold it", {"error": str(error)})
        return item.adding(
            portable=portable,
            demonstration=[message_to_openai(message) for message in messages],
            tools=[tool_to_openai(tool) for tool in await self.runner.tools(task)],
            golden=_json(golden),
        )


class _Answers(_Runs):
    """Verifies the answers of teachers; demonstrations have their verdict already."""

    def __init__(self, config: QuestionsConfig) -> None:
        super().__init__(config)
        self._verify = Verify(self._check)
        self.name = self._verify.name

    def open(self, context: Context) -> None:
        if self._config.teachers:
            super().open(context)

    def process(self, item: Item, context: Context) -> Passed | Rejection:
        return self._verify.process(item, context)

    def _check(self, item: Item, context: Context) -> Verdict:
        if item.data["teacher"] == DEMONSTRATION:
            return Verdict.read(cast("Fields", item.data["golden"]))
        answer = str(cast("Messages", item.data["messages"])[-1].get("content") or "")
        workspace = _workers(context, self.name) / folder_name(item.id)
        return context.run(self.verdict(Task.read(_fields(item)), answer, None, workspace))


def _workers(context: Context, stage: str) -> Path:
    """The folder of a stage's worker processes and workspaces."""
    return context.run_dir / "scratch" / stage


def _json(verdict: Verdict) -> JsonValue:
    return asdict(verdict)
