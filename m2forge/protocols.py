"""Interfaces between components, so that they need not import one another.

An `Engine` samples from a policy: token ids in, token ids out, each with its logprobs and the policy version that
sampled it. Native, remote and scripted engines are interchangeable.

A `Sandbox` runs commands in a workspace. An `Agent` attempts a task: it calls the policy at an endpoint, works in a
sandbox, and returns a result.
"""

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from m2forge.errors import RecordError
from m2forge.records import FinishReason, FloatArray, IntArray, JsonValue, PolicyVersion, Sampling, Task


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A request to an engine: continue these tokens."""

    ids: IntArray
    max_tokens: int
    """Maximum number of sampled tokens."""
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: tuple[int, ...] = ()
    """Sampling one of these ends the completion, which includes it."""
    stop_texts: tuple[str, ...] = ()
    """A text that ends the completion with the token that completes it, however it is tokenized; special tokens count
    as their names. An engine that cannot implement it exactly refuses."""
    seed: int | None = None
    """The same seed, prompt and weights sample the same tokens, whatever else the engine serves concurrently."""
    num_samples: int = 1
    """Number of completions to sample; they share the prefill of the prompt."""
    priority: int = 0
    """Requests with higher priority are served first."""
    timeout_s: float | None = None
    """After this time the completion ends with the tokens so far, as aborted."""
    returns_experts: bool = False
    affinity: str | None = None
    """Prompts of the same affinity share a prefix, so that one replica of an engine should serve them."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "num_samples"):
            if getattr(self, name) < 1:
                raise RecordError(f"Prompt: {name}: expected 1 or more, received {getattr(self, name)!r}")
        if not self.ids.size:
            raise RecordError("Prompt: ids: expected at least one token, received none")
        if self.timeout_s is not None and not 0 <= self.timeout_s < math.inf:
            raise RecordError(f"Prompt: timeout_s: expected a finite number, 0 or more, received {self.timeout_s!r}")
        for text in self.stop_texts:
            if any("\ud800" <= sign <= "\udfff" for sign in text):
                raise RecordError(f"Prompt: stop_texts: expected text that UTF-8 can express, received {text!r}")


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Streamed tokens of one completion; the last chunk has the finish reason."""

    sample: int
    """Index of the completion among the prompt's samples."""
    ids: IntArray
    logprobs: FloatArray
    """Logprob under the distribution that each token was sampled from; 0 if it was the only choice."""
    raw_logprobs: FloatArray
    """Logprob under the softmax of the raw logits; NaN if a server does not report it."""
    versions: IntArray
    """Policy version (step) that sampled each token."""
    num_cached: int = 0
    """Prompt tokens served from the prefix cache."""
    experts: npt.NDArray[np.int16] | None = None
    """(tokens, layers, chosen): routing of the tokens computed for this chunk, from the prompt's first on; −1 for
    tokens that another request had computed."""
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class EngineState:
    version: PolicyVersion
    num_running: int
    """Completions being computed: a prompt with three samples counts as three."""
    num_waiting: int
    """Accepted completions waiting for capacity."""


class Engine(Protocol):
    def generate(self, prompt: Prompt) -> AsyncGenerator[Chunk, None]:
        """Closing the iterator aborts unfinished completions. A prompt that can never be served raises at once."""
        ...

    async def load(self, folder: Path, version: PolicyVersion) -> None:
        """Weight update: load the weights of a model folder while serving."""
        ...

    async def state(self) -> EngineState: ...

    async def close(self) -> None: ...


@runtime_checkable
class Watched(Protocol):
    """An engine that can fail permanently: its server process exits with it, so that a supervisor restarts it."""

    async def watch(self) -> None:
        """Wait until the engine fails, and raise its `EngineError`."""
        ...


@dataclass(frozen=True, slots=True)
class ReplicaState:
    name: str
    is_up: bool
    num_running: int
    """Completions in flight that this client requested."""
    num_requests: int


@runtime_checkable
class Replicated(Protocol):
    """An engine that consists of several."""

    def replicas(self) -> Sequence[ReplicaState]: ...


# -- sandboxes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Command:
    """A command for a sandbox to run in its workspace."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Added to the sandbox's default environment. May hold secrets, so it is not in the repr."""
    stdin: bytes = field(default=b"", repr=False)
    """Its whole standard input; a worker instead reads what it is sent."""
    timeout_s: float | None = None
    """Timeout, if shorter than the sandbox's own."""
    merges_stderr: bool = False
    """Whether standard error is merged into standard output, in the order written."""
    user: str | None = None
    """Who runs it, if another than the sandbox's: UID, UID:GID, or a user of the image."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "argv", tuple(self.argv))
        if not self.argv or not self.argv[0]:
            raise RecordError(f"Command: argv: expected a program, received {self.argv!r}")
        texts = [*self.argv, *self.env, *self.env.values()]
        if any("\0" in text for text in texts) or any("=" in name or not name for name in self.env):
            raise RecordError("Command: a zero byte, or an environment variable without a name or with '=' in it")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise RecordError(f"Command: timeout_s: expected a finite number above 0, received {self.timeout_s!r}")


class OutcomeReason(StrEnum):
    """How a command ended."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    """Ended by a signal that the sandbox did not send."""
    MEMORY = "memory"
    """The kernel killed it, because the sandbox had used up its memory."""
    TIMEOUT = "timeout"
    FLOODED = "flooded"
    """It exceeded the output limit, in a sandbox that ends such commands."""
    KILLED = "killed"
    """The caller ended it."""
    TAMPERED = "tampered"
    """It wrote to the sandbox's control channel, and was killed for it."""


@dataclass(frozen=True, slots=True)
class Captured:
    """The output of a stream: all of it, or its beginning and its end."""

    head: bytes = b""
    tail: bytes = b""
    num_bytes: int = 0
    """Total number of bytes written."""

    @property
    def num_left_out(self) -> int:
        """Bytes between head and tail."""
        return self.num_bytes - len(self.head) - len(self.tail)

    def text(self) -> str:
        """As UTF-8, with a line that states how much was omitted."""
        gap = f"\n[{self.num_left_out} bytes left out]\n".encode() if self.num_left_out else b""
        return (self.head + gap + self.tail).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a command that has ended, with all processes it started."""

    reason: OutcomeReason
    status: int
    """Exit status, or minus the signal that ended it."""
    stdout: Captured
    stderr: Captured
    started_s: float
    """Wall clock, seconds since the epoch."""
    finished_s: float
    cpu_s: float = 0.0
    """CPU time of the command and the children it waited for."""
    max_memory_bytes: int = 0
    """Peak memory of the largest of these processes."""

    @property
    def is_success(self) -> bool:
        return self.reason is OutcomeReason.EXITED and self.status == 0


class Worker(Protocol):
    """A long-running command, written to by standard input and read from by standard output."""

    async def send(self, data: bytes) -> None:
        """Returns when the worker has read most of it. Data sent to a worker that has exited is lost."""
        ...

    async def receive_line(self, timeout_s: float | None = None) -> bytes:
        """The next line with its newline, b"" after the last; raises TimeoutError without losing a line."""
        ...

    async def wait(self) -> Outcome:
        """Wait until it ends by itself or by its limits. Lines not received are in the outcome's `stdout`."""
        ...

    async def stop(self) -> Outcome:
        """Kill it and all processes it started."""
        ...


class Snapshot(Protocol):
    """The files of a sandbox at one moment, read-only."""

    async def remove(self) -> None:
        """Free its space; sandboxes that were forked from it must be closed."""
        ...


class Sandbox(Protocol):
    """Runs commands in a workspace. Processes that a command leaves running live until `close`, except with the backend
    `process`, which ends them with the command. Its user, limits and network are those of its configuration."""

    workspace: str
    """The folder in which commands run, as they see it."""

    @property
    def is_lost(self) -> bool:
        """Whether it ended before it was closed, for instance because its processes were killed from outside."""
        ...

    async def run(self, command: Command) -> Outcome:
        """Run a command to its end. Cancelling kills it. A program that cannot be run exits with 126 or 127, as in a
        shell."""
        ...

    async def start(self, command: Command) -> Worker: ...

    async def read(self, path: str, max_bytes: int) -> bytes:
        """Read a file of the workspace; raises if it is larger, missing or outside."""
        ...

    async def write(self, path: str, content: bytes) -> None:
        """Write a file; creates missing parent folders."""
        ...

    async def upload(self, source: Path, path: str, user: str | None = None) -> None:
        """Copy a file, or all that a folder holds, into the folder `path`, as seen inside; relative to the workspace.
        Existing files are replaced, and links in the way are not followed."""
        ...

    async def download(self, path: str, dest: Path, max_bytes: int) -> tuple[str, ...]:
        """Copy a file, or all that the folder `path` holds, into the folder `dest`. Symbolic links that lead out of it
        are left out, and returned. Raises if it is missing or larger."""
        ...

    async def kill_all(self) -> int:
        """Kill every process in it, so that its files no longer change, and return how many there were. Commands can be
        run again."""
        ...

    async def snapshot(self) -> Snapshot:
        """Freeze the files as they are. Running processes are stopped meanwhile, then continue."""
        ...

    async def fork(self, snapshot: Snapshot) -> "Sandbox":
        """Start another sandbox, with this one's configuration, on the files of a snapshot."""
        ...

    async def close(self) -> None:
        """Kill all running processes. Files that only the sandbox has are gone."""
        ...


class ToolHost(Protocol):
    """Runs the tools of tasks, with access to all data of a task."""

    async def tools(self, task: Task) -> Sequence[Mapping[str, JsonValue]]:
        """The tools that an agent may call, in OpenAI's function format."""
        ...

    async def call(self, task: Task, name: str, arguments: JsonValue) -> str:
        """The tool's result, after its latency; a call that cannot be served returns an error line."""
        ...


# -- agents -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of the policy for an agent."""

    url: str
    """Base URL of a gateway, without the dialect's path: http://127.0.0.1:8500."""
    key: str = field(repr=False)
    """API key of the episode."""
    model: str = "policy"


class AgentEnd(StrEnum):
    """How an attempt ended. The task's verifier decides whether it is solved."""

    FINISHED = "finished"
    """The agent ended by itself."""
    OUT_OF_TURNS = "out_of_turns"
    TIMEOUT = "timeout"
    FAILED = "failed"
    """The agent crashed, or the policy became unreachable."""


@dataclass(frozen=True, slots=True)
class AgentResult:
    end: AgentEnd
    answer: str
    """Final message; for a program, its output."""
    started_s: float
    finished_s: float
    failure: str | None = None
    """The error, if the attempt failed."""
    transcript: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Logs and other output of the agent, by file name."""


class Agent(Protocol):
    async def run(self, task: Task, endpoint: Endpoint, sandbox: Sandbox) -> AgentResult:
        """Attempt the task. Errors inside are reported in the result; cancelling ends the attempt."""
        ...
