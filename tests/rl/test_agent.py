"""Which agent makes an attempt: the configured one, or the program of a family that drives its own rollout."""

import asyncio
import sys
from pathlib import Path

from m2forge.agents.attempt import Answer, Job
from m2forge.agents.workspace import Workspaces
from m2forge.protocols import Endpoint
from m2forge.records import Domain, Task
from m2forge.rl.attempts import open_agent
from m2forge.rl.config import CommandAgentConfig
from tests.gateway.dialogue import minimax

PROGRAM = "import os; print('own', os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY'][:1])"


def attempt(folder: Path, task: Task) -> Answer:
    async def scene() -> Answer:
        config = CommandAgentConfig(command=("echo", "configured"))
        async with open_agent(config, folder / "agents", minimax()) as agent:
            workspace = Workspaces(folder / "workspaces").open("one", task)
            endpoint = Endpoint("http://127.0.0.1:9", "key", "policy")
            return await agent.attempt(Job("one", task, endpoint, (), workspace))

    return asyncio.run(scene())


def test_a_family_that_drives_its_rollout_runs_its_program(tmp_path: Path) -> None:
    task = Task("t", Domain.AGENT, "Do it.", 0.0, {"family": "x"})
    assert attempt(tmp_path, task).text == "configured\n"
    own = Task("t", Domain.AGENT, "Do it.", 0.0, {"family": "x", "rollout": [sys.executable, "-c", PROGRAM]})
    assert attempt(tmp_path, own).text == "own http://127.0.0.1:9/v1 k\n"
