"""Our own loop as the agent of a run: family tools by the gateway, states rebuilt, failures by the one rule."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from m2forge.agents.attempt import AgentError, Answer, AttemptResult, AttemptRunner, Recorded
from m2forge.agents.loop_agent import LoopAgent
from m2forge.agents.tool import WriteTool
from m2forge.agents.workspace import Workspaces
from m2forge.gateway.config import Budget, GatewayConfig
from m2forge.records import JsonValue, Task
from m2forge.rl.config import LoopAgentConfig
from m2forge.rl.gateway_admin import GatewayAdmin
from m2forge.sandbox.config import BackendName
from m2forge.tasks.agent import Chain
from m2forge.tasks.config import VerifyConfig
from m2forge.tasks.runner import TaskRunner
from m2forge.text.message import Message, ToolCall, tool_to_openai
from tests.gateway.dialogue import minimax
from tests.gateway.live import ADMIN_KEY, Live, live
from tests.sandbox.places import require

TASK = Chain().draw(1, 0)
TOOLS = [*Chain().tools(TASK), WriteTool.tool]


def says(task: Task) -> list[Message]:
    """What solves it: a look, a file that is written, the answer."""
    answer = Chain().call(task, "look", {"key": task.metadata["start"]})
    look = ToolCall("look", {"key": task.metadata["start"]}, "")
    write = ToolCall("write_file", {"path": "seen.txt", "content": answer}, "")
    return [
        Message("assistant", "", "First.", (look, write)),
        Message("assistant", answer, "Seen."),
    ]


class Host:
    """See `ToolHost`. Serves the family's tools in the gateway's own loop, without worker processes."""

    async def tools(self, task: Task) -> Sequence[Mapping[str, JsonValue]]:
        return [tool_to_openai(tool) for tool in Chain().tools(task)]

    async def call(self, task: Task, name: str, arguments: JsonValue) -> str:
        return Chain().call(task, name, arguments)


async def attempt(gateway: Live, folder: Path, config: LoopAgentConfig, seed: int = 0) -> AttemptResult:
    async with (
        GatewayAdmin(gateway.url, ADMIN_KEY, budget=config.budget) as admin,
        LoopAgent(config, minimax(), random.Random(seed)) as agent,
        TaskRunner(VerifyConfig(), folder / "verify", ("chain",)) as tasks,
    ):
        runner = AttemptRunner(agent, admin, tasks, Workspaces(folder / "workspaces", config.sandbox))
        return await runner.attempt("g0-0-1", TASK, "g0")


def run(folder: Path, script: list[Message], **fields: object) -> AttemptResult:
    config = LoopAgentConfig.model_validate({"check_share": 1.0, "sandbox": {"backend": "process"}} | fields)
    with live(minimax(), script, GatewayConfig(port=0), tools=TOOLS, tool_host=Host()) as gateway:
        return asyncio.run(attempt(gateway, folder, config))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["process", "namespace"])
def test_an_attempt_solves_its_task_and_is_rebuilt(tmp_path: Path, backend: BackendName) -> None:
    require(backend)
    result = run(tmp_path, says(TASK), sandbox={"backend": backend})
    assert (result.failure, result.verdict.perf, result.is_equal) == (None, 1.0, True)
    assert [step["role"] for step in result.steps] == ["main", "main"]
    assert not (tmp_path / "workspaces" / "g0-0-1").exists()


@pytest.mark.slow
def test_only_the_configured_share_is_rebuilt(tmp_path: Path) -> None:
    assert run(tmp_path, says(TASK), check_share=0.0).is_equal is None


@pytest.mark.slow
def test_a_state_that_differs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inspect = LoopAgent.inspect

    async def changed(agent: LoopAgent, answer: Answer, recorded: Recorded) -> bool | None:
        log = answer.transcript["log.jsonl"].replace(b"Start at", b"Begin at")
        return await inspect(agent, replace(answer, transcript={"log.jsonl": log}), recorded)

    monkeypatch.setattr(LoopAgent, "inspect", changed)
    assert run(tmp_path, says(TASK)).is_equal is False


@pytest.mark.slow
def test_a_spent_budget_counts_and_a_silent_loop_is_retried(tmp_path: Path) -> None:
    result = run(tmp_path, says(TASK), budget=Budget(max_calls=1))
    assert "1 of 1 calls are spent" in (result.failure or "")
    assert result.verdict.perf == 0.0
    with pytest.raises(AgentError, match="the loop failed"):
        run(tmp_path, says(TASK), system="x" * 1_000_000)
