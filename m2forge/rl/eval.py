"""Evaluates the current policy on held-out tasks: before the first step, every `eval.every_steps`, and after the last.

Every evaluation uses the same tasks, from all domains of the last stage, at any difficulty that it allows; training
shares none of them (`tasks/task_set.py`) and never uses these attempts. Each evaluation appends its result, the success
rate above all, as one line to `checks.jsonl`, and stores its attempts at a few tasks, always the same, so that policies
can be compared:

    runs/NAME/kept/step-00000015.json       attempts of the policy at step 15: task, result, and calls as the pool
                                            stores them (`pool/stored.py`)

Evaluations between the first and the last run beside training, on their share of the slots. By default weight updates
continue meanwhile, and the evaluation reports the share of its tokens that each policy version sampled. With
`eval.pin` weight updates wait until it ends, so that it samples from one version; training rollouts then sample from
that version too and lag behind the trainer by the steps it makes meanwhile. An evaluation that dies with its loop wrote
nothing to `checks.jsonl`, so it runs again; so does one of a version that the trainer lost (`rl/layout.py`).
"""

import asyncio
import base64
import contextlib
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from m2forge.agents.attempt import AttemptResult, AttemptRunner, Interrupted, Overrides, WorkerLost
from m2forge.errors import M2ForgeError, RecordError, RunError
from m2forge.files import append_line, whole_lines, write_atomic
from m2forge.pool.stored import CallWriter, read_task, read_tree
from m2forge.records import PolicyVersion, Task
from m2forge.rl.attempts import Slots, gather
from m2forge.rl.config import RLConfig
from m2forge.rl.layout import Layout, read_lineage
from m2forge.tasks.family import family_name
from m2forge.tasks.runner import TaskRunner
from m2forge.tasks.survey import share_held_out
from m2forge.tree.token_tree import TokenTree

P = ParamSpec("P")
T = TypeVar("T")
POLL_S = 0.02
MAX_REPEATS = 3
"""Maximum runs of a pinned evaluation, which is repeated if it sampled from several versions."""
NUM_STORED = 8
"""Tasks whose attempts are stored."""
MAX_INTERRUPTIONS = 20
"""Maximum interrupted attempts at one task: a task at which the agent always dies must not be retried forever."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvalResult:
    """A line of `checks.jsonl`."""

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

    by_level: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """`num_tasks` and `success` of each family, by ascending level; empty if not recorded."""

    @property
    def names(self) -> list[str]:
        """The versions that were sampled from, for messages: step, and branch where known."""
        pairs = [(step, branch) for step in self.versions for branch in self.branches.get(step) or [""]]
        return [f"{step}-{branch}" if branch else step for step, branch in pairs]


@dataclass(frozen=True, slots=True)
class HeldOutAttempt:
    """A stored attempt at a held-out task."""

    step: int
    """Step of the policy when the evaluation began."""
    task: Task
    perf: float
    answer: str
    failure: str | None
    calls: tuple[bytes, ...]
    vocab_size: int

    def tree(self) -> TokenTree:
        return read_tree(self.calls, self.vocab_size, f"{self.task.id} at step {self.step}")


class Evaluations:
    def __init__(self, config: RLConfig, layout: Layout, slots: Slots, served: Sequence[PolicyVersion]) -> None:
        """`served`: the versions that the sampler has served, in order; the caller appends to it."""
        self._config, self._layout, self._slots, self._served = config, layout, slots, served
        self.pin = asyncio.Lock()
        """Held by a pinned evaluation and by each weight update, so that they exclude each other."""
        self._running = asyncio.Lock()
        self._is_over = False
        self._results = read_results(layout.evaluations)

    async def first(self, runner: AttemptRunner[TaskRunner]) -> None:
        """Evaluate before training, unless an earlier loop already did."""
        if self._last_step() is None:
            await self._evaluate(runner)

    async def run_scheduled(self, runner: AttemptRunner[TaskRunner]) -> None:
        """Evaluate whenever it is due, beside training; returns at once if the configuration never lets it be due."""
        seen, every = None, self._config.eval.every_steps
        while every and self._config.eval.num_tasks and not self._is_over:
            if self._served and self._served[-1] != seen:
                seen = self._served[-1]
                if self._is_due(seen, every):
                    await self._evaluate(runner)
            await asyncio.sleep(POLL_S)

    def _is_due(self, served: PolicyVersion, every: int) -> bool:
        """False for a version that the trainer has lost but the sampler still serves."""
        last = self._last_step()
        if not read_lineage(self._layout.lineage).holds(served.step, served.branch):
            return False
        return last is None or served.step // every > last // every

    def _last_step(self) -> int | None:
        """Step of the last evaluated version that the current weights descend from."""
        lineage = read_lineage(self._layout.lineage)
        return max((result.step for result in self._results if lineage.holds(result.step, result.branch)), default=None)

    async def last(self, runner: AttemptRunner[TaskRunner], is_newest: Callable[[], bool]) -> None:
        """Evaluate after training and after any running evaluation. `is_newest`: whether the sampler serves the last
        weights."""
        self._is_over = True
        async with self._running:
            pass
        while not is_newest():
            await asyncio.sleep(POLL_S)
        last = self._last_step()
        if last is None or last < self._config.num_steps:
            await self._evaluate(runner)

    async def _evaluate(self, runner: AttemptRunner[TaskRunner]) -> None:
        if not self._config.eval.num_tasks:
            return
        async with self._running:
            while not self._served:
                await asyncio.sleep(POLL_S)
            with self._slots.evaluation():
                result, stored = await self._attempt_all(runner)
            await asyncio.to_thread(self._write, result, stored)
            self._results.append(result)
        _log.info("step %d: %.1f%% of %d held-out tasks", result.step, 100 * result.success, result.num_tasks)
        if len(result.names) > 1:
            _log.info("step %d: the evaluation sampled from versions %s", result.step, ", ".join(result.names))

    def _write(self, result: EvalResult, stored: list[HeldOutAttempt]) -> None:
        write_attempts(self._layout.eval_attempts, result.step, stored)
        write_result(self._layout.evaluations, result)

    async def _attempt_all(self, runner: AttemptRunner[TaskRunner]) -> tuple[EvalResult, list[HeldOutAttempt]]:
        config = self._config.eval
        for repeat in range(MAX_REPEATS):
            async with self.pin if config.pin else contextlib.nullcontext():
                first = len(self._served) - 1
                tasks = await held_out_tasks(self._config, runner.tasks)
                overrides = partial(eval_overrides, self._config)
                result, stored = await evaluate(runner, tasks, self._served[first], self._slots, overrides)
                result = replace(result, branches=_branches(result, self._served[first:]))
            if not config.pin or len(result.names) <= 1:
                break
            # A restarted sampler loads the newest weights.
            again = "it is repeated" if repeat + 1 < MAX_REPEATS else "it is reported as it is"
            _log.warning("a pinned evaluation sampled from versions %s; %s", ", ".join(result.names), again)
        return result, stored


def _branches(result: EvalResult, served: Sequence[PolicyVersion]) -> dict[str, list[str]]:
    """The distinct branches among the `served` versions of each step that sampled."""
    return {
        step: list(dict.fromkeys(version.branch for version in served if str(version.step) == step and version.branch))
        for step in result.versions
    }


async def held_out_tasks(config: RLConfig, runner: TaskRunner) -> list[Task]:
    """The evaluation's tasks, spread evenly over the families of the last stage."""
    stage = config.curriculum.stages[-1]
    families = {key: await runner.describe(key) for key, _, _ in stage.families()}
    tasks: list[Task] = []
    for share in share_held_out(stage, families, config.eval.num_tasks):
        tasks += await runner.distinct(
            *(share.key, "held_out", config.eval.seed, share.num, share.lowest, share.highest)
        )
    return tasks


def eval_overrides(config: RLConfig, task: Task) -> Overrides:
    """The context limit is that of the last stage, from which the tasks come."""
    sampling = None if config.eval.sampling is None else config.eval.sampling.record()
    return Overrides(sampling, config.curriculum.stages[-1].domains[task.domain].context)


async def evaluate(
    runner: AttemptRunner[TaskRunner],
    tasks: list[Task],
    version: PolicyVersion,
    slots: Slots,
    overrides: Callable[[Task], Overrides] = lambda task: Overrides(),
) -> tuple[EvalResult, list[HeldOutAttempt]]:
    """Evaluate the policy, which is at `version` at the start; returns the result and the attempts at `NUM_STORED`
    evenly spaced tasks."""
    started_s, step = time.monotonic(), version.step
    num_tokens = Counter[int]()
    # Trees may be long. One thread: several CPU-bound threads would make the event loop wait for the GIL.
    thread = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
    indices = {index * len(tasks) // NUM_STORED for index in range(NUM_STORED)}
    stored: dict[int, HeldOutAttempt] = {}
    name = f"check-{step}-{int(time.time() * 1e6)}"

    async def attempt(index: int, task: Task) -> float | None:
        async with slots.evaluating():
            result = await _attempt(runner, task, f"{name}-{index}", overrides(task))
        if result is None:
            return None
        num_tokens.update(await _in_thread(thread, _count_versions, result.tree))
        perf = result.verdict.perf
        if index in indices:
            stored[index] = await _in_thread(
                thread, make_attempt, step, task, perf, result.answer, result.failure, result.tree
            )
        return perf

    try:
        perfs = await gather(attempt(index, task) for index, task in enumerate(tasks))
    finally:
        thread.shutdown(wait=False)
    seconds = time.monotonic() - started_s
    shares = {str(sampled): num / num_tokens.total() for sampled, num in sorted(num_tokens.items())}
    result = replace(_summarise(tasks, perfs, step, seconds), versions=shares, branch=version.branch)
    return result, [stored[index] for index in sorted(stored)]


async def _attempt(
    runner: AttemptRunner[TaskRunner], task: Task, name: str, overrides: Overrides
) -> AttemptResult | None:
    """None if the attempt failed. After the death of a process, which says nothing about the policy, it retries."""
    num_deaths = 0
    for attempt in range(MAX_INTERRUPTIONS):
        id = f"{name}-{attempt}"
        try:
            result = await runner.attempt(id, task, group="", num_deaths=num_deaths, overrides=overrides)
        except Interrupted as error:
            num_deaths += isinstance(error, WorkerLost)
            continue
        except RunError:
            raise
        except M2ForgeError:
            return None
        runner.gateway.delete_soon(id)
        return result
    return None


async def _in_thread(thread: ThreadPoolExecutor, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await asyncio.get_running_loop().run_in_executor(thread, lambda: work(*args, **kwargs))


def _count_versions(tree: TokenTree) -> Counter[int]:
    """Number of tokens that each policy step sampled."""
    return Counter(step for sample in tree.samples for step in sample.versions.tolist())


def _summarise(tasks: Sequence[Task], perfs: Sequence[float | None], step: int, seconds: float) -> EvalResult:
    solved = [perf == 1 for perf in perfs]
    by_family: dict[str, list[bool]] = {}
    by_level: dict[str, dict[str, list[bool]]] = {}
    for task, is_solved in sorted(zip(tasks, solved, strict=True), key=lambda pair: pair[0].difficulty):
        by_family.setdefault(family_name(task), []).append(is_solved)
        levels = by_level.setdefault(family_name(task), {})
        levels.setdefault(f"{task.difficulty:g}", []).append(is_solved)
    success = sum(solved) / len(solved)
    return EvalResult(
        step=step,
        num_tasks=len(tasks),
        success=success,
        margin=1.96 * math.sqrt(success * (1 - success) / len(tasks)),
        by_family={name: sum(flags) / len(flags) for name, flags in by_family.items()},
        num_broken=sum(perf is None for perf in perfs),
        seconds=seconds,
        at_s=time.time(),
        by_level={
            name: {
                level: {"num_tasks": len(flags), "success": sum(flags) / len(flags)} for level, flags in levels.items()
            }
            for name, levels in by_level.items()
        },
    )


def write_result(path: Path, result: EvalResult) -> None:
    append_line(path, json.dumps(asdict(result)))


def read_results(path: Path) -> list[EvalResult]:
    """Skips a partial last line, left by a loop that died while writing."""
    if not path.exists():
        return []
    results = []
    for number, line in enumerate(whole_lines(path.read_bytes()), start=1):
        try:
            results.append(EvalResult(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise RecordError(f"{path}, line {number}: not an evaluation ({error}); remove the line") from error
    return results


def make_attempt(
    step: int, task: Task, perf: float, answer: str, failure: str | None, tree: TokenTree
) -> HeldOutAttempt:
    writer = CallWriter(tree.vocab_size)
    calls = tuple(writer.write(call).data for call in tree.calls())
    return HeldOutAttempt(step, task, perf, answer, failure, calls, tree.vocab_size)


def write_attempts(folder: Path, step: int, attempts: Sequence[HeldOutAttempt]) -> None:
    """Write the file of a step, replacing that of an earlier evaluation of the same step."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [asdict(one) | {"calls": [base64.b64encode(call).decode() for call in one.calls]} for one in attempts]
    write_atomic(folder / f"step-{step:08d}.json", json.dumps(records))


def read_attempts(folder: Path) -> list[HeldOutAttempt]:
    """All stored attempts, by ascending step."""
    attempts: list[HeldOutAttempt] = []
    for path in sorted(folder.glob("step-*.json")):
        try:
            attempts += [_read(record) for record in json.loads(path.read_text(encoding="utf-8"))]
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{path}: not the attempts of an evaluation ({error}); remove the file") from error
    return attempts


def _read(record: dict[str, Any]) -> HeldOutAttempt:
    fields = {name: record[name] for name in ("step", "perf", "answer", "failure", "vocab_size")}
    calls = tuple(base64.b64decode(call, validate=True) for call in record["calls"])
    return HeldOutAttempt(task=read_task(json.dumps(record["task"])), calls=calls, **fields)
