"""Runs commands as plain processes of this machine: limited and reliably killed, but not confined.

A command sees the file system and the network as this process does. It inherits only a few named environment variables,
its home is the workspace, it has its own session, and the kernel enforces its limits. When it ends, times out, is
cancelled, or this process dies (of any signal), it and every process it started are killed. That keeps agents from
disturbing each other by accident; it hides nothing from a hostile one.
"""

import asyncio
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from m2forge.errors import ConfigError, DataError, NotFoundError
from m2forge.files import write_atomic
from m2forge.protocols import Command, Outcome, OutcomeReason, Snapshot
from m2forge.sandbox.archive import TreeWriter, unpack_stream, write_tree
from m2forge.sandbox.command_worker import ProcessWorker
from m2forge.sandbox.config import SandboxConfig

DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
"""PATH of commands if this process has none."""
_MAX_BYTES, _MAX_FILES = 1 << 62, 1_000_000


@dataclass(frozen=True, slots=True)
class FolderSnapshot:
    """See `Snapshot`. A copy of the workspace."""

    folder: Path

    async def remove(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)


class ProcessSandbox:
    """See `Sandbox`."""

    is_lost = False

    def __init__(
        self, workspace: Path, config: SandboxConfig | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        """Create the workspace if it does not exist; closing the sandbox leaves it in place. `env`: variables of every
        command, such as another home."""
        if config is not None and config.backend != "process":
            raise ConfigError(f'sandbox.backend: expected "process" for a plain process, received {config.backend!r}')
        workspace.mkdir(parents=True, exist_ok=True)
        self._root = workspace.resolve()
        self.workspace = str(self._root)
        self._config, self._env = config or SandboxConfig(backend="process"), dict(env or {})
        self._workers: set[ProcessWorker] = set()

    async def run(self, command: Command) -> Outcome:
        return await (await self._start(command, is_fed=False)).wait_or_stop()

    async def start(self, command: Command) -> ProcessWorker:
        """Start a worker; the sandbox's timeout covers its lifetime."""
        return await self._start(command, is_fed=True)

    async def read(self, path: str, max_bytes: int) -> bytes:
        return await asyncio.to_thread(self._read, path, max_bytes)

    async def write(self, path: str, content: bytes) -> None:
        await asyncio.to_thread(self._write, path, content)

    async def upload(self, source: Path, path: str, user: str | None = None) -> None:
        self._refuse_user(user)
        if not source.exists():
            raise NotFoundError(f"{source} does not exist")
        await asyncio.to_thread(_copy, source, self._below(path), _MAX_BYTES)

    async def download(self, path: str, dest: Path, max_bytes: int) -> tuple[str, ...]:
        source = self._below(path)
        if not source.exists():
            raise NotFoundError(f"{path} is not a file or folder of the workspace")
        return await asyncio.to_thread(_copy, source, dest, max_bytes)

    async def kill_all(self) -> int:
        """Counts commands: the processes of one that has ended have ended with it."""
        workers = list(self._workers)
        for worker in workers:
            worker.kill(OutcomeReason.KILLED)
        for worker in workers:
            await worker.wait()
        return len(workers)

    async def snapshot(self) -> "FolderSnapshot":
        """Unlike other backends it copies the workspace alone, and running commands continue."""
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="m2forge-snapshot-"))
        await asyncio.to_thread(shutil.copytree, self._root, folder, symlinks=True, dirs_exist_ok=True)
        return FolderSnapshot(folder)

    async def fork(self, snapshot: Snapshot) -> "ProcessSandbox":
        """The fork's workspace is a folder beside this one's."""
        if not isinstance(snapshot, FolderSnapshot):
            raise DataError(f"expected a snapshot of a process sandbox, received {type(snapshot).__name__}")
        folder = Path(tempfile.mkdtemp(prefix=f"{self._root.name}-", dir=self._root.parent))
        await asyncio.to_thread(shutil.copytree, snapshot.folder, folder, symlinks=True, dirs_exist_ok=True)
        return ProcessSandbox(folder, self._config, self._env)

    async def close(self) -> None:
        await self.kill_all()

    async def _start(self, command: Command, *, is_fed: bool) -> ProcessWorker:
        self._refuse_user(command.user)
        worker = ProcessWorker(command, self._config, is_fed=is_fed)
        await worker.complete_start(worker.start(self._environment(command.env), self._root))
        self._workers.add(worker)
        worker.ended.add_done_callback(lambda _: self._workers.discard(worker))
        return worker

    def _refuse_user(self, user: str | None) -> None:
        if user is not None:
            raise ConfigError(f"user {user!r}: commands of the backend `process` run as this process's own user")

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        passed_on = {name: os.environ[name] for name in self._config.inherits if name in os.environ}
        own = {"HOME": self.workspace, "PWD": self.workspace} | self._env
        return {"PATH": DEFAULT_PATH} | passed_on | own | dict(variables)

    def _read(self, path: str, max_bytes: int) -> bytes:
        target = self._inside(path)
        if not target.is_file():
            raise NotFoundError(f"{path} is not a file of the workspace")
        with target.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise DataError(f"{path} is larger than {max_bytes} bytes; read part of it with a command")
        return content

    def _write(self, path: str, content: bytes) -> None:
        target = self._inside(path)
        mode = target.stat().st_mode if target.is_file() else None
        write_atomic(target, content)
        if mode is not None:
            target.chmod(stat.S_IMODE(mode))  # An executable stays executable.

    def _inside(self, path: str) -> Path:
        target = (self._root / path).resolve()
        if not target.is_relative_to(self._root) or target == self._root:
            raise NotFoundError(f"{path} is not a file inside the workspace; use a path below it")
        return target

    def _below(self, path: str) -> Path:
        """A path of the workspace, or the workspace itself."""
        target = (self._root / path).resolve()
        if not target.is_relative_to(self._root):
            raise NotFoundError(f"{path} is not inside the workspace; use a path below it")
        return target


def _copy(source: Path, dest: Path, max_bytes: int) -> tuple[str, ...]:
    """Copy by the entries that other backends exchange, with their limits and their rule for links."""
    with tempfile.TemporaryFile() as file, TreeWriter(dest, max_bytes, _MAX_FILES) as writer:
        write_tree(source, file.write)
        file.seek(0)
        unpack_stream(file.read, writer)
        return tuple(os.fsdecode(name) for name in writer.left_out)
