"""Executes tasks' tools for the gateway: runs the families' code in worker processes and adds each call's latency."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path

from m2forge.forge.config import ForgeConfig
from m2forge.records import JsonValue, Task
from m2forge.tasks.runner import TaskRunner
from m2forge.text.message import tool_to_openai


class FamilyToolHost:
    """See `ToolHost`."""

    def __init__(self, runner: TaskRunner) -> None:
        self._runner = runner

    async def tools(self, task: Task) -> Sequence[Mapping[str, JsonValue]]:
        return [tool_to_openai(tool) for tool in await self._runner.tools(task)]

    async def call(self, task: Task, name: str, arguments: JsonValue) -> str:
        answer = await self._runner.call(task, name, arguments)
        await asyncio.sleep(answer.latency_s)
        return answer.content


@contextlib.asynccontextmanager
async def open_tool_host(config: ForgeConfig, folder: Path) -> AsyncGenerator[FamilyToolHost, None]:
    """`folder`: working directory of the workers."""
    async with TaskRunner(config.verify, folder, config.curriculum.family_names) as runner:
        yield FamilyToolHost(runner)
