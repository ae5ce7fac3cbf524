"""Configuration of agents, by `kind`: a program per attempt, our own loop, or programs that live across attempts.

[agent]
kind = "command"
command = ["my-agent", "--task", "{instruction}", "--url", "{base_url}/v1"]
timeout_s = 300
"""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from m2forge.config import Config
from m2forge.errors import suggest
from m2forge.sandbox.config import Network, SandboxConfig

Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]

PLACEHOLDERS = ("instruction", "base_url", "key", "model", "workspace", "home", "mcp_url")
"""Words that are replaced in texts of a command's configuration where they stand in braces."""
_BRACED = re.compile(r"(?<!\$)\{([A-Za-z][A-Za-z_-]*)\}")


def require_placeholders(name: str, texts: Iterable[str]) -> None:
    """Raise for a word in braces that looks like a misspelt placeholder; others stay as they are."""
    for text in texts:
        for word in _BRACED.findall(text):
            hint = suggest(word.lower(), PLACEHOLDERS)
            if word not in PLACEHOLDERS and hint.startswith("did you mean"):
                raise ValueError(f"{name}: there is no placeholder {{{word}}}; {hint} Known: {', '.join(PLACEHOLDERS)}")


class WorkerSandboxConfig(SandboxConfig):
    """Sandbox of each attempt, which the program drives through the socket that its job names. The program itself is a
    plain process with the same limits."""

    timeout_s: Seconds = 7 * 86400.0
    """Wall-clock limit of a command, and of the program's whole life."""


class WorkerConfig(Config):
    """A program that lives across attempts: it reads jobs as lines on standard input and writes answers as lines to
    standard output (`agents/worker_pool.py` specifies both). Each worker runs in its own folder; words of the command
    that are file paths are resolved against the folder in which the run was started."""

    kind: Literal["worker"] = "worker"
    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """The program and its arguments."""
    num_workers: Count = 1
    """Number of agent processes."""
    jobs_per_worker: Count = 16
    """Concurrent attempts per worker; 1 for a sequential program."""
    timeout_s: Seconds = 120.0
    """Timeout of one attempt; the window would stall behind an attempt that never ends."""
    cancel_s: Seconds = 5.0
    """How long a worker may take to confirm a cancel before it is restarted."""
    sandbox: WorkerSandboxConfig = WorkerSandboxConfig()

    @property
    def num_jobs(self) -> int:
        return self.num_workers * self.jobs_per_worker


class AnswerFile(Config):
    file: str = Field(min_length=1)
    """The file that holds the answer: in the workspace, or in the attempt's home if it begins with `~/`."""


class VersionConfig(Config):
    """The version of a program that a configuration is written for."""

    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """A command that prints the version, run once before the run starts."""
    text: str = Field(min_length=1)
    """What its output must contain."""


class CommandSandboxConfig(SandboxConfig):
    """Where the program runs. Besides the image it sees what it is installed in (a virtual environment, `node_modules`
    or `bin`) and the files that the command names."""

    network: Network = "gateway"
    timeout_s: Seconds = 86400.0
    max_memory_bytes: Count | None = 1 << 40
    """Memory of the whole sandbox where a cgroup can limit it, else, and with `process`, address space of each
    process; Node and Go reserve much address space and use little."""

    @model_validator(mode="after")
    def _check_network(self) -> Self:
        if self.network == "none":
            raise ValueError('network = "none": the program could not reach the policy; leave it out')
        return self


class CommandConfig(Config):
    """A program that is started once for each attempt, in a fresh workspace with its own home. In `command`, `env`,
    `files` and `stdin` these words in braces are replaced: {instruction}, {base_url} (the gateway, without /v1), {key}
    (its API key), {model}, {workspace}, {home} and {mcp_url} (the tools of the task's family as an MCP server, with the
    same key); other braces stay."""

    kind: Literal["command"] = "command"
    preset: str = Field(default="", exclude=True)
    """Name of a public agent whose keys stand below those given here: claude-code, codex, mini-swe-agent, opencode,
    openhands or qwen-code (configs/agents)."""
    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """The program and its arguments, started in the workspace. Words that are file paths are resolved against the
    folder in which the run was started."""
    env: Mapping[str, str] = {}
    """Environment variables besides those for the gateway and the task; not for secrets, because configs are stored."""
    files: Mapping[str, str] = {}
    """Files to write before the program starts, path → content: in the attempt's home where the path begins with `~/`,
    else in the workspace."""
    stdin: str = ""
    """The program's standard input."""
    answer: Literal["stdout", "none"] | AnswerFile = "stdout"
    """Where the program leaves its answer: on standard output, in a file (`{ file = "answer.txt" }`), or nowhere, if
    the verifier looks at the workspace alone."""
    version: VersionConfig | None = None
    """The program's version; a run with another is refused. Not checked if not set."""
    timeout_s: Seconds = 600.0
    """Timeout of one attempt."""
    max_concurrent: Count = 4
    """Maximum concurrent attempts."""
    sandbox: CommandSandboxConfig = CommandSandboxConfig()

    @property
    def num_jobs(self) -> int:
        return self.max_concurrent

    @field_validator("files")
    @classmethod
    def _check_paths(cls, files: Mapping[str, str]) -> Mapping[str, str]:
        for path in files:
            parts = path.removeprefix("~/").split("/")
            if not all(parts) or ".." in parts or "\0" in path:
                raise ValueError(f"expected paths in the workspace, or in the home by ~/, received {path!r}")
        return files

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        if self.timeout_s > self.sandbox.timeout_s:
            raise ValueError(
                f"timeout_s ({self.timeout_s:g}) exceeds sandbox.timeout_s ({self.sandbox.timeout_s:g}); raise that too"
            )
        require_placeholders("command", self.command)
        require_placeholders("env", self.env.values())
        require_placeholders("files", self.files.values())
        require_placeholders("stdin", (self.stdin,))
        return self


class SlidingWindowConfig(Config):
    kind: Literal["sliding_window"] = "sliding_window"
    max_turns: Count = 20
    """Maximum turns; when there are more, the oldest are dropped."""
    keep_turns: Count = 10
    """Turns that remain after a drop; fewer than `max_turns`, so that not every turn starts a new branch."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.keep_turns > self.max_turns:
            raise ValueError(f"keep_turns is {self.keep_turns}, more than max_turns, {self.max_turns}")
        return self


class SummariseConfig(Config):
    kind: Literal["summarise"] = "summarise"
    threshold: Share = 0.7
    """Share of the context above which the model is asked to summarise the conversation."""
    keep_turns: Count = 1
    """Last turns to keep unchanged, because they may hold results that the model has not seen."""
    request: str = (
        "Your context is nearly full. Write down what you need to go on: what was asked, what you found out, what you "
        "did and what is left to do. Call no tool; everything but the task and your notes will be gone."
    )


class DropToolOutputConfig(Config):
    kind: Literal["drop_tool_output"] = "drop_tool_output"
    max_share: Share = 0.3
    """Share of the context that tool output may take; above it, the oldest output is dropped."""
    keep_share: Share = 0.2
    """Share that remains after a drop; less than `max_share`, so that not every turn starts a new branch."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.keep_share > self.max_share:
            raise ValueError(f"keep_share is {self.keep_share}, more than max_share, {self.max_share}")
        return self


OperationConfig = Annotated[SlidingWindowConfig | SummariseConfig | DropToolOutputConfig, Field(discriminator="kind")]


class SubAgentConfig(Config):
    """A tool with which the model delegates part of its work to another conversation."""

    system: str = "You do one part of a larger task. Do it, and answer with what you found; nothing else is passed on."
    max_turns: Count = 10
    max_depth: Count = 1
    """Maximum nesting depth of sub-agents; at 1, sub-agents cannot start others."""


class WhiteBoxConfig(Config):
    system: str = "Solve the task. Call tools where they help, several at once where they do not depend on each other."
    max_turns: Count = 50
    """Maximum completions of the main conversation."""
    max_s: Seconds = 600.0
    """Timeout of the attempt, sub-agents included."""
    context_tokens: Count = 32768
    """Context length of the policy, to which the shares of operations refer."""
    max_tokens: Count | None = None
    """Maximum tokens of one completion."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Sampling temperature; None leaves it to the gateway."""
    tools: tuple[Literal["shell", "files"], ...] = ("shell", "files")
    """Tools that act on the sandbox."""
    tool_timeout_s: Seconds = 60.0
    max_parallel_calls: Count = 32
    """Maximum concurrent tool calls of one turn; the others wait."""
    max_tool_chars: Annotated[int, Field(ge=100)] = 20_000
    """Maximum characters of one tool result; the middle of a longer one is cut."""
    operations: tuple[OperationConfig, ...] = ()
    """Operations on the conversation, applied in this order before each call if they are due."""
    offers_operations: bool = False
    """Whether the model may call operations itself, as tools."""
    sub_agents: SubAgentConfig | None = None


class LoopConfig(WhiteBoxConfig):
    """Our own agent loop, with its tools and context operations, beside the tools of the task's family."""

    kind: Literal["loop"] = "loop"
    max_concurrent: Count = 16
    """Maximum concurrent attempts."""
    check_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the attempts whose states are rebuilt from the loop's log and compared with the recorded tokens; the
    terminal view counts them."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where the tools run, and their limits."""

    @property
    def num_jobs(self) -> int:
        return self.max_concurrent
