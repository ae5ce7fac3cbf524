"""Runs agents on the pool's episodes: leases in, recorded calls and rewarded groups out.

    lease → gateway API key → agent → answer → recorded calls into the pool → verify → group complete: reward

Failures that the policy's tokens caused count: an attempt that ran out of time or budget, or that the agent ended with
an error after a completion, has perf 0. Otherwise the policy would train on a biased selection of its attempts.
Failures of the infrastructure are retried under another key and never become a reward:

    the agent's error has a `kind`                                  that kind; `policy` needs a recorded completion
    it does not, and a completion is recorded, no call failed       policy
    or was aborted, and no process was restarted meanwhile
    the worker died                                                 retried; after `DEATHS_BEFORE_EXCLUSIVE` deaths it
                                                                    gets a worker to itself, whose death counts:
        over a limit of `agent.sandbox`                             policy, with the reason `limit`
        it exited or crashed                                        as an error without a kind
        it was killed from outside                                  infra, and the attempt counts as broken, so that
                                                                    its group is dropped after `pool.max_failures`
    everything else                                                 infra

`Agents` makes one attempt. `Attempts` runs it from a lease to its end in the pool and rewards complete groups. The
gateway's copy of an attempt is deleted once the pool has stored it.

Training and evaluation share `Slots`: never more than `agent.num_jobs` concurrent attempts in all. While an evaluation
runs, training leaves `eval.share` of the slots to it; training attempts that already hold one of those slots finish
first. Before the first training step and after the last, an evaluation may take all slots.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from m2forge.errors import M2ForgeError
from m2forge.gateway.config import SamplingConfig
from m2forge.pool.pool import Pool, PoolWriter
from m2forge.pool.record import Rewarding
from m2forge.pool.state import EpisodeState, LeaseLostError, StateError
from m2forge.pool.stored import Lease, Outcome, StoredEpisode, StoredUnit
from m2forge.records import Episode, Submission, Task, Verdict
from m2forge.reward.judge import Attempt, Judge, Judged
from m2forge.reward.rule import Step, read_step
from m2forge.rl.config import AgentConfig
from m2forge.rl.gateway_admin import GatewayAdmin
from m2forge.rl.workers import AgentError, DeathCause, ErrorKind, JobError, StuckError, WorkerDiedError, Workers
from m2forge.tasks.runner import TaskRunner
from m2forge.text.format import ChatFormat
from m2forge.text.message import Tool
from m2forge.tree.token_tree import TokenTree

ANSWER = "answer"
"""Artifact under which the pool stores the agent's final answer, so that it can be verified after a restart."""
TIMEOUT = "time ran out"
LIMIT = "limit"
"""Prefix of the failure of an attempt that exceeded a limit of its worker."""
DEATHS_BEFORE_EXCLUSIVE = 2
"""After this many worker deaths an attempt gets a worker to itself, which shows whether the attempt kills it."""
JUDGED_AT_ONCE = 16
"""Complete groups read from the pool per query."""
P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Overrides:
    """Settings of the run that override those of the agent's requests."""

    sampling: SamplingConfig | None = None
    """None: `agent.sampling`."""
    context: int | None = None
    """Maximum tokens of prompt plus completion; None: the model's limit."""


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """What a finished attempt produced."""

    answer: str
    tree: TokenTree
    """The calls that the gateway recorded."""
    failure: str | None = None


@dataclass(slots=True)
class AttemptCounts:
    num_ended: int = 0
    num_broken: int = 0
    num_interrupted: int = 0
    """Attempts that the death of a process interrupted; they are retried, up to `pool.max_deaths` per episode."""
    num_timeouts: int = 0
    num_errors: int = 0
    """Attempts that ended with an error caused by the policy; they count, with perf 0."""
    num_groups: int = 0
    """Rewarded groups."""
    num_tokens: int = 0
    """Sampled tokens."""
    perfs: dict[str, list[float]] = field(default_factory=dict)
    """Perfs of rewarded groups by domain; the view keeps the last 256 of each."""

    def note_group(self, task: Task, perfs: Sequence[float]) -> None:
        self.num_groups += 1
        self.perfs.setdefault(task.domain, []).extend(perfs)


class Interrupted(JobError):
    """An attempt that failed because a process it depends on restarted meanwhile."""


class WorkerLost(Interrupted):
    """An attempt whose worker died."""


class Agents:
    """Attempts tasks through the gateway."""

    def __init__(
        self,
        config: AgentConfig,
        gateway: GatewayAdmin,
        workers: Workers,
        runner: TaskRunner,
        num_starts: Callable[[], int],
    ) -> None:
        """`runner`: runs the families' code. `num_starts`: how often the sampler and the gateway have been started in
        total."""
        self.config, self.gateway, self.workers, self.runner = config, gateway, workers, runner
        self._num_starts = num_starts
        self._num_up = -1
        """Value of `num_starts` when gateway and sampler last answered the health check; -1 before."""

    async def attempt(
        self, name: str, task: Task, group: str, num_deaths: int = 0, *, overrides: Overrides | None = None
    ) -> AttemptResult:
        """Raises `JobError` where the attempt failed for a reason other than the policy. The caller deletes the
        gateway's copy once it has stored the calls. `num_deaths`: how many earlier attempts ended with `WorkerLost`.
        `overrides`: settings that override the agent's requests."""
        is_exclusive = num_deaths >= DEATHS_BEFORE_EXCLUSIVE
        try:
            return await self._attempt(name, task, group, is_exclusive=is_exclusive, overrides=overrides or Overrides())
        except asyncio.CancelledError:
            self.gateway.delete_soon(name)
            raise

    async def _attempt(
        self, name: str, task: Task, group: str, *, is_exclusive: bool, overrides: Overrides
    ) -> AttemptResult:
        num_starts = self._num_starts()
        try:
            if num_starts != self._num_up:
                # Otherwise requests that fail while a process starts would be blamed on the agent.
                await self.gateway.wait_until_up()
                self._num_up = num_starts
            endpoint = await self.gateway.open(
                name, task, group, self.config.budget, overrides.sampling or self.config.sampling, overrides.context
            )
            tools = await self.runner.tools(task)
            answer, failure, is_stuck = "", None, False
            try:
                answer = await self.workers.attempt(name, task, endpoint, tools, is_exclusive=is_exclusive)
            except (AgentError, WorkerDiedError) as error:
                kind = error.kind if isinstance(error, AgentError) else _death_kind(error, is_exclusive=is_exclusive)
                tree = await self._policy_failure(name, kind, num_starts)
                if tree is None:
                    raise
                is_limit = isinstance(error, WorkerDiedError) and error.cause is DeathCause.LIMIT
                return AttemptResult(answer, tree, f"{LIMIT}: {error}" if is_limit else str(error))
            except TimeoutError as error:
                if self._num_starts() != num_starts:
                    raise Interrupted("the attempt timed out while a process restarted") from None
                failure, is_stuck = TIMEOUT, isinstance(error, StuckError)
            tree = await self.gateway.close(name)
            if is_stuck and not tree.samples:
                # It may have waited for another job that blocked the worker.
                raise JobError("the attempt timed out before the agent sent a request, in a worker that was stuck")
            return AttemptResult(answer, tree, failure)
        except M2ForgeError as error:
            await self.gateway.delete([name])
            await self.gateway.wait_until_up()
            is_death = isinstance(error, WorkerDiedError) and self._num_starts() == num_starts
            if isinstance(error, WorkerDiedError) and is_death and is_exclusive and error.cause is DeathCause.LOST:
                raise JobError(f"a worker that had no other attempt was killed: {error}") from error
            if is_death:
                raise WorkerLost(str(error)) from error
            if self._num_starts() != num_starts:
                raise Interrupted(str(error)) from error
            raise

    async def _policy_failure(self, name: str, kind: ErrorKind | None, num_starts: int) -> TokenTree | None:
        """The recorded calls of an attempt that failed because of the policy; None if it failed for another reason."""
        if kind is ErrorKind.INFRA or (kind is None and await self.gateway.num_failed(name)):
            return None
        # A restarted gateway has lost its failure count, so check for restarts after querying it.
        if self._num_starts() != num_starts:
            return None
        tree = await self.gateway.close(name)
        return tree if tree.samples else None


class Attempts:
    def __init__(
        self,
        agents: Agents,
        pool: Pool,
        writer: PoolWriter,
        judge: Judge,
        format: ChatFormat,
        on_judged: Callable[[Task, float], None],
    ) -> None:
        """`on_judged`: called with the task and pass rate of every rewarded group."""
        self.agents, self._pool, self._writer = agents, pool, writer
        self._judge, self._format, self._on_judged = judge, format, on_judged
        self._judging, self._has_ended = asyncio.Lock(), asyncio.Event()
        # One thread: several CPU-bound threads would make the event loop wait for the GIL.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="episodes")
        self._num_deaths: Counter[int] = Counter()
        """Worker deaths by the episode that they attempted."""
        self.counts = AttemptCounts()

    async def __aenter__(self) -> "Attempts":
        return self

    async def __aexit__(self, *error: object) -> None:
        # In another thread, because it waits for work that has begun.
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    async def run(self, lease: Lease) -> None:
        """Run one attempt from its lease to its end in the pool. `judge_ended` rewards the group."""
        try:
            result = await self.agents.attempt(
                *(lease.name, lease.task, lease.group, self._num_deaths[lease.episode]),
                overrides=Overrides(context=lease.context),
            )
        except Interrupted as error:
            self.counts.num_interrupted += 1
            self._num_deaths[lease.episode] += isinstance(error, WorkerLost)
            await self._writer.run(self._pool.interrupt, lease, str(error))
            return
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
            self.agents.gateway.delete_soon(lease.name)
        self._count(result)
        if is_over:
            self._has_ended.set()

    async def judge_ended(self) -> None:
        """Reward groups as they complete, forever; a separate task, since it outlives the lease of an attempt."""
        while True:
            await self._has_ended.wait()
            self._has_ended.clear()
            await self.judge_complete()

    async def judge_complete(self) -> None:
        """Reward the groups whose attempts have all ended, including those left by a loop that died."""
        async with self._judging:
            while complete := await self._writer.run(self._pool.unjudged, JUDGED_AT_ONCE):
                for unit, leases in complete:
                    await self._judge_unit(unit, leases)

    async def _judge_unit(self, unit: StoredUnit, leases: Sequence[Lease]) -> None:
        tools = await self.agents.runner.tools(unit.task)
        attempts = await gather(self._attempt(stored, tools) for stored in unit.episodes)
        judged = await self._in_thread(self._judge.judge, attempts)
        try:
            await self._writer.run(
                self._pool.reward_unit, [_rewarding(*pair) for pair in zip(leases, judged, strict=True)]
            )
        except StateError as error:
            # The trainer dropped it meanwhile: it waited too long, or is too stale.
            _log.warning("%s: %s", unit.group, error)
            return
        perfs = [attempt.perf for attempt in attempts]
        self.counts.note_group(unit.task, perfs)
        self._on_judged(unit.task, sum(perf == 1 for perf in perfs) / len(perfs))

    async def _attempt(self, stored: StoredEpisode, tools: Sequence[Tool]) -> Attempt:
        verdict = Verdict(0.0, {"failure": stored.failure or ""})
        if stored.failure is None:
            verdict = await self.agents.runner.verify(stored.task, Submission(stored.artifacts[ANSWER]))
        episode, steps = await self._in_thread(_read, stored, self._format, tools)
        return Attempt(episode, steps, verdict.perf, verdict.evidence)

    async def _store(self, lease: Lease, result: AttemptResult) -> bool:
        """Store the attempt; returns whether its group may now be complete."""
        calls = await self._in_thread(lease.writer(self._pool.vocab_size).write_tree, result.tree)
        return await self._writer.end(lease, calls, Outcome(failure=result.failure, artifacts={ANSWER: result.answer}))

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work that reads all calls of an episode, which may take seconds, off the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: work(*args, **kwargs))

    async def _give_up(self, lease: Lease, reason: str) -> None:
        self.counts.num_broken += 1
        _log.warning("%s failed: %s", lease.name, reason)
        with contextlib.suppress(LeaseLostError):
            if await self._writer.run(self._pool.fail, lease, reason) is EpisodeState.FAILED:
                self._num_deaths.pop(lease.episode, None)
                _log.warning("%s: dropped, because too many of its attempts failed", lease.group)

    def _count(self, result: AttemptResult) -> None:
        self.counts.num_ended += 1
        self.counts.num_timeouts += result.failure == TIMEOUT
        self.counts.num_errors += result.failure not in (None, TIMEOUT)
        self.counts.num_tokens += sum(sample.logprobs.size for sample in result.tree.samples)


def _death_kind(error: WorkerDiedError, *, is_exclusive: bool) -> ErrorKind | None:
    if not is_exclusive or error.cause is DeathCause.LOST:
        return ErrorKind.INFRA
    return ErrorKind.POLICY if error.cause is DeathCause.LIMIT else None


def _read(stored: StoredEpisode, format: ChatFormat, tools: Sequence[Tool]) -> tuple[Episode, tuple[Step, ...]]:
    episode = stored.episode()
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
