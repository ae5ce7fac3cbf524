"""An attempt that is cancelled while the gateway opens its episode leaves none behind."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from m2forge.agents.attempt import AttemptRunner
from m2forge.agents.workspace import Workspaces
from m2forge.protocols import Endpoint
from m2forge.records import Domain, Task


class Gateway:
    """Opens episodes slowly."""

    def __init__(self) -> None:
        self.said: list[str] = []

    async def wait_until_up(self) -> None:
        return

    async def open(self, id: str, *rest: object) -> Endpoint:
        self.said.append("asked")
        await asyncio.sleep(0.05)
        self.said.append("opened")
        return Endpoint("http://127.0.0.1:1", "key")

    def delete_soon(self, id: str) -> None:
        self.said.append("deleted")


class Tasks:
    async def sandbox(self, task: Task, config: Any) -> tuple[Any, dict[str, str]]:
        return config, {}


def test_a_cancelled_opening_is_deleted_after_it_ended(tmp_path: Path) -> None:
    gateway = Gateway()
    runner = AttemptRunner(cast("Any", None), cast("Any", gateway), cast("Any", Tasks()), Workspaces(tmp_path))

    async def cancel() -> None:
        task = asyncio.create_task(runner.attempt("a", Task("t", Domain.AGENT, "Do it.", 1.0, {}), ""))
        while "asked" not in gateway.said:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert gateway.said == ["asked", "opened", "deleted"]
