"""Attempts of programs through the runner: what the verifier sees, and the one rule for failures."""

import asyncio
import itertools
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from m2forge.agents.attempt import (
    DEATHS_BEFORE_EXCLUSIVE,
    LOST,
    MAX_SILENT,
    TIMEOUT,
    AgentError,
    AttemptResult,
    AttemptRunner,
    BrokenAgentError,
    Interrupted,
    JobError,
    WorkerLost,
)
from m2forge.agents.config import CommandSandboxConfig
from m2forge.agents.workspace import Workspaces
from m2forge.errors import DataError, EngineError, RunError
from m2forge.gateway.config import GatewayConfig
from m2forge.protocols import Sandbox
from m2forge.records import Domain, Submission, Task, Verdict
from m2forge.rl.attempts import attempt_sandbox, open_agent
from m2forge.rl.config import CommandAgentConfig
from m2forge.rl.gateway_admin import GatewayAdmin
from m2forge.sandbox.config import BackendName, SandboxConfig
from m2forge.text.message import Tool
from tests.gateway.dialogue import minimax
from tests.gateway.live import ADMIN_KEY, Live, live
from tests.sandbox.places import require

NUMBERS = itertools.count()
"""No two attempts at one gateway have the same name."""

# The words of the instruction are what it does.
PROGRAM = """
import json, os, pathlib, sys, time, urllib.request
for word in sys.argv[1].split():
    if word == "call":
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
        url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
    elif word == "write":
        pathlib.Path("made.txt").write_text(pathlib.Path("given.txt").read_text() * 2)
    elif word == "killed":
        os.kill(os.getpid(), 9)
    elif word == "hang":
        time.sleep(60)
    elif word == "exit":
        sys.exit("no arguments in the call")
print("said")
"""


class Tasks:
    """See `TaskHost`. Keeps what it was given, and what the workspace held then."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.seen = error, list[tuple[Submission, dict[str, str]]]()

    async def tools(self, task: Task) -> tuple[Tool, ...]:
        return ()

    async def sandbox(self, task: Task, config: SandboxConfig) -> tuple[SandboxConfig, Mapping[str, str]]:
        return config, {}

    async def verify(self, task: Task, submission: Submission, sandbox: Sandbox | None = None) -> Verdict:
        if self.error is not None:
            raise self.error
        folder = Path(submission.workspace or "")
        self.seen.append((submission, {path.name: path.read_text() for path in folder.iterdir()}))
        return Verdict(0.5)


async def run(
    gateway: Live,
    folder: Path,
    does: str,
    tasks: Tasks,
    num_deaths: int = 0,
    num: int = 1,
    timeout_s: float = 30.0,
    backend: BackendName = "process",
) -> AttemptResult:
    """The last of `num` attempts, of which the others may fail."""
    config = CommandAgentConfig(
        command=(sys.executable, "-c", PROGRAM, "{instruction}"),
        timeout_s=timeout_s,
        sandbox=CommandSandboxConfig(backend=backend),
    )
    task = Task("t", Domain.AGENT, does, metadata={"files": {"given.txt": "ab"}, "answer": "secret"})
    async with (
        GatewayAdmin(gateway.url, ADMIN_KEY) as admin,
        open_agent(config, folder / "agents", minimax()) as agent,
    ):
        workspaces = Workspaces(folder / "workspaces", attempt_sandbox(config))
        runner = AttemptRunner(agent, admin, tasks, workspaces)
        try:
            for index in range(num - 1):
                with pytest.raises(AgentError):
                    await runner.attempt(f"g0-0-{index}", replace(task, instruction="exit"), "g0")
            return await runner.attempt(f"g0-1-{next(NUMBERS)}", task, "g0", num_deaths)
        finally:
            assert not list((folder / "workspaces").iterdir()), "a workspace is left"
            assert workspaces.counts.num_alive == 0


def attempt(folder: Path, does: str, tasks: Tasks | None = None, **options: float | str) -> AttemptResult:
    with live(minimax(), config=GatewayConfig(port=0)) as gateway:
        return asyncio.run(run(gateway, folder, does, tasks or Tasks(), **options))  # type: ignore[arg-type]  # options of any type


@pytest.mark.parametrize("backend", ["process", "namespace"])
def test_the_verifier_sees_answer_workspace_and_conversation(tmp_path: Path, backend: BackendName) -> None:
    require(backend)
    tasks = Tasks()
    result = attempt(tmp_path, "call write", tasks, backend=backend)
    ((submission, files),) = tasks.seen
    assert (result.verdict, result.failure, result.answer) == (Verdict(0.5), None, "said\n")
    assert (submission.answer, files) == ("said\n", {"given.txt": "ab", "made.txt": "abab"})
    assert [message["role"] for message in submission.messages] == ["user", "assistant"]
    assert [(step["role"], step["num_sampled"]) for step in submission.steps] == [("main", 4)]
    assert submission.steps == result.steps


@pytest.mark.slow
def test_an_exit_after_a_completion_counts_and_is_not_verified(tmp_path: Path) -> None:
    tasks = Tasks()
    result = attempt(tmp_path, "call exit", tasks)
    assert "status 1: no arguments in the call" in (result.failure or "")
    assert (result.verdict.perf, len(result.tree.samples), tasks.seen) == (0.0, 1, [])
    assert attempt(tmp_path, "call hang", timeout_s=6.0).failure == TIMEOUT


@pytest.mark.slow
def test_confined_programs_follow_the_same_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("namespace")
    with live(minimax(), config=GatewayConfig(port=0)) as gateway:

        def attempted(does: str, timeout_s: float = 30.0) -> AttemptResult:
            return asyncio.run(run(gateway, tmp_path, does, Tasks(), timeout_s=timeout_s, backend="namespace"))

        assert "status 1: no arguments in the call" in (attempted("call exit").failure or "")
        assert attempted("call hang", timeout_s=5.0).failure == TIMEOUT
        with pytest.raises(WorkerLost):
            attempted("call killed")
        # The kernel refuses a sandbox, or kills one, at any point of an attempt: none of it is a verdict.
        monkeypatch.setattr("m2forge.agents.workspace.Workspace.is_lost", True)
        for does in ("call write", "call exit"):
            with pytest.raises(WorkerLost, match=LOST):
                attempted(does)
        monkeypatch.undo()
        monkeypatch.setattr("m2forge.sandbox.namespace.program", lambda: Path("/bin/false"))
        with pytest.raises(EngineError, match="ended before it was ready"):
            attempted("call write")


@pytest.mark.slow
def test_a_program_that_was_killed_is_retried_and_then_broken(tmp_path: Path) -> None:
    with pytest.raises(WorkerLost):
        attempt(tmp_path, "call killed")
    with pytest.raises(JobError, match="was killed") as caught:
        attempt(tmp_path, "call killed", num_deaths=DEATHS_BEFORE_EXCLUSIVE)
    assert not isinstance(caught.value, Interrupted)


@pytest.mark.slow
def test_programs_that_never_call_the_policy_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2forge.agents.attempt.MAX_SILENT", 3)
    assert MAX_SILENT > 3
    with pytest.raises(AgentError, match="without a request to the policy; it answered 'said"):
        attempt(tmp_path, "write", num=2)
    with pytest.raises(BrokenAgentError, match=r"3 attempts in a row .* it answered 'said"):
        attempt(tmp_path, "write", num=3)


@pytest.mark.parametrize(("error", "is_fatal"), [(EngineError("lost"), False), (DataError("no such family"), True)])
def test_a_lost_verifier_is_retried_and_a_wrong_one_ends_the_run(
    tmp_path: Path, error: Exception, is_fatal: bool
) -> None:
    with pytest.raises(EngineError, match=str(error)) as caught:
        attempt(tmp_path, "call", Tasks(error))
    assert isinstance(caught.value, RunError) is is_fatal
