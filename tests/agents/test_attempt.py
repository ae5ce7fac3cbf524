"""An attempt that is cancelled leaves no episode at the gateway."""

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest

from m2forge.agents.attempt import AttemptRunner
from m2forge.agents.workspace import Workspace, Workspaces
from m2forge.protocols import Endpoint
from m2forge.records import Domain, Task


class Gateway:
    """Opens episodes slowly."""

    def __init__(self) -> None:
        self.said: list[str] = []

    async def wait_until_up(self, id: str) -> None:
        return

    async def open(self, id: str, *rest: object) -> Endpoint:
        self.said.append("asked")
        await asyncio.sleep(0.05)
        self.said.append("opened")
        return Endpoint("http://127.0.0.1:1", "key")

    def delete_soon(self, id: str) -> None:
        self.said.append("deleted")


class SlowWorkspaces(Workspaces):
    def __init__(self, folder: Path, gateway: Gateway) -> None:
        super().__init__(folder)
        self._said = gateway.said

    def close(self, workspace: Workspace) -> None:
        self._said.append("closing")
        time.sleep(0.05)
        super().close(workspace)


class EndedRunner(AttemptRunner[Any]):
    async def _attempt(self, *args: object) -> Any:
        return "result"


class Tasks:
    async def sandbox(self, task: Task, config: Any) -> tuple[Any, dict[str, str]]:
        return config, {}


async def cancel(runner: AttemptRunner[Any], gateway: Gateway, word: str) -> None:
    """Cancel an attempt once `word` was said."""
    task = asyncio.create_task(runner.attempt("a", Task("t", Domain.AGENT, "Do it.", 1.0, {}), ""))
    while word not in gateway.said:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_cancelled_opening_is_deleted_after_it_ended(tmp_path: Path) -> None:
    gateway = Gateway()
    runner = AttemptRunner(cast("Any", None), cast("Any", gateway), cast("Any", Tasks()), Workspaces(tmp_path))
    asyncio.run(cancel(runner, gateway, "asked"))
    assert gateway.said == ["asked", "opened", "deleted"]


def test_an_ended_attempt_that_is_cancelled_is_deleted(tmp_path: Path) -> None:
    """It is cancelled while its workspace is being closed, so its result is lost."""
    gateway = Gateway()
    workspaces = SlowWorkspaces(tmp_path, gateway)
    runner = EndedRunner(cast("Any", None), cast("Any", gateway), cast("Any", Tasks()), workspaces)
    asyncio.run(cancel(runner, gateway, "closing"))
    assert gateway.said == ["closing", "deleted"]
