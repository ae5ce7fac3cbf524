"""The agent kind `command`: starts an unmodified program for each attempt, in a workspace and a home of its own.

The program finds the gateway in its environment, in its arguments, or in files that are written before it starts, with
placeholders replaced (`CommandConfig`):

    OPENAI_BASE_URL, OPENAI_API_KEY                          read by OpenAI's SDK and programs that use it
    ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY                    read by Anthropic's SDK
    ANTHROPIC_AUTH_TOKEN                                     the same key, for programs that read only this one
    M2FORGE_MODEL                                            a model name for the policy; the gateway accepts any
    M2FORGE_MCP_URL                                          the tools of the task's family as an MCP server
    M2FORGE_TASK_FILE                                        path of the instruction's file, in the home
    M2FORGE_TASK                                             the instruction itself, if it fits into a variable

It runs until it exits or the sandbox kills it, with every process that it started. Its answer is its standard output or
a file; the API key is redacted in both.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Self

from m2forge.agents.attempt import (
    LIMIT,
    AgentError,
    Answer,
    DeathCause,
    ErrorKind,
    Job,
    Recorded,
    RolloutAnswer,
    WorkerDiedError,
)
from m2forge.agents.config import PLACEHOLDERS, AnswerFile, CommandConfig
from m2forge.agents.program import death_cause, from_here, inside_path
from m2forge.agents.workspace import HOME_PREFIX, Workspace
from m2forge.errors import DataError
from m2forge.protocols import Command, Endpoint, Outcome, OutcomeReason
from m2forge.records import ROLLOUT_KEY, JsonValue, Task
from m2forge.sandbox.init_sandbox import PATH

KEY = "[key]"
TASK_FILE = f"{HOME_PREFIX}.m2forge/task.txt"
MCP_PATH = "/v1/mcp"
MAX_VARIABLE_BYTES = 100_000
"""Maximum bytes of the instruction in a variable; Linux refuses to exec with a variable of 128 KiB."""
MAX_ANSWER_BYTES = 1 << 20
"""Maximum bytes that are read of an answer's file; the rest is left out."""
SHOWN_CHARS = 1000
"""Characters of the end of a failed program's output that its error repeats."""


class CommandAgent:
    """See `AttemptAgent`."""

    is_silent_allowed = False

    def __init__(self, config: CommandConfig) -> None:
        self._config, self._command = config, from_here(config.command)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Every attempt ends with its own program."""

    async def attempt(self, job: Job, *, is_exclusive: bool = False) -> Answer:
        config, workspace = self._config, job.workspace
        endpoint = workspace.reached(job.endpoint)
        values = placeholder_values(job.task, endpoint, workspace)
        await asyncio.to_thread(self._write_files, workspace, values)
        variables = inside_path(workspace.config, config.env, workspace.env.get("PATH", PATH))
        variables |= {name: fill(text, values) for name, text in config.env.items()}
        command = Command(
            tuple(fill(word, values).replace("\0", "") for word in self._command),
            environment(job.task, endpoint, workspace) | variables,
            stdin=fill(config.stdin, values).encode(errors="replace"),
            timeout_s=config.timeout_s,
        )
        sandbox = await workspace.start(job.endpoint)
        outcome = await sandbox.run(command)
        _require_success(outcome, job.endpoint.key)
        await workspace.freeze()
        text = await self._read_answer(workspace, outcome)
        return Answer(_redacted(text, job.endpoint.key), transcript(outcome, job.endpoint.key))

    async def watch(self) -> None:
        """No process lives across attempts; `AttemptRunner` counts attempts without a request."""
        await asyncio.get_running_loop().create_future()

    async def inspect(self, answer: Answer, recorded: Recorded) -> bool | None:
        """A program's own logs are not compared."""
        return None

    def _write_files(self, workspace: Workspace, values: Mapping[str, str]) -> None:
        workspace.write(TASK_FILE, values["instruction"])
        for path, text in self._config.files.items():
            workspace.write(path, fill(text, values))

    async def _read_answer(self, workspace: Workspace, outcome: Outcome) -> str:
        answer = self._config.answer
        if not isinstance(answer, AnswerFile):
            return outcome.stdout.text() if answer == "stdout" else ""
        try:
            content = await workspace.read(answer.file, MAX_ANSWER_BYTES)
        except DataError as error:
            raise AgentError(f"{LIMIT}: the answer cannot be read: {error}", ErrorKind.POLICY) from error
        # The program left none, as after a task that it gave up.
        return "" if content is None else content.decode(errors="replace")


class RolloutAgent:
    """See `Rollouts`."""

    def __init__(self, limits: CommandConfig) -> None:
        """`limits`: timeout and sandbox; its command is replaced by that of each task."""
        self._limits = limits

    async def attempt(self, job: Job) -> RolloutAnswer:
        command = job.task.metadata[ROLLOUT_KEY]
        if not isinstance(command, list | tuple):
            raise DataError(f"task {job.task.id}: {ROLLOUT_KEY}: expected a command, received {command!r:.100}")
        own = self._limits.model_copy(update={"command": tuple(str(word) for word in command)})
        answer = await CommandAgent(own).attempt(replace(job, workspace=job.workspace.plain(own.sandbox)))
        return RolloutAnswer(answer.text, answer.transcript)


def placeholder_values(task: Task, endpoint: Endpoint, workspace: Workspace) -> dict[str, str]:
    url = endpoint.url.rstrip("/")
    return dict(
        zip(
            PLACEHOLDERS,
            (
                *(task.instruction, url, endpoint.key, endpoint.model),
                *(workspace.inside, workspace.inside_home, f"{url}{MCP_PATH}"),
            ),
            strict=True,
        )
    )


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders of `text`; what a value contains is not replaced again."""
    parts = text.split("{")
    filled = [parts[0]]
    for part in parts[1:]:
        name, brace, rest = part.partition("}")
        filled.append(f"{values[name]}{rest}" if brace and name in values else f"{{{part}")
    return "".join(filled)


def environment(task: Task, endpoint: Endpoint, workspace: Workspace) -> dict[str, str]:
    """Environment variables that give a program the endpoint and the task."""
    url = endpoint.url.rstrip("/")
    env = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": endpoint.key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": endpoint.key,
        "ANTHROPIC_AUTH_TOKEN": endpoint.key,
        "M2FORGE_MODEL": endpoint.model,
        "M2FORGE_MCP_URL": f"{url}{MCP_PATH}",
        "M2FORGE_TASK_FILE": workspace.locate(TASK_FILE),
    }
    instruction = task.instruction.encode(errors="replace")
    if len(instruction) <= MAX_VARIABLE_BYTES and b"\0" not in instruction:
        env["M2FORGE_TASK"] = instruction.decode()
    return env


def transcript(outcome: Outcome, key: str) -> dict[str, bytes]:
    """The program's output and how it ended, as files."""
    ending: dict[str, JsonValue] = {
        "reason": outcome.reason,
        "status": outcome.status,
        "started_s": outcome.started_s,
        "seconds": outcome.finished_s - outcome.started_s,
        "cpu_s": outcome.cpu_s,
        "max_memory_bytes": outcome.max_memory_bytes,
        "num_stdout_bytes": outcome.stdout.num_bytes,
        "num_stderr_bytes": outcome.stderr.num_bytes,
    }
    return {
        "stdout.txt": _redacted(outcome.stdout.text(), key).encode(),
        "stderr.txt": _redacted(outcome.stderr.text(), key).encode(),
        "exit.json": json.dumps(ending, indent=2).encode(),
    }


def _redacted(text: str, key: str) -> str:
    """A program may print its environment; its output is stored for longer than the key should be known."""
    return text.replace(key, KEY)


def _require_success(outcome: Outcome, key: str) -> None:
    """Raise what an attempt whose program ended this way ends with; see `agents/attempt.py`."""
    if outcome.is_success:
        return
    output = _redacted((outcome.stderr.text().strip() or outcome.stdout.text().strip())[-SHOWN_CHARS:], key)
    said = f": {output}" if output else " without output"
    match outcome.reason:
        case OutcomeReason.TIMEOUT:
            raise TimeoutError
        case OutcomeReason.FLOODED:
            raise AgentError(f"{LIMIT}: the program exceeded the output limit", ErrorKind.POLICY)
        case OutcomeReason.TAMPERED:
            raise AgentError("the program wrote to the sandbox's control channel and was killed", ErrorKind.POLICY)
    match death_cause(outcome):
        case DeathCause.LOST:
            raise WorkerDiedError(f"the program was killed from outside (status {outcome.status}){said}")
        case DeathCause.LIMIT:
            raise AgentError(f"{LIMIT}: the program ended with status {outcome.status}{said}", ErrorKind.POLICY)
        case DeathCause.EXITED:
            raise AgentError(f"the program ended with status {outcome.status}{said}", None)
