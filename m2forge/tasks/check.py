"""`m2forge tasks check SOURCE`: draws tasks, verifies their reference answers and times it; a source in, a report out.

Everything that is the family's code runs in worker processes under the limits of a run. For each level the report shows
how many tasks there are (drawn, for a family that generates them), how many instructions occur more than once, how many
references the verifier accepts, and how long a verdict takes. A reference is the field `reference` of a line, with its
`reference_files` in the workspace, or the answer of a family's demonstration.

An empty submission should not pass either; tasks whose verifier accepts one are reported. Environments that drive
their own rollouts are only listed.
"""

import asyncio
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from m2forge.errors import ConfigError, DataError
from m2forge.records import ROLLOUT_KEY, JsonValue, Submission, Task, Verdict, VerdictReason
from m2forge.tasks.config import VerifyConfig
from m2forge.tasks.runner import TaskRunner
from m2forge.tasks.source import FOLDERS_PREFIX, SourceKind, parse_source
from m2forge.tasks.task_set import FamilyInfo, Split, split_of

MAX_PROBLEMS = 10
"""Problems that are listed; the others are counted."""
SPLITS: tuple[Split, Split] = ("train", "held_out")


@dataclass(slots=True)
class LevelReport:
    level: int
    num_tasks: int = 0
    num_held_out: int = 0
    num_references: int = 0
    num_solved: int = 0
    """References with perf 1."""
    num_free: int = 0
    """Tasks at which an empty submission has perf 1."""
    times_s: list[float] = field(default_factory=list)
    """Times of the verdicts."""


@dataclass(slots=True)
class CheckReport:
    source: str
    family: FamilyInfo
    levels: list[LevelReport]
    num_duplicates: int
    """Tasks whose instruction an earlier task has too."""
    problems: list[str]

    @property
    def is_sound(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, JsonValue]:
        levels: list[JsonValue] = []
        for level in self.levels:
            times = sorted(level.times_s)
            levels.append(
                {
                    "level": level.level,
                    "num_tasks": level.num_tasks,
                    "num_held_out": level.num_held_out,
                    "num_references": level.num_references,
                    "num_solved": level.num_solved,
                    "num_free": level.num_free,
                    "median_ms": round(1000 * statistics.median(times), 3) if times else None,
                    "max_ms": round(1000 * times[-1], 3) if times else None,
                }
            )
        return {
            "source": self.source,
            "family": self.family.name,
            "domain": str(self.family.domain),
            "is_measured": self.family.measured is not None,
            "num_duplicates": self.num_duplicates,
            "levels": levels,
            "problems": list(self.problems),
        }


def check_source(source: str, config: VerifyConfig, num_tasks: int, seed: int) -> CheckReport:
    """`num_tasks`: how many tasks of each level and split to draw, where the family generates them; of a fixed list all
    are checked, up to that many of each level."""
    with TemporaryDirectory() as folder:
        return asyncio.run(_check(source, config, num_tasks, seed, Path(folder)))


async def _check(source: str, config: VerifyConfig, num_tasks: int, seed: int, folder: Path) -> CheckReport:
    if parse_source(source).kind is SourceKind.FOLDERS:
        path = source.removeprefix(FOLDERS_PREFIX)
        raise ConfigError(f"{source}: the tests of task folders run in sandboxes; use `m2forge tasks run {path}`")
    # A report shows all verdicts of a verifier that raises.
    config = config.model_copy(update={"max_error_share": 1.0})
    async with TaskRunner(config, folder / "workers") as runner:
        info = await runner.describe(source)
        reports, instructions, problems = [], Counter[str](), list[str]()
        for level in range(info.lowest, info.highest + 1):
            tasks = [
                task for split in SPLITS for task in await _draw(runner, source, info, split, seed, num_tasks, level)
            ]
            instructions.update(task.instruction for task in tasks)
            report = LevelReport(level, len(tasks), sum(split_of(task) == "held_out" for task in tasks))
            for index, task in enumerate(tasks):
                await _verify(runner, task, folder / f"workspace-{level}-{index}", report, problems)
            reports.append(report)
    num_duplicates = sum(instructions.values()) - len(instructions)
    if info.counts is not None and num_duplicates:
        problems.append(f"{num_duplicates} tasks repeat the instruction of another")
    return CheckReport(source, info, reports, num_duplicates, problems)


async def _draw(
    runner: TaskRunner, source: str, info: FamilyInfo, split: Split, seed: int, num_tasks: int, level: int
) -> list[Task]:
    listed = info.num_listed(split, level, level)
    num = num_tasks if listed is None else min(listed, num_tasks)
    return [await runner.next_task(source, split, seed, position, level, level) for position in range(num)]


async def _verify(runner: TaskRunner, task: Task, workspace: Path, report: LevelReport, problems: list[str]) -> None:
    if ROLLOUT_KEY in task.metadata:
        return  # Only a rollout of its own can be judged.
    reference = await _reference(runner, task)
    if reference is not None:
        verdict = await _timed(runner, task, reference, task.metadata.get("reference_files"), workspace, report)
        report.num_references += 1
        report.num_solved += verdict.perf == 1
        if verdict.perf < 1:
            problems.append(f"{task.id}: its reference has perf {verdict.perf:g}: {_shown(verdict)}")
    empty = await _timed(runner, task, "", None, workspace, report)
    if empty.perf == 1:
        report.num_free += 1
        problems.append(f"{task.id}: an empty submission has perf 1")
    elif empty.reason is not VerdictReason.JUDGED:
        problems.append(f"{task.id}: an empty submission: {_shown(empty)}")


async def _reference(runner: TaskRunner, task: Task) -> str | None:
    try:
        return (await runner.demonstrate(task, task.id))[-1].content
    except DataError:
        # A solution may be files alone.
        return "" if task.metadata.get("reference_files") else None


async def _timed(
    runner: TaskRunner, task: Task, answer: str, files: JsonValue, workspace: Path, report: LevelReport
) -> Verdict:
    """The verdict on an answer and files in a fresh workspace."""
    write_files(workspace, task.metadata.get("files"))
    write_files(workspace, files)
    started_s = time.perf_counter()
    try:
        verdict = await runner.verify(task, Submission(answer, str(workspace)))
    finally:
        report.times_s.append(time.perf_counter() - started_s)
        await asyncio.to_thread(shutil.rmtree, workspace)
    return verdict


def write_files(workspace: Path, files: JsonValue) -> None:
    """Write a task's files; their paths were checked when the task was read."""
    workspace.mkdir(parents=True, exist_ok=True)
    for name, content in files.items() if isinstance(files, Mapping) else ():
        path = workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content), encoding="utf-8")


def _shown(verdict: Verdict) -> str:
    text = str(verdict.evidence.get("traceback") or dict(verdict.evidence)).strip()
    return text.splitlines()[-1][:200]


def print_report(report: CheckReport, console: Console) -> None:
    kind = "difficulty by measured pass rate" if report.family.measured is not None else "difficulty by level"
    title = f"{report.source}: family {report.family.name}, domain {report.family.domain}, {kind}"
    table = Table(title=title, title_justify="left")
    for heading in ("level", "tasks", "held out", "references solved", "empty solves", "verdict, median", "slowest"):
        table.add_column(heading, justify="right")
    for level in report.levels:
        times = sorted(level.times_s)
        table.add_row(
            str(level.level),
            str(level.num_tasks),
            str(level.num_held_out),
            f"{level.num_solved} of {level.num_references}",
            str(level.num_free),
            *((f"{1000 * statistics.median(times):.1f} ms", f"{1000 * times[-1]:.1f} ms") if times else ("–", "–")),
        )
    console.print(table)
    console.print(f"{report.num_duplicates} repeated instructions")
    for problem in report.problems[:MAX_PROBLEMS]:
        console.print(f"problem: {problem}", markup=False, highlight=False)
    if len(report.problems) > MAX_PROBLEMS:
        console.print(f"and {len(report.problems) - MAX_PROBLEMS} more problems")
