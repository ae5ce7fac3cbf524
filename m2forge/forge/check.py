"""Held-out tasks, attempted by the policy of the moment: how often it succeeds. Nothing is learnt from them.

The same tasks every time, of all domains of the last stage, at any difficulty that it allows; none is shared with
training (`tasks/task_set.py`). One line of `checks.jsonl` for each check; of a few tasks, the same every time, what the
policy did is kept (`forge/kept.py`).
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
"""Tasks whose attempts are kept."""
MAX_INTERRUPTIONS = 20
"""Of one task: one at which its agent dies every time must not go on for ever."""


@dataclass(frozen=True, slots=True)
class Check:
    step: int
    """Of the policy when it began."""
    num_tasks: int
    success: float
    """Share of the tasks solved."""
    margin: float
    """Half of the 95% interval."""
    by_family: dict[str, float]
    num_broken: int
    """Attempts that broke; they count as not solved."""
    seconds: float
    at_s: float = 0.0
    """When it ended, in seconds since the epoch; 0 where that was not noted."""
    versions: dict[str, float] = field(default_factory=dict)
    """Steps of the policy that sampled its tokens, rising, and the share of the tokens that each sampled; empty where
    that was not noted."""
    branch: str = ""
    """Of the policy when it began: with `step` its version. Empty where that was not noted."""
    branches: dict[str, list[str]] = field(default_factory=dict)
    """The branches that the sampler served each of these steps from meanwhile. Several where the trainer went back
    and reached the step again: tokens name their step alone, so the share is that of all of them."""

    @property
    def names(self) -> list[str]:
        """The versions that it sampled from, for messages: step, and branch where it is known."""
        pairs = [(step, branch) for step in self.versions for branch in self.branches.get(step) or [""]]
        return [f"{step}-{branch}" if branch else step for step, branch in pairs]


async def held_out_tasks(config: ForgeConfig, runner: TaskRunner) -> list[Task]:
    """Of every family of the last stage alike."""
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
    """How the policy, at `version` when it begins, fares, and what it did at `NUM_KEPT` of the tasks, spread over all
    of them."""
    started_s, step = time.monotonic(), version.step
    num_tokens = Counter[int]()
    # Trees may be long. One thread: several that compute would keep the event loop waiting for the interpreter's lock.
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
    """Tokens that each step of the policy sampled."""
    return Counter(step for sample in tree.samples for step in sample.versions.tolist())


def terms_of(config: ForgeConfig, task: Task) -> Terms:
    """The context is that of the last stage, which the tasks are of."""
    return Terms(config.check.sampling, config.curriculum.stages[-1].domains[task.domain].context)


async def _try(agents: Agents, task: Task, name: str, terms: Terms) -> Tried | None:
    """None where it broke. That a process died says nothing about the policy: the task is attempted anew."""
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
    """A torn last line, of a loop that died while it wrote, is left out."""
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(whole_lines(path.read_bytes()), start=1):
        try:
            found.append(Check(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise RecordError(f"{path}, line {number}: not an evaluation ({error}); remove the line") from error
    return found
