"""Runs one attempt at a task, by an agent of any kind: a task in, its recorded calls, answer and verdict out.

    workspace → episode at the gateway (API key) → agent in its sandbox → episode closed → submission → verifier →
    sandbox closed, workspace removed

Training, evaluation and everything else that attempts tasks use `AttemptRunner`; they bring the gateway, the tasks and
the agent behind the protocols below. One rule holds for every kind of agent. Failures that the policy's tokens caused
count: an attempt that ran out of time or budget, or that the agent ended with an error after a completion, has perf 0.
Otherwise the policy would train on a biased selection of its attempts. Failures of the infrastructure are retried under
another key and never become a reward:

    the agent's error has a `kind`                                  that kind; `policy` needs a recorded completion
    it does not, and a completion is recorded, no call failed       policy
    or was aborted, and no process was restarted meanwhile
    a command exceeded a limit of `agent.sandbox`                   policy, with the reason `limit`
    a command ended without a request to the policy                 infra; `MAX_SILENT` in a row end the run
    the worker died, or a command was killed from outside           retried; after `DEATHS_BEFORE_EXCLUSIVE` deaths it
                                                                    gets a worker to itself, whose death counts:
        over a limit of `agent.sandbox`                             policy, with the reason `limit`
        it exited or crashed                                        as an error without a kind
        it was killed from outside                                  infra, and the attempt counts as broken, so that
                                                                    its group is dropped after `pool.max_failures`
    the attempt's sandbox could not start, or was lost              infra; if it was lost, the attempt is interrupted
    the workspace is larger than the sandbox's disk                 policy, with the reason `limit`
    the verifier's worker was lost                                  infra
    everything else                                                 infra
"""

import asyncio
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from m2forge.agents.workspace import Workspace, Workspaces
from m2forge.errors import DataError, EngineError, M2ForgeError, RunError
from m2forge.protocols import Endpoint, Sandbox
from m2forge.records import ROLLOUT_KEY, JsonValue, Sampling, Submission, Task, Verdict
from m2forge.sandbox.config import SandboxConfig
from m2forge.text.message import Tool
from m2forge.tree.token_tree import TokenTree

TIMEOUT = "time ran out"
LIMIT = "limit"
"""Prefix of the failure of an attempt that exceeded a limit of its sandbox."""
LOST = "the attempt's sandbox was killed from outside"
DEATHS_BEFORE_EXCLUSIVE = 2
"""After this many worker deaths an attempt gets a worker to itself, which shows whether the attempt kills it."""
OPEN_S = 5.0
"""How long a cancelled attempt waits for the gateway to open its episode, so that it can be deleted."""
MAX_SILENT = 20
"""Attempts in a row that ended without a request to the policy, after which the agent counts as broken."""


class JobError(EngineError):
    """An attempt that failed: its worker died or reported an error."""


class ErrorKind(StrEnum):
    """What caused an agent's error."""

    POLICY = "policy"
    """The policy's tokens: the attempt counts, with perf 0."""
    INFRA = "infra"
    """The infrastructure, such as a connection that broke: the attempt is retried."""


class AgentError(JobError):
    """An attempt that the agent ended with an error."""

    def __init__(self, message: str, kind: ErrorKind | None) -> None:
        super().__init__(message)
        self.kind = kind
        """Cause of the error; None if the agent does not report one."""


class DeathCause(StrEnum):
    """What ended a worker."""

    EXITED = "exited"
    """It exited, or crashed."""
    LIMIT = "limit"
    """It exceeded a limit of `agent.sandbox`: memory, or the length of a line."""
    LOST = "lost"
    """It was killed from outside, for instance by the kernel's OOM killer, or it was restarted."""


class WorkerDiedError(JobError):
    """An attempt whose worker died, possibly because of another attempt."""

    def __init__(self, message: str, cause: DeathCause = DeathCause.LOST) -> None:
        super().__init__(message)
        self.cause = cause


class StuckError(TimeoutError):
    """An attempt that timed out in a worker that did not confirm the cancel and was restarted."""


class Interrupted(JobError):
    """An attempt that failed because a process it depends on restarted meanwhile."""


class WorkerLost(Interrupted):
    """An attempt whose worker died."""


class BrokenAgentError(RunError):
    """An agent that ends attempt after attempt without a request to the policy."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """Settings of the run that override those of the agent's requests."""

    sampling: Sampling | None = None
    """None: the gateway client's own."""
    context: int | None = None
    """Maximum tokens of prompt plus completion; None: the model's limit."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the gateway recorded of an attempt."""

    tree: TokenTree
    messages: tuple[Mapping[str, JsonValue], ...] = ()
    """The main conversation, in OpenAI's message form."""
    steps: tuple[Mapping[str, JsonValue], ...] = ()
    """One object per call, in the order of the tree's samples."""
    is_equal: bool | None = None
    """Whether it equals what the agent logged; None if that was not compared."""


@dataclass(frozen=True, slots=True)
class Job:
    """What an agent is given for one attempt."""

    id: str
    task: Task
    endpoint: Endpoint
    tools: Sequence[Tool]
    """The tools of the task's family, which the gateway serves."""
    workspace: Workspace


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    transcript: Mapping[str, bytes] = field(default_factory=dict)
    """Logs of the agent, by file name."""


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """What a finished attempt produced."""

    answer: str
    tree: TokenTree
    """The calls that the gateway recorded."""
    failure: str | None
    verdict: Verdict
    steps: tuple[Mapping[str, JsonValue], ...] = ()
    """See `Recorded`."""
    is_equal: bool | None = None
    """See `Recorded`."""
    tools: tuple[Tool, ...] = ()
    """The tools that the agent was offered."""


class AttemptAgent(Protocol):
    """An agent of any kind. `watch` raises once it can make no attempts at all."""

    is_silent_allowed: bool
    """Whether an attempt may end without a request to the policy."""

    async def attempt(self, job: Job, *, is_exclusive: bool = False) -> Answer:
        """Raises `AgentError`, `WorkerDiedError`, or `TimeoutError` after the attempt's timeout. `is_exclusive`: run
        nothing else in the same process, so that this attempt is to blame for its death."""
        ...

    async def watch(self) -> None:
        """Wait until the agent counts as broken, then raise."""
        ...

    async def inspect(self, answer: Answer, recorded: Recorded) -> bool | None:
        """Whether what the agent logged equals what the gateway recorded; None if it was not compared."""
        ...


class RolloutAnswer(Answer):
    """The answer of a task's own rollout, whose log is not the agent's."""


class Rollouts(Protocol):
    async def attempt(self, job: Job) -> RolloutAnswer:
        """Run the command that the task's metadata names."""
        ...


class RoutedAgent:
    """See `AttemptAgent`. The run's agent, except at tasks whose family drives its own rollout."""

    def __init__(self, agent: AttemptAgent, rollouts: Rollouts) -> None:
        self._agent, self._rollouts = agent, rollouts
        self.is_silent_allowed = agent.is_silent_allowed

    async def attempt(self, job: Job, *, is_exclusive: bool = False) -> Answer:
        if ROLLOUT_KEY in job.task.metadata:
            return await self._rollouts.attempt(job)
        return await self._agent.attempt(job, is_exclusive=is_exclusive)

    async def watch(self) -> None:
        await self._agent.watch()

    async def inspect(self, answer: Answer, recorded: Recorded) -> bool | None:
        return None if isinstance(answer, RolloutAnswer) else await self._agent.inspect(answer, recorded)


class Gateway(Protocol):
    """Opens and closes the episodes of attempts; `rl/gateway_admin.py` implements it over HTTP."""

    async def wait_until_up(self, id: str) -> None:
        """Wait until the servers of this attempt serve."""
        ...

    async def open(self, id: str, task: Task, group: str, overrides: Overrides) -> Endpoint: ...

    async def num_failed(self, id: str) -> int:
        """Number of the episode's calls that failed in the engine or the gateway, or were aborted."""
        ...

    async def close(self, id: str) -> Recorded: ...

    async def delete(self, ids: Iterable[str]) -> None: ...

    def delete_soon(self, id: str) -> None: ...


class TaskHost(Protocol):
    """Runs the code of task families; `tasks/runner.py` implements it."""

    async def tools(self, task: Task) -> tuple[Tool, ...]: ...

    async def sandbox(self, task: Task, config: SandboxConfig) -> tuple[SandboxConfig, Mapping[str, str]]:
        """The sandbox of an attempt at the task, and variables of its commands. `config`: the run's, which a task that
        brings files of its own changes."""
        ...

    async def verify(self, task: Task, submission: Submission, sandbox: Sandbox | None = None) -> Verdict:
        """`sandbox`: that of the attempt, if it has one and it is not a plain process."""
        ...


TaskHostT = TypeVar("TaskHostT", bound=TaskHost)


class AttemptRunner(Generic[TaskHostT]):
    def __init__(
        self,
        agent: AttemptAgent,
        gateway: Gateway,
        tasks: TaskHostT,
        workspaces: Workspaces,
        starts: Callable[[str], Hashable] = lambda name: 0,
    ) -> None:
        """`starts`: of an attempt's name; changes whenever a server that this attempt uses is started, and differs
        between servers."""
        self.agent, self.gateway, self.tasks, self.workspaces = agent, gateway, tasks, workspaces
        self._starts = starts
        self._up = set[Hashable]()
        """Values of `starts` under which gateway and sampler have answered the health check."""
        self._num_silent = 0
        """Attempts that ended without a request to the policy since the last one that made one."""

    async def attempt(
        self, name: str, task: Task, group: str, num_deaths: int = 0, *, overrides: Overrides | None = None
    ) -> AttemptResult:
        """Raises `JobError` where the attempt failed for a reason other than the policy, and `RunError` where every
        further attempt would. The caller deletes the gateway's copy once it has stored the calls. `num_deaths`: how
        many earlier attempts ended with `WorkerLost`."""
        is_exclusive = num_deaths >= DEATHS_BEFORE_EXCLUSIVE
        config, env = await self.tasks.sandbox(task, self.workspaces.config)
        workspace = await asyncio.to_thread(self.workspaces.open, name, task, config, env)
        try:
            try:
                return await self._attempt(name, task, group, workspace, is_exclusive, overrides or Overrides())
            finally:
                await asyncio.shield(self._close(workspace))
        except asyncio.CancelledError:
            # Also if the attempt had ended and its workspace was being closed: its result is lost then.
            self.gateway.delete_soon(name)
            raise

    async def _close(self, workspace: Workspace) -> None:
        await workspace.stop()
        await asyncio.to_thread(self.workspaces.close, workspace)

    async def _attempt(
        self, name: str, task: Task, group: str, workspace: Workspace, is_exclusive: bool, overrides: Overrides
    ) -> AttemptResult:
        starts = self._starts(name)
        try:
            if starts not in self._up:
                # Otherwise requests that fail while a process starts would be blamed on the agent.
                await self.gateway.wait_until_up(name)
                self._up.add(starts)
            endpoint = await self._open(name, task, group, overrides)
            job = Job(name, task, endpoint, await self.tasks.tools(task), workspace)
            answer, failure, recorded = await self._run(job, is_exclusive, starts)
            if failure is None and workspace.config == self.workspaces.config:
                # A task that brings a sandbox of its own is verified by what that sandbox holds.
                failure = await self._collect(workspace)
            verdict = Verdict(0.0, {"failure": failure})
            if failure is None:
                verdict = await self._verify(job, answer, recorded)
            return AttemptResult(
                answer, recorded.tree, failure, verdict, recorded.steps, recorded.is_equal, tuple(job.tools)
            )
        except M2ForgeError as error:
            await self.gateway.delete([name])
            if isinstance(error, RunError):
                raise
            await self.gateway.wait_until_up(name)
            is_death = isinstance(error, WorkerDiedError) and self._starts(name) == starts
            if isinstance(error, WorkerDiedError) and is_death and is_exclusive and error.cause is DeathCause.LOST:
                raise JobError(f"a worker that had no other attempt was killed: {error}") from error
            if is_death:
                raise WorkerLost(str(error)) from error
            if self._starts(name) != starts:
                raise Interrupted(str(error)) from error
            raise

    async def _open(self, name: str, task: Task, group: str, overrides: Overrides) -> Endpoint:
        opening = asyncio.ensure_future(self.gateway.open(name, task, group, overrides))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The gateway may be creating the episode: a deletion that overtakes it would leave the episode behind.
            await asyncio.wait({opening}, timeout=OPEN_S)
            opening.cancel()
            raise

    async def _run(self, job: Job, is_exclusive: bool, starts: Hashable) -> tuple[str, str | None, Recorded]:
        """The agent's answer, the failure if the policy caused one, and the recorded calls."""
        try:
            answer = await self._answer(job, is_exclusive=is_exclusive)
        except (AgentError, WorkerDiedError) as error:
            kind = error.kind if isinstance(error, AgentError) else _death_kind(error, is_exclusive=is_exclusive)
            recorded = await self._policy_failure(job.id, kind, starts)
            if recorded is None:
                if isinstance(error, AgentError) and self._starts(job.id) == starts:
                    await self._note_silent(job.id, error)
                raise
            self._num_silent = 0
            is_limit = isinstance(error, WorkerDiedError) and error.cause is DeathCause.LIMIT
            return "", f"{LIMIT}: {error}" if is_limit else str(error), recorded
        except TimeoutError as error:
            if self._starts(job.id) != starts:
                raise Interrupted("the attempt timed out while a process restarted") from None
            recorded = await self.gateway.close(job.id)
            if isinstance(error, StuckError) and not recorded.tree.samples:
                # It may have waited for another job that blocked the worker.
                raise JobError(
                    "the attempt timed out before the agent sent a request, in a worker that was stuck"
                ) from None
            return "", TIMEOUT, recorded
        recorded = await self.gateway.close(job.id)
        if not recorded.tree.samples and not self.agent.is_silent_allowed:
            silent = AgentError(
                f"the agent ended without a request to the policy; it answered {answer.text[-300:]!r}", None
            )
            if self._starts(job.id) == starts:
                await self._note_silent(job.id, silent)
            raise silent
        self._num_silent = 0
        return answer.text, None, replace(recorded, is_equal=await self.agent.inspect(answer, recorded))

    async def _answer(self, job: Job, *, is_exclusive: bool) -> Answer:
        """Whatever an agent reports after its sandbox was lost says nothing about the policy."""
        try:
            answer = await self.agent.attempt(job, is_exclusive=is_exclusive)
        except (EngineError, TimeoutError) as error:
            if job.workspace.is_lost:
                raise WorkerDiedError(f"{LOST}: {error}") from error
            raise
        if job.workspace.is_lost:
            raise WorkerDiedError(LOST)
        return answer

    async def _policy_failure(self, name: str, kind: ErrorKind | None, starts: Hashable) -> Recorded | None:
        """The recorded calls of an attempt that failed because of the policy; None if it failed for another reason."""
        if kind is ErrorKind.INFRA or (kind is None and await self.gateway.num_failed(name)):
            return None
        # A restarted gateway has lost its failure count, so check for restarts after querying it.
        if self._starts(name) != starts:
            return None
        recorded = await self.gateway.close(name)
        return recorded if recorded.tree.samples else None

    async def _note_silent(self, name: str, error: AgentError) -> None:
        """Count an attempt without a completion; raises if there were too many in a row."""
        if self.agent.is_silent_allowed or (await self.gateway.close(name)).tree.samples:
            return
        self._num_silent += 1
        if self._num_silent >= MAX_SILENT:
            raise BrokenAgentError(
                f"{self._num_silent} attempts in a row ended without a request to the policy; the last: {error}. Make "
                "sure that the agent's command works in an empty folder with only its own home, and sends its requests "
                "to {base_url}"
            ) from error

    async def _collect(self, workspace: Workspace) -> str | None:
        """Bring the workspace to this machine; returns the failure if the policy caused one."""
        try:
            await workspace.collect()
        except (DataError, EngineError) as error:
            if workspace.is_lost:
                raise WorkerDiedError(LOST) from error
            if isinstance(error, EngineError):
                raise
            return f"{LIMIT}: the workspace cannot be read: {error}"
        return None

    async def _verify(self, job: Job, answer: str, recorded: Recorded) -> Verdict:
        has_copy = job.workspace.config == self.workspaces.config
        folder = str(job.workspace.path) if has_copy else None
        submission = Submission(answer, folder, recorded.messages, recorded.steps)
        try:
            return await self.tasks.verify(job.task, submission, job.workspace.sandbox)
        except EngineError as error:
            if job.workspace.is_lost:
                raise WorkerDiedError(LOST) from error
            raise
        except M2ForgeError as error:
            # Neither the policy nor a lost worker caused it, so that it would recur.
            raise RunError(f"task {job.task.id} cannot be verified: {error}") from error


def _death_kind(error: WorkerDiedError, *, is_exclusive: bool) -> ErrorKind | None:
    if not is_exclusive or error.cause is DeathCause.LOST:
        return ErrorKind.INFRA
    return ErrorKind.POLICY if error.cause is DeathCause.LIMIT else None
