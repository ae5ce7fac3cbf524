"""Evaluates the current policy on held-out tasks: its success rate. Training never uses these attempts.

Every evaluation uses the same tasks, from all domains of the last stage, at any difficulty that it allows; training
shares none of them (`tasks/task_set.py`). Each evaluation appends one line to `checks.jsonl` and stores the attempts at
a few tasks, always the same (`forge/kept.py`).
"""

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

from m2forge.errors import M2ForgeError, RecordError
from m2forge.files import append_line, whole_lines
from m2forge.forge.attempts import Agents, Interrupted, Terms, Tried, WorkerLost
from m2forge.forge.concurrency import gather
from m2forge.forge.config import ForgeConfig
from m2forge.forge.kept import Kept, make_kept
from m2forge.forge.slots import Slots
from m2forge.records import PolicyVersion, Task
from m2forge.tasks.family import family_name
from m2forge.tasks.runner import TaskRunner
from m2forge.tree.token_tree import TokenTree

P = ParamSpec("P")
T = TypeVar("T")

NUM_KEPT = 8
"""Tasks whose attempts are stored."""
MAX_INTERRUPTIONS = 20
"""Maximum interrupted attempts at one task: a task at which the agent always dies must not be retried forever."""


@dataclass(frozen=True, slots=True)
class Check:
    step: int
    """Step of the policy when the evaluation began."""
    num_tasks: int
    success: float
    """Share of the tasks solved."""
    margin: float
    """Half the width of the 95% confidence interval."""
    by_family: dict[str, float]
    num_broken: int
    """Attempts that failed for reasons other than the policy; they count as not solved."""
    seconds: float
    at_s: float = 0.0
    """When it ended, in seconds since the epoch; 0 if not recorded."""
    versions: dict[str, float] = field(default_factory=dict)
    """Share of the tokens that each policy step sampled, by ascending step; empty if not recorded."""
    branch: str = ""
    """Branch of the policy when the evaluation began, which with `step` is its version; empty if not recorded."""
    branches: dict[str, list[str]] = field(default_factory=dict)
    """The branches from which the sampler served each of these steps. A step has several where the trainer resumed
    from an earlier checkpoint and reached it again; tokens record only their step, so its share covers all of them."""

    @property
    def names(self) -> list[str]:
        """The versions that were sampled from, for messages: step, and branch where known."""
        pairs = [(step, branch) for step in self.versions for branch in self.branches.get(step) or [""]]
        return [f"{step}-{branch}" if branch else step for step, branch in pairs]


async def held_out_tasks(config: ForgeConfig, runner: TaskRunner) -> list[Task]:
    """The evaluation's tasks, spread evenly over the families of the last stage."""
    wanted = [family for domain in config.curriculum.stages[-1].domains.values() for family in domain.families]
    tasks: list[Task] = []
    for index, family in enumerate(wanted):
        num = config.check.num_tasks // len(wanted) + (index < config.check.num_tasks % len(wanted))
        tasks += await runner.distinct(family.name, "held_out", config.check.seed, num, *family.difficulty)
    return tasks


async def check(
    agents: Agents,
    tasks: list[Task],
    version: PolicyVersion,
    slots: Slots,
    terms: Callable[[Task], Terms] = lambda task: Terms(),
) -> tuple[Check, list[Kept]]:
    """Evaluate the policy, which is at `version` at the start; returns the result and the attempts at `NUM_KEPT`
    evenly spaced tasks."""
    started_s, step = time.monotonic(), version.step
    num_tokens = Counter[int]()
    # Trees may be long. One thread: several CPU-bound threads would make the event loop wait for the GIL.
    thread = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
    places = {index * len(tasks) // NUM_KEPT for index in range(NUM_KEPT)}
    kept: dict[int, Kept] = {}

    async def attempt(index: int, task: Task) -> float | None:
        async with slots.evaluating():
            tried = await _try(agents, task, f"check-{step}-{int(time.time() * 1e6)}-{index}", terms(task))
        if tried is None:
            return None
        num_tokens.update(await _aside(thread, _count_versions, tried.tree))
        perf = 0.0 if tried.failure is not None else (await agents.runner.verify(task, tried.answer)).perf
        if index in places:
            kept[index] = await _aside(thread, make_kept, step, task, perf, tried.answer, tried.failure, tried.tree)
        return perf

    try:
        perfs = await gather(attempt(index, task) for index, task in enumerate(tasks))
    finally:
        thread.shutdown(wait=False)
    seconds = time.monotonic() - started_s
    shares = {str(sampled): num / num_tokens.total() for sampled, num in sorted(num_tokens.items())}
    found = replace(_tell(tasks, perfs, step, seconds), versions=shares, branch=version.branch)
    return found, [kept[index] for index in sorted(kept)]


async def _aside(thread: ThreadPoolExecutor, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await asyncio.get_running_loop().run_in_executor(thread, lambda: work(*args, **kwargs))


def _count_versions(tree: TokenTree) -> Counter[int]:
    """Number of tokens that each policy step sampled."""
    return Counter(step for sample in tree.samples for step in sample.versions.tolist())


def terms_of(config: ForgeConfig, task: Task) -> Terms:
    """The context limit is that of the last stage, from which the tasks come."""
    return Terms(config.check.sampling, config.curriculum.stages[-1].domains[task.domain].context)


async def _try(agents: Agents, task: Task, name: str, terms: Terms) -> Tried | None:
    """None if the attempt failed. After the death of a process, which says nothing about the policy, it retries."""
    num_deaths = 0
    for attempt in range(MAX_INTERRUPTIONS):
        own = f"{name}-{attempt}"
        try:
            tried = await agents.attempt(own, task, group="", num_deaths=num_deaths, terms=terms)
        except Interrupted as error:
            num_deaths += isinstance(error, WorkerLost)
            continue
        except M2ForgeError:
            return None
        agents.gateway.forget_soon(own)
        return tried
    return None


def _tell(tasks: Sequence[Task], perfs: Sequence[float | None], step: int, seconds: float) -> Check:
    solved = [perf == 1 for perf in perfs]
    by_family: dict[str, list[bool]] = {}
    for task, is_solved in zip(tasks, solved, strict=True):
        by_family.setdefault(family_name(task), []).append(is_solved)
    success = sum(solved) / len(solved)
    return Check(
        step=step,
        num_tasks=len(tasks),
        success=success,
        margin=1.96 * math.sqrt(success * (1 - success) / len(tasks)),
        by_family={name: sum(found) / len(found) for name, found in by_family.items()},
        num_broken=sum(perf is None for perf in perfs),
        seconds=seconds,
        at_s=time.time(),
    )


def note_check(path: Path, found: Check) -> None:
    append_line(path, json.dumps(asdict(found)))


def read_checks(path: Path) -> list[Check]:
    """Skips a partial last line, left by a loop that died while writing."""
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(whole_lines(path.read_bytes()), start=1):
        try:
            found.append(Check(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise RecordError(f"{path}, line {number}: not an evaluation ({error}); remove the line") from error
    return found
