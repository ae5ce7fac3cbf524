"""Serves the task folders of a run: tasks in, the sandboxes of their attempts and verdicts out.

A folder's image is built at its first attempt, once; attempts at it wait meanwhile. A folder that cannot be built fails
its own attempts alone. A backend that cannot show images, or a base image that is missing, would fail all of them, so
that ends the run.
"""

import asyncio
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from m2forge.errors import ConfigError, DataError, NotFoundError, RunError
from m2forge.protocols import Sandbox
from m2forge.records import Task, Verdict
from m2forge.sandbox.config import SandboxConfig
from m2forge.tasks.family import read_text
from m2forge.tasks.folders.environment import FolderEnvironment, prepare
from m2forge.tasks.folders.folder import read_folder
from m2forge.tasks.folders.folder_family import FOLDER_KEY
from m2forge.tasks.folders.verification import verify_attempt


class FolderHost:
    def __init__(self, base_image: str | None) -> None:
        """`base_image`: the image that stands for one that is not in the store."""
        self._base_image = base_image
        self._environments: dict[str, FolderEnvironment] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def environment(self, task: Task, config: SandboxConfig) -> FolderEnvironment:
        """The environment of the task's folder; `config`: the sandbox of the run's attempts."""
        path = read_text(task, FOLDER_KEY)
        async with self._locks[path]:
            if path not in self._environments:
                self._environments[path] = await self._prepare(path, config)
            return self._environments[path]

    async def _prepare(self, path: str, config: SandboxConfig) -> FolderEnvironment:
        try:
            folder = await asyncio.to_thread(read_folder, Path(path))
        except NotFoundError as error:
            raise DataError(f"{error}; was the folder removed during the run?") from error
        try:
            environment = await prepare(folder, config, self._base_image)
        except (ConfigError, NotFoundError) as error:
            raise RunError(f"{path}: {error}") from error
        if environment.config.network == "none" and config.network == "gateway":
            # An agent that works inside needs the policy, and reaches nothing else.
            inside = environment.config.model_copy(update={"network": config.network})
            return replace(environment, config=inside)
        return environment

    async def verify(self, task: Task, sandbox: Sandbox | None) -> Verdict:
        """`sandbox`: that of the attempt, which is closed; None if the agent ran no command."""
        environment = self._environments.get(read_text(task, FOLDER_KEY))
        if environment is None:
            raise DataError(f"Task {task.id}: the attempt had no sandbox of its folder; it cannot be verified")
        if sandbox is None:
            sandbox = await environment.open()
        try:
            return await verify_attempt(environment, sandbox)
        finally:
            await sandbox.close()
