"""Runs any unmodified program as an agent, with the gateway's URL in its environment.

    OPENAI_BASE_URL, OPENAI_API_KEY                          read by OpenAI's SDK and programs that use it
    ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY                    read by Anthropic's SDK
    ANTHROPIC_AUTH_TOKEN                                     the same key, for programs that read only this one
    M2FORGE_MODEL                                            a model name for the policy; the gateway accepts any
    M2FORGE_TASK_FILE                                        path of the instruction's file in the workspace
    M2FORGE_TASK                                             the instruction itself, if it fits into a variable

It runs in the sandbox's workspace until it exits or the sandbox kills it. Its output and exit status are returned, with
the API key redacted.
"""

import json
from pathlib import Path

from m2forge.agents.config import BlackBoxConfig
from m2forge.files import staged_folder
from m2forge.protocols import AgentEnd, AgentResult, Command, Endpoint, Outcome, OutcomeReason, Sandbox
from m2forge.records import JsonValue, Task

KEY = "[key]"
TASK_FILE = ".m2forge/task.txt"
MAX_VARIABLE_BYTES = 100_000
"""Maximum bytes of the instruction in a variable; Linux refuses to exec with a variable of 128 KiB."""


class BlackBoxAgent:
    """See `Agent`."""

    def __init__(self, config: BlackBoxConfig) -> None:
        self._config = config

    async def run(self, task: Task, endpoint: Endpoint, sandbox: Sandbox) -> AgentResult:
        await sandbox.write(TASK_FILE, task.instruction.encode(errors="replace"))
        env = environment(task, endpoint, sandbox.workspace) | dict(self._config.env)
        outcome = await sandbox.run(Command(self._config.command, env, timeout_s=self._config.timeout_s))
        # A program may print its environment; its output is stored for longer than the key should be known.
        stdout, stderr = (stream.text().replace(endpoint.key, KEY) for stream in (outcome.stdout, outcome.stderr))
        return AgentResult(
            end=_end(outcome),
            answer=stdout,
            started_s=outcome.started_s,
            finished_s=outcome.finished_s,
            failure=_failure(outcome),
            transcript={
                "stdout.txt": stdout.encode(),
                "stderr.txt": stderr.encode(),
                "exit.json": json.dumps(_exit(outcome), indent=2).encode(),
            },
        )


def environment(task: Task, endpoint: Endpoint, workspace: str) -> dict[str, str]:
    """Environment variables that give a program the endpoint and the task."""
    url = endpoint.url.rstrip("/")
    env = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": endpoint.key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": endpoint.key,
        "ANTHROPIC_AUTH_TOKEN": endpoint.key,
        "M2FORGE_MODEL": endpoint.model,
        "M2FORGE_TASK_FILE": f"{workspace}/{TASK_FILE}",
    }
    instruction = task.instruction.encode(errors="replace")
    if len(instruction) <= MAX_VARIABLE_BYTES and b"\0" not in instruction:
        env["M2FORGE_TASK"] = instruction.decode()
    return env


def write_transcript(result: AgentResult, folder: Path) -> None:
    """Write the transcript's files to a new folder."""
    with staged_folder(folder) as partial:
        for name, content in result.transcript.items():
            (partial / name).write_bytes(content)


def _end(outcome: Outcome) -> AgentEnd:
    if outcome.reason is OutcomeReason.TIMEOUT:
        return AgentEnd.TIMEOUT
    return AgentEnd.FINISHED if outcome.is_success else AgentEnd.FAILED


def _failure(outcome: Outcome) -> str | None:
    match outcome.reason:
        case OutcomeReason.EXITED:
            return None if outcome.is_success else f"exit status {outcome.status}"
        case OutcomeReason.SIGNALLED:
            return f"killed by signal {-outcome.status}"
        case OutcomeReason.TIMEOUT:
            return f"time ran out after {outcome.finished_s - outcome.started_s:.1f} s"
        case OutcomeReason.FLOODED:
            return "exceeded the output limit"
        case OutcomeReason.KILLED:
            return "was killed from outside"
        case OutcomeReason.TAMPERED:
            return "wrote to the sandbox's control channel and was killed"


def _exit(outcome: Outcome) -> dict[str, JsonValue]:
    return {
        "reason": outcome.reason,
        "status": outcome.status,
        "started_s": outcome.started_s,
        "seconds": outcome.finished_s - outcome.started_s,
        "cpu_s": outcome.cpu_s,
        "max_memory_bytes": outcome.max_memory_bytes,
        "num_stdout_bytes": outcome.stdout.num_bytes,
        "num_stderr_bytes": outcome.stderr.num_bytes,
    }
