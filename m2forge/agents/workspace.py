"""The workspace of one attempt: its folders on this machine, and the sandbox in which its commands run.

    FOLDER/ID/workspace/    the task's files; with the backend `process` the agent works here
    FOLDER/ID/home/         HOME, with the caches and settings of programs
    FOLDER/ID/tmp/          TMPDIR

Other backends have folders of their own: `start` opens a fresh sandbox and uploads workspace and home, `freeze` ends
what the agent left running, `collect` downloads the workspace, which the verifier then reads. Nothing is shared between
attempts, and all of it is removed after the attempt. What a killed process left behind is removed by the next one; its
sandboxes end with it.
"""

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import TracebackType
from urllib.parse import urlsplit

from m2forge.errors import DataError, EngineError, NotFoundError
from m2forge.protocols import Endpoint, Sandbox
from m2forge.records import JsonValue, Task
from m2forge.sandbox.backend import open_sandbox
from m2forge.sandbox.config import SandboxConfig

FILES_KEY = "files"
"""Metadata key of a task's files: path in the workspace → text."""
HOME_PREFIX = "~/"
"""Begins the path of a file in the attempt's home."""
INSIDE_HOME, INSIDE_TEMPORARY = "/tmp/home", "/tmp"
"""Home and TMPDIR in a sandbox that has files of its own; every user may write there."""
MAX_FILE_BYTES = 64 << 20
"""Maximum size of a file that is read from a sandbox."""


@dataclass(slots=True)
class SandboxCounts:
    """The sandboxes of a run's attempts."""

    num_started: int = 0
    num_alive: int = 0
    num_failed: int = 0
    """Those that could not start, and those that ended before they were closed."""


class Workspace:
    def __init__(
        self,
        folder: Path,
        config: SandboxConfig | None = None,
        env: Mapping[str, str] | None = None,
        counts: SandboxCounts | None = None,
    ) -> None:
        """`config`: the sandbox; None: plain processes. `env`: variables of its commands, besides those of the
        attempt's folders."""
        self.folder, self.config, self.env = folder, config or SandboxConfig(backend="process"), dict(env or {})
        self._counts = counts or SandboxCounts()
        self._sandbox: Sandbox | None = None
        self._is_frozen = False
        self._changing = asyncio.Lock()

    # -- folders of this machine ---------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        return self.folder / "workspace"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    def write(self, path: str, content: str) -> None:
        """Write a file, before the sandbox starts: in the home if `path` begins with `~/`, else in the workspace."""
        target = self.home / path.removeprefix(HOME_PREFIX) if path.startswith(HOME_PREFIX) else self.path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8", errors="replace", newline="")

    def plain(self, config: SandboxConfig) -> "Workspace":
        """The same folders, for commands that run as plain processes."""
        return Workspace(self.folder, config)

    # -- what commands see ---------------------------------------------------------------------------------------------

    @property
    def is_confined(self) -> bool:
        """Whether commands see files of their own instead of the folders above."""
        return self.config.backend != "process"

    @property
    def inside(self) -> str:
        """The workspace, as commands see it."""
        return self.config.workspace if self.is_confined else str(self.path)

    @property
    def inside_home(self) -> str:
        return INSIDE_HOME if self.is_confined else str(self.home)

    def locate(self, path: str) -> str:
        """The file that `path` names, as commands see it."""
        if path.startswith(HOME_PREFIX):
            return f"{self.inside_home}/{path.removeprefix(HOME_PREFIX)}"
        return f"{self.inside}/{path}"

    def environment(self) -> dict[str, str]:
        """Variables that keep what a program caches, configures and stores inside the attempt."""
        home = self.inside_home
        return {
            "HOME": home,
            "PWD": self.inside,
            "TMPDIR": INSIDE_TEMPORARY if self.is_confined else str(self.temporary),
            "XDG_CACHE_HOME": f"{home}/.cache",
            "XDG_CONFIG_HOME": f"{home}/.config",
            "XDG_DATA_HOME": f"{home}/.local/share",
            "XDG_STATE_HOME": f"{home}/.local/state",
        }

    def reached(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint as commands reach it: a sandbox forwards its own loopback, at the same port, to the gateway."""
        if not self.is_confined:
            return endpoint
        return replace(endpoint, url=f"http://127.0.0.1:{_address(endpoint.url)[1]}")

    # -- the sandbox ---------------------------------------------------------------------------------------------------

    async def start(self, endpoint: Endpoint) -> Sandbox:
        """The attempt's sandbox; the first call opens it and uploads workspace and home."""
        async with self._changing:
            if self._sandbox is None:
                self._counts.num_started += 1
                try:
                    with _machine_errors("a sandbox could not start"):
                        self._sandbox = await self._open(endpoint)
                except Exception:
                    self._counts.num_failed += 1
                    raise
                self._counts.num_alive += 1
            return self._sandbox

    async def _open(self, endpoint: Endpoint) -> Sandbox:
        gateway = _address(endpoint.url) if self.config.network != "none" else None
        sandbox = await open_sandbox(self.config, self.path, self.env | self.environment(), gateway)
        if self.is_confined:
            try:
                await sandbox.upload(self.home, self.inside_home)
                await sandbox.upload(self.path, self.inside)
            except BaseException:
                await sandbox.close()
                raise
        return sandbox

    @property
    def sandbox(self) -> Sandbox | None:
        """The sandbox, if it has started and has files of its own."""
        return self._sandbox if self.is_confined else None

    @property
    def is_lost(self) -> bool:
        """Whether the sandbox ended before it was closed: what happened in it says nothing about the policy."""
        return self._sandbox is not None and self._sandbox.is_lost

    async def freeze(self) -> None:
        """Kill what the agent left running: it cannot change files any more, nor end the commands of the verifier."""
        async with self._changing:
            if self.is_confined and self._sandbox is not None and not self._is_frozen:
                await self._sandbox.kill_all()
                self._is_frozen = True

    async def read(self, path: str, max_bytes: int) -> bytes | None:
        """The first `max_bytes` of a file, in the home if `path` begins with `~/`; None if there is none. Raises
        `DataError` if the file is larger than `MAX_FILE_BYTES`."""
        target = Path(self.locate(path))
        if self.is_confined and self._sandbox is not None:
            folder = self.temporary / "read"
            remove(folder)
            try:
                await self._sandbox.download(str(target), folder, max(max_bytes, MAX_FILE_BYTES))
            except NotFoundError:
                return None
            target = folder / target.name
        return await asyncio.to_thread(_head, target, max_bytes)

    async def collect(self) -> Path:
        """Freeze the workspace and bring it to a folder of this machine. Symbolic links that lead out of it are left
        out. Raises `DataError` if it is larger than the sandbox's disk."""
        await self.freeze()
        if self.is_confined and self._sandbox is not None:
            with _machine_errors("the workspace could not be stored"):
                await asyncio.to_thread(remove, self.path)
                self.path.mkdir()
                await self._sandbox.download(self.inside, self.path, self.config.max_disk_bytes)
        return self.path

    async def stop(self) -> None:
        """Close the sandbox, with all of its processes."""
        async with self._changing:
            sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            self._counts.num_alive -= 1
            self._counts.num_failed += sandbox.is_lost
            await sandbox.close()


class Workspaces:
    def __init__(self, folder: Path, config: SandboxConfig | None = None) -> None:
        """`folder`: parent of all attempts' folders; removes what an earlier process left in it. `config`: the
        attempts' sandboxes, unless a task brings its own; None: plain processes."""
        self._folder = folder.absolute()
        self.config = config or SandboxConfig(backend="process")
        self.counts = SandboxCounts()
        remove(self._folder)

    def open(
        self, id: str, task: Task, config: SandboxConfig | None = None, env: Mapping[str, str] | None = None
    ) -> Workspace:
        """`config`, `env`: of the task's own sandbox."""
        workspace = Workspace(self._folder / id, config or self.config, env, self.counts)
        remove(workspace.folder)
        for folder in (workspace.path, workspace.home, workspace.temporary):
            folder.mkdir(parents=True)
        for path, text in task_files(task).items():
            workspace.write(path, text)
        return workspace

    def close(self, workspace: Workspace) -> None:
        remove(workspace.folder)


@contextlib.contextmanager
def _machine_errors(what: str) -> Iterator[None]:
    """Errors of this machine, such as a full disk, are the infrastructure's."""
    try:
        yield
    except OSError as error:
        raise EngineError(f"{what}: {error}") from error


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or 80


def _head(path: Path, max_bytes: int) -> bytes | None:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(max_bytes)
    return None


def task_files(task: Task) -> dict[str, str]:
    """The files that a task brings: path in the workspace → text."""
    files: JsonValue = task.metadata.get(FILES_KEY, {})
    if not isinstance(files, Mapping):
        raise DataError(f"task {task.id}: files: expected paths with their texts, received {files!r:.100}")
    for path, text in files.items():
        if problem := path_problem(path):
            raise DataError(f"task {task.id}: files: {problem}, received {path!r}")
        if not isinstance(text, str):
            raise DataError(f"task {task.id}: files: {path}: expected text, received {text!r:.100}")
    return {path: str(text) for path, text in files.items()}


def path_problem(path: str) -> str | None:
    """What keeps `path` from naming a file below a folder; None if it does."""
    pure = PurePosixPath(path)
    if not pure.parts or "\0" in path:
        return "expected the path of a file"
    if pure.is_absolute() or ".." in pure.parts:
        return "expected a path inside the workspace, relative and without '..'"
    return None


def remove(folder: Path) -> None:
    """Remove a folder if it exists, also what a program in it made read-only."""
    if folder.exists():
        shutil.rmtree(folder, onerror=_make_writable)


def _make_writable(
    function: Callable[..., object],
    path: str,
    error: tuple[type[BaseException], BaseException, TracebackType],
) -> None:
    if isinstance(error[1], FileNotFoundError):
        return
    Path(path).parent.chmod(0o700)
    if Path(path).is_dir() and not Path(path).is_symlink():
        Path(path).chmod(0o700)
        shutil.rmtree(path)
    else:
        function(path)
