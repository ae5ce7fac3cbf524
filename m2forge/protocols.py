"""What components ask of each other, so that they meet without importing one another.

An `Engine` samples from a policy: token ids in, token ids out, each with its log-probabilities and the version that
sampled it. Native, remote and scripted engines are one to whoever asks.

A `Sandbox` runs commands in a workspace. An `Agent` attempts a task: it talks to the policy at an endpoint, works in a
sandbox, and leaves a result.
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
    """What is asked of an engine: to continue these tokens."""

    ids: IntArray
    max_tokens: int
    """Sampled tokens, at most."""
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: tuple[int, ...] = ()
    """A sampled token among these ends the completion and belongs to it."""
    stop_texts: tuple[str, ...] = ()
    """Text that ends the completion with the token that completes it, however it is cut into tokens; special tokens
    count as their names. An engine that cannot be exact about it refuses."""
    seed: int | None = None
    """The same seed, prompt and weights draw the same tokens, whatever else the engine does meanwhile."""
    num_samples: int = 1
    """Completions to draw; they share the prompt's computation."""
    priority: int = 0
    """Higher is served first."""
    timeout_s: float | None = None
    """After so long what is there is returned, as aborted."""
    returns_experts: bool = False

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
    """Tokens of one completion, as they come; the last one carries the reason it ended."""

    sample: int
    """Which of the prompt's completions."""
    ids: IntArray
    logprobs: FloatArray
    """Under the distribution that each token was drawn from; 0 where it was the only choice."""
    raw_logprobs: FloatArray
    """Under the softmax of the bare logits; NaN where a server does not tell."""
    versions: IntArray
    """Step of the policy that drew each token."""
    num_cached: int = 0
    """Tokens of the prompt that were not computed again."""
    experts: npt.NDArray[np.int16] | None = None
    """(tokens, layers, chosen) of the tokens that were run for this chunk, from the prompt's first on; −1 where another
    request had computed them."""
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class EngineState:
    version: PolicyVersion
    num_running: int
    """Completions that are being computed: a prompt with three samples counts as three."""
    num_waiting: int
    """Completions that were taken and wait for room."""


class Engine(Protocol):
    def generate(self, prompt: Prompt) -> AsyncGenerator[Chunk, None]:
        """Closing the iterator aborts what is not finished. A prompt that can never be served is refused at once."""
        ...

    async def load(self, folder: Path, version: PolicyVersion) -> None:
        """Take over the weights of a model folder while serving."""
        ...

    async def state(self) -> EngineState: ...

    async def close(self) -> None: ...


@runtime_checkable
class Watched(Protocol):
    """An engine that can fail for good: a process that serves it ends with it, so that its supervisor restarts it."""

    async def watch(self) -> None:
        """Wait until the engine fails, and raise its `EngineError`."""
        ...


# -- where commands run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Command:
    """What a sandbox is asked to run, in its workspace."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """On top of what the sandbox gives every command. May hold secrets, so it is not shown."""
    stdin: bytes = field(default=b"", repr=False)
    """All that it can read; a worker's is what it is sent."""
    timeout_s: float | None = None
    """Ends it sooner than the sandbox would."""
    merges_stderr: bool = False
    """Whether standard error goes into standard output, in the order in which they were written."""

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
    """A signal ended it that the sandbox did not send."""
    TIMEOUT = "timeout"
    FLOODED = "flooded"
    """It wrote more than it may, where the sandbox ends such commands."""
    KILLED = "killed"
    """Whoever ran it ended it."""
    TAMPERED = "tampered"
    """It wrote to the sandbox's own channel, and was killed for it."""


@dataclass(frozen=True, slots=True)
class Captured:
    """What was written to a stream: all of it, or its beginning and its end."""

    head: bytes = b""
    tail: bytes = b""
    num_bytes: int = 0
    """Of all that was written."""

    @property
    def num_left_out(self) -> int:
        """Bytes between head and tail."""
        return self.num_bytes - len(self.head) - len(self.tail)

    def text(self) -> str:
        """As UTF-8, with a line that tells of what was left out."""
        gap = f"\n[{self.num_left_out} bytes left out]\n".encode() if self.num_left_out else b""
        return (self.head + gap + self.tail).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A command that is over, with all that it had started."""

    reason: OutcomeReason
    status: int
    """Its exit status, or minus the signal that ended it."""
    stdout: Captured
    stderr: Captured
    started_s: float
    """Wall clock, seconds since the epoch."""
    finished_s: float
    cpu_s: float = 0.0
    """Of it and of what it waited for."""
    max_memory_bytes: int = 0
    """Of the largest process among those."""

    @property
    def is_success(self) -> bool:
        return self.reason is OutcomeReason.EXITED and self.status == 0


class Worker(Protocol):
    """A command that lives on, and is fed by its standard input and read by its standard output."""

    async def send(self, data: bytes) -> None:
        """Returns when the worker took most of it. What a worker that is gone is sent is lost."""
        ...

    async def receive_line(self, timeout_s: float | None = None) -> bytes:
        """The next line with its end, b"" after the last; raises TimeoutError, and then no line is lost."""
        ...

    async def end_input(self) -> None: ...

    async def wait(self) -> Outcome:
        """Until it ends by itself or by its limits. Lines that nobody received are the outcome's `stdout`."""
        ...

    async def stop(self) -> Outcome:
        """End it and all that it started."""
        ...


class Sandbox(Protocol):
    workspace: str
    """The folder in which commands run, as they see it."""

    async def run(self, command: Command) -> Outcome:
        """To its end. Cancelling ends it. A program that cannot be run exits with 126 or 127, as in a shell."""
        ...

    async def start(self, command: Command) -> Worker: ...

    async def read(self, path: str, max_bytes: int) -> bytes:
        """A file of the workspace; one that is larger, missing or elsewhere is refused."""
        ...

    async def write(self, path: str, content: bytes) -> None:
        """Folders on the way are made."""
        ...

    async def close(self) -> None:
        """End whatever still runs."""
        ...


class ToolHost(Protocol):
    """Runs the tools of tasks, on all that a task holds."""

    async def tools(self, task: Task) -> Sequence[Mapping[str, JsonValue]]:
        """Those that an agent may call, as OpenAI's API describes functions."""
        ...

    async def call(self, task: Task, name: str, arguments: JsonValue) -> str:
        """What the tool answers, after its latency; a call that cannot be served is answered by an error line."""
        ...


# -- who attempts a task ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an agent finds the policy."""

    url: str
    """Of a gateway, without the dialect's part: http://127.0.0.1:8500."""
    key: str = field(repr=False)
    """Of the episode."""
    model: str = "policy"


class AgentEnd(StrEnum):
    """How an attempt ended. Whether the task is solved is for its verifier to say."""

    FINISHED = "finished"
    """By the agent itself."""
    OUT_OF_TURNS = "out_of_turns"
    TIMEOUT = "timeout"
    FAILED = "failed"
    """It broke, or the policy could not be asked any more."""


@dataclass(frozen=True, slots=True)
class AgentResult:
    end: AgentEnd
    answer: str
    """What it said at last; of a program, what it printed."""
    started_s: float
    finished_s: float
    failure: str | None = None
    """What broke, where something did."""
    transcript: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """What it left to read, by the name of a file."""


class Agent(Protocol):
    async def run(self, task: Task, endpoint: Endpoint, sandbox: Sandbox) -> AgentResult:
        """Attempt the task. What goes wrong inside is told in the result; cancelling ends the attempt."""
        ...
