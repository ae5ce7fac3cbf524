"""Runs attempts at the pool's episodes: leases in, recorded calls and rewarded groups out.

    lease → attempt → answer, verdict and recorded calls into the pool → group complete: reward

`AttemptRunner` (`agents/attempt.py`) makes one attempt, verdict included, and specifies which failures count.
`Attempts` runs it from a lease to its end in the pool; `JudgedAttempts` also rewards complete groups. The verdict is
stored with the attempt; an attempt that an older version stored without one is verified by its answer alone. The
gateway's copy of an attempt is deleted once the pool has stored it.

Training and evaluation share `Slots`: never more than the agent's `num_jobs` concurrent attempts in all. While an
evaluation runs, training leaves `eval.share` of the slots to it; training attempts that already hold one of those slots
finish first. Before the first training step and after the last, an evaluation may take all slots.

`Leasing` keeps the free slots of one process busy with attempts at leased episodes.

`open_agent` opens the run's agent by its configured kind.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import ParamSpec, Self, TypeVar, cast

from m2forge.agents.attempt import (
    TIMEOUT,
    AttemptAgent,
    AttemptResult,
    AttemptRunner,
    Interrupted,
    Overrides,
    RoutedAgent,
    WorkerLost,
)
from m2forge.agents.command import CommandAgent, RolloutAgent
from m2forge.agents.config import CommandConfig, CommandSandboxConfig
from m2forge.agents.loop_agent import LoopAgent
from m2forge.agents.program import inside_path, require_inside, require_program, require_version, visible
from m2forge.agents.worker_pool import WorkerPool
from m2forge.agents.workspace import SandboxCounts
from m2forge.errors import M2ForgeError, RunError
from m2forge.pool.lifecycle import EpisodeState, LeaseLostError, StateError
from m2forge.pool.pool import Pool, PoolWriter
from m2forge.pool.record import Rewarding
from m2forge.pool.stored import TOOLS, Lease, Outcome, StoredEpisode, StoredUnit, role_artifacts
from m2forge.records import Episode, Submission, Task, Verdict
from m2forge.reward.judge import Attempt, Judge, Judged
from m2forge.reward.rule import Step, read_step
from m2forge.rl.config import AgentConfig, CommandAgentConfig, LoopAgentConfig, WorkerAgentConfig
from m2forge.rl.layout import Layout
from m2forge.sandbox.config import SandboxConfig
from m2forge.tasks.runner import TaskRunner
from m2forge.text.format import ChatFormat
from m2forge.text.message import Tool, tool_from_openai, tool_to_openai


async def require_agent(config: AgentConfig) -> None:
    """Raise if no sandbox can be opened, or if the agent's program is not there or has another version than
    configured."""
    sandbox = attempt_sandbox(config)
    if isinstance(config, WorkerAgentConfig):
        require_program(config.command, {}, config.sandbox.inherits)
    if isinstance(config, CommandAgentConfig) and sandbox.backend == "process":
        require_program(config.command, config.env, sandbox.inherits)
        if config.version is not None:
            require_version(config.version, config.env, sandbox.inherits, config.preset)
    elif isinstance(config, CommandAgentConfig):
        env = {**config.env, **inside_path(sandbox, config.env)}
        await require_inside(sandbox, config.command, env, config.version, config.preset)
    elif sandbox.backend != "process":
        await require_inside(sandbox)


def attempt_sandbox(config: AgentConfig) -> SandboxConfig:
    """The sandbox of each attempt; it shows the program that runs in it."""
    if isinstance(config, CommandAgentConfig):
        return visible(config.sandbox, config.command, config.env)
    return config.sandbox


@asynccontextmanager
async def open_agent(config: AgentConfig, folder: Path, format: ChatFormat) -> AsyncGenerator[AttemptAgent, None]:
    """`folder`: parent of the folders of workers. `format`: the policy's chat format."""
    opened: WorkerPool | CommandAgent | LoopAgent
    if isinstance(config, LoopAgentConfig):
        opened = LoopAgent(config, format)
    elif isinstance(config, WorkerAgentConfig):
        opened = WorkerPool(config, folder)
    else:
        opened = CommandAgent(config)
    async with opened as agent:
        yield RoutedAgent(agent, RolloutAgent(_rollout_config(config)))


def _rollout_config(config: AgentConfig) -> CommandConfig:
    """Limits of a family's own rollouts: the agent's timeout, and for the kind `command` those of its sandbox. They are
    the family's code, hence plain processes."""
    limits = CommandConfig(command=("",), sandbox=CommandSandboxConfig(backend="process"))
    if isinstance(config, CommandAgentConfig):
        sandbox = config.sandbox.model_copy(update={"backend": "process"})
        return limits.model_copy(update={"timeout_s": config.timeout_s, "sandbox": sandbox})
    if isinstance(config, WorkerAgentConfig):
        return limits.model_copy(update={"timeout_s": config.timeout_s})
    return limits


ANSWER = "answer"
"""Artifact under which the pool stores the agent's final answer, so that it can be verified after a restart."""
VERDICT = "verdict"
"""Artifact under which the pool stores the verifier's verdict, as JSON."""
EMPTY_QUEUE_S = 0.2
"""Delay before the next request for leases after the queue had fewer episodes than there were free slots."""
LEASED_AT_ONCE = 32
"""Maximum leases per query. A process with many free slots alternates with others at the queue, and starts those
attempts before it requests more."""
JUDGED_AT_ONCE = 16
"""Complete groups read from the pool per query."""
P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class AttemptCounts:
    num_ended: int = 0
    num_broken: int = 0
    num_interrupted: int = 0
    """Attempts that the death of a process interrupted; they are retried, up to `pool.max_deaths` per episode."""
    num_timeouts: int = 0
    num_errors: int = 0
    """Attempts that ended with an error caused by the policy; they count, with perf 0."""
    num_rebuilt: int = 0
    """Attempts of our own loop whose states were rebuilt and compared with the recorded tokens."""
    num_unequal: int = 0
    """Rebuilt attempts whose states differed."""
    num_groups: int = 0
    """Rewarded groups."""
    num_tokens: int = 0
    """Sampled tokens."""
    perfs: dict[str, list[float]] = field(default_factory=dict)
    """Perfs of rewarded groups by domain; the view keeps the last 256 of each."""

    def note_group(self, task: Task, perfs: Sequence[float]) -> None:
        self.num_groups += 1
        self.perfs.setdefault(task.domain, []).extend(perfs)


class Attempts:
    """Runs attempts and stores them."""

    def __init__(self, runner: AttemptRunner[TaskRunner], pool: Pool, writer: PoolWriter) -> None:
        self.runner, self.pool, self._writer = runner, pool, writer
        self._has_ended = asyncio.Event()
        """Set when a group may be complete."""
        # One thread: several CPU-bound threads would make the event loop wait for the GIL.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="episodes")
        self._num_deaths: Counter[int] = Counter()
        """Worker deaths by the episode that they attempted."""
        self.counts = AttemptCounts()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        # In another thread, because it waits for work that has begun.
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    async def run(self, lease: Lease) -> None:
        """Run one attempt from its lease to its end in the pool."""
        try:
            result = await self.runner.attempt(
                *(lease.name, lease.task, lease.group, self._num_deaths[lease.episode]),
                overrides=Overrides(context=lease.context),
            )
        except Interrupted as error:
            self.counts.num_interrupted += 1
            self._num_deaths[lease.episode] += isinstance(error, WorkerLost)
            await self._writer.run(self.pool.interrupt, lease, str(error))
            return
        except RunError:
            raise
        except M2ForgeError as error:
            await self._give_up(lease, str(error))
            return
        self._num_deaths.pop(lease.episode, None)
        try:
            is_over = await self._store(lease, result)
        except StateError as error:
            _log.warning("%s: %s", lease.name, error)
            return
        finally:
            self.runner.gateway.delete_soon(lease.name)
        self._count(result)
        if is_over:
            self._has_ended.set()

    async def _store(self, lease: Lease, result: AttemptResult) -> bool:
        """Store the attempt; returns whether its group may now be complete."""
        calls = await self._in_thread(lease.writer(self.pool.vocab_size).write_tree, result.tree)
        artifacts = {ANSWER: result.answer, VERDICT: json.dumps(asdict(result.verdict))}
        artifacts |= role_artifacts([str(step["role"]) for step in result.steps])
        if tools := offered_tools(result):
            artifacts[TOOLS] = json.dumps([tool_to_openai(tool) for tool in tools])
        return await self._writer.end(lease, calls, Outcome(failure=result.failure, artifacts=artifacts))

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work that reads all calls of an episode, which may take seconds, off the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: work(*args, **kwargs))

    async def _give_up(self, lease: Lease, reason: str) -> None:
        self.counts.num_broken += 1
        _log.warning("%s failed: %s", lease.name, reason)
        with contextlib.suppress(LeaseLostError):
            if await self._writer.run(self.pool.fail, lease, reason) is EpisodeState.FAILED:
                self._num_deaths.pop(lease.episode, None)
                _log.warning("%s: dropped, because too many of its attempts failed", lease.group)

    def _count(self, result: AttemptResult) -> None:
        self.counts.num_ended += 1
        self.counts.num_timeouts += result.failure == TIMEOUT
        self.counts.num_rebuilt += result.is_equal is not None
        self.counts.num_unequal += result.is_equal is False
        self.counts.num_errors += result.failure not in (None, TIMEOUT)
        self.counts.num_tokens += sum(sample.logprobs.size for sample in result.tree.samples)


class JudgedAttempts(Attempts):
    """Also rewards complete groups, whichever process ran their attempts."""

    def __init__(
        self,
        runner: AttemptRunner[TaskRunner],
        pool: Pool,
        writer: PoolWriter,
        judge: Judge,
        format: ChatFormat,
        on_judged: Callable[[Task, float], None],
    ) -> None:
        """`on_judged`: called with the task and pass rate of every rewarded group."""
        super().__init__(runner, pool, writer)
        self._judge, self._format, self._on_judged = judge, format, on_judged
        self._judging = asyncio.Lock()

    async def judge_ended(self, every_s: float | None = None) -> None:
        """Reward groups as they complete, forever; a separate task, since it outlives the lease of an attempt.
        `every_s`: poll interval for groups whose attempts other processes ran; None: no other process runs any."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_ended.wait(), every_s)
            self._has_ended.clear()
            await self.judge_complete()

    async def judge_complete(self) -> None:
        """Reward the groups whose attempts have all ended, including those left by a loop that died."""
        async with self._judging:
            is_over = False
            while not is_over:
                complete = await self._writer.run(self.pool.unjudged, JUDGED_AT_ONCE)
                is_over = len(complete) < JUDGED_AT_ONCE
                for unit, leases in complete:
                    await self._judge_unit(unit, leases)

    async def _judge_unit(self, unit: StoredUnit, leases: Sequence[Lease]) -> None:
        attempts = await gather(self._attempt(stored) for stored in unit.episodes)
        judged = await self._in_thread(self._judge.judge, attempts)
        try:
            await self._writer.run(
                self.pool.reward_unit, [_rewarding(*pair) for pair in zip(leases, judged, strict=True)]
            )
        except StateError as error:
            # The trainer dropped it meanwhile: it waited too long, or is too stale.
            _log.warning("%s: %s", unit.group, error)
            return
        perfs = [attempt.perf for attempt in attempts]
        self.counts.note_group(unit.task, perfs)
        self._on_judged(unit.task, sum(perf == 1 for perf in perfs) / len(perfs))

    async def _attempt(self, stored: StoredEpisode) -> Attempt:
        verdict = await self._verdict(stored)
        episode, steps = await self._in_thread(_read, stored, self._format)
        return Attempt(episode, steps, verdict)

    async def _verdict(self, stored: StoredEpisode) -> Verdict:
        if VERDICT in stored.artifacts:
            return Verdict.read(json.loads(stored.artifacts[VERDICT]))
        if stored.failure is not None:
            return Verdict(0.0, {"failure": stored.failure})
        return await self.runner.tasks.verify(stored.task, Submission(stored.artifacts[ANSWER]))


def offered_tools(result: AttemptResult) -> tuple[Tool, ...]:
    """The tools of the task's family, and those that the agent offered beside them, whose schemas are not recorded."""
    named = {str(name) for step in result.steps for name in cast("Sequence[str]", step.get("tools", ()))}
    own = named - {tool.name for tool in result.tools}
    return (*result.tools, *(Tool(name) for name in sorted(own)))


def _read(stored: StoredEpisode, format: ChatFormat) -> tuple[Episode, tuple[Step, ...]]:
    episode = stored.episode()
    tools = [tool_from_openai(tool) for tool in json.loads(stored.artifacts.get(TOOLS, "[]"))]
    return episode, tuple(read_step(call, format, tools) for call in episode.calls)


def _rewarding(lease: Lease, judged: Judged) -> Rewarding:
    assert judged.episode.reward is not None
    return Rewarding(lease, judged.episode.reward, judged.step_rewards)


class Slots:
    def __init__(self, total: int, share: float = 1.0) -> None:
        """`share`: share of the slots for evaluations beside training; at least one slot."""
        self.total, self._reserved = total, max(1, min(total, round(share * total)))
        self.is_training = False
        """Whether training is running and takes slots."""
        self._is_evaluating = False
        self.num_training = self.num_evaluating = 0
        """Slots that training and evaluation hold."""
        self._waiting: list[asyncio.Future[None]] = []

    def take(self, num: int) -> int:
        """Take up to `num` slots for training; returns how many."""
        limit = self.total - self._reserved if self._is_evaluating else self.total
        num_free = min(limit - self.num_training, self.total - self.num_training - self.num_evaluating)
        num = max(0, min(num, num_free))
        self.num_training += num
        return num

    def give_back(self, num: int = 1) -> None:
        """Return `num` slots of training."""
        self.num_training -= num
        self._wake()

    def end_training(self) -> None:
        self.is_training = False
        self._wake()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Reserve the evaluation's share of the slots for the duration of the context."""
        self._is_evaluating = True
        try:
            yield
        finally:
            self._is_evaluating = False

    @asynccontextmanager
    async def evaluating(self) -> AsyncIterator[None]:
        """Wait for a free slot and hold it for one attempt at a held-out task."""
        while not self._has_room():
            freed = asyncio.get_running_loop().create_future()
            self._waiting.append(freed)
            await freed
        self.num_evaluating += 1
        try:
            yield
        finally:
            self.num_evaluating -= 1
            self._wake()

    def _has_room(self) -> bool:
        limit = self._reserved if self.is_training else self.total
        return self.num_evaluating < limit and self.num_training + self.num_evaluating < self.total

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for freed in waiting:
            if not freed.done():
                freed.set_result(None)


class Leasing:
    def __init__(
        self,
        worker: str,
        pool: Pool,
        writer: PoolWriter,
        attempts: Attempts,
        slots: Slots,
        running: dict[asyncio.Task[None], Lease] | None = None,
    ) -> None:
        """`worker`: the name under which this process holds leases."""
        self._worker, self._pool, self._writer, self._attempts, self._slots = worker, pool, writer, attempts, slots
        self.running = {} if running is None else running
        """Attempts in flight and their leases."""
        self._lease_at_s = 0.0

    async def fill(self, *, is_due: bool = False) -> None:
        """Start attempts on all free slots; re-raises an attempt's error that ends the run. `is_due`: whether to
        request leases at once."""
        if is_due or time.monotonic() >= self._lease_at_s:
            num_free, num_leased = self._slots.take(LEASED_AT_ONCE), 0
            try:
                leases = await self._writer.run(self._pool.lease, self._worker, num_free) if num_free else []
                num_leased = len(leases)
            finally:
                self._slots.give_back(num_free - num_leased)
            for lease in leases:
                task = asyncio.create_task(self._attempts.run(lease))
                task.add_done_callback(lambda _: self._slots.give_back())
                self.running[task] = lease
            # An empty queue gets work when it is filled, or when an attempt fails, which is rare.
            self._lease_at_s = time.monotonic() + (EMPTY_QUEUE_S if num_leased < num_free else 0.0)
        for task in [task for task in self.running if task.done()]:
            del self.running[task]
            if not task.cancelled():
                task.result()


async def renew_leases(pool: Pool, writer: PoolWriter, running: Mapping[asyncio.Task[None], Lease]) -> None:
    """Renew the leases of attempts in flight, and cancel the attempts that lost theirs."""
    lost = await writer.run(pool.renew, list(running.values()))
    names = {lease.name for lease in lost}
    for task, lease in running.items():
        if lease.name in names:
            task.cancel()


async def gather(work: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Like `asyncio.gather`, but when one raises, or the caller is cancelled, it cancels the others and waits for them
    to end, so that none uses a resource that the caller then closes."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable[asyncio.Task[T]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# -- counts of all processes that run attempts -----------------------------------------------------------------------


def counts_path(layout: Layout, name: str) -> Path:
    return layout.processes / f"{name}.json"


def add_counts(
    paths: Iterable[Path], own: AttemptCounts, sandboxes: SandboxCounts
) -> tuple[AttemptCounts, SandboxCounts]:
    """The loop's own counts plus those of all hosts, in `paths`, since each of them started."""
    total, started = summed(own), asdict(sandboxes)
    for path in paths:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        total = _add(total, found)
        started = _add(started, found["sandboxes"])
    return AttemptCounts(**total, perfs=own.perfs), SandboxCounts(**started)


def summed(counts: AttemptCounts) -> dict[str, int]:
    return {field.name: getattr(counts, field.name) for field in fields(counts) if field.name != "perfs"}


def _add(own: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: num + other[name] for name, num in own.items()}
