"""The folders of one attempt: a workspace with the task's files, a home and a folder for temporary files.

    FOLDER/ID/workspace/    the task's files; the agent works here, the verifier reads what it left
    FOLDER/ID/home/         HOME, with the caches and settings of programs
    FOLDER/ID/tmp/          TMPDIR

Nothing is shared between attempts, and all of it is removed after the attempt. What a killed process left behind is
removed by the next one.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType

from m2forge.errors import DataError
from m2forge.records import JsonValue, Task

FILES_KEY = "files"
"""Metadata key of a task's files: path in the workspace → text."""
HOME_PREFIX = "~/"
"""Begins the path of a file in the attempt's home."""


@dataclass(frozen=True, slots=True)
class Workspace:
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "workspace"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    def environment(self) -> dict[str, str]:
        """Variables that keep what a program caches, configures and stores inside the attempt."""
        home = self.home
        return {
            "HOME": str(home),
            "PWD": str(self.path),
            "TMPDIR": str(self.temporary),
            "XDG_CACHE_HOME": str(home / ".cache"),
            "XDG_CONFIG_HOME": str(home / ".config"),
            "XDG_DATA_HOME": str(home / ".local" / "share"),
            "XDG_STATE_HOME": str(home / ".local" / "state"),
        }

    def locate(self, path: str) -> Path:
        """The file that `path` names: in the home if it begins with `~/`, else in the workspace."""
        if path.startswith(HOME_PREFIX):
            return self.home / path.removeprefix(HOME_PREFIX)
        return self.path / path

    def write(self, path: str, content: str) -> None:
        target = self.locate(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8", errors="replace", newline="")


class Workspaces:
    def __init__(self, folder: Path) -> None:
        """`folder`: parent of all attempts' folders; removes what an earlier process left in it."""
        self._folder = folder.absolute()
        remove(self._folder)

    def open(self, id: str, task: Task) -> Workspace:
        workspace = Workspace(self._folder / id)
        remove(workspace.folder)
        for folder in (workspace.path, workspace.home, workspace.temporary):
            folder.mkdir(parents=True)
        for path, text in task_files(task).items():
            workspace.write(path, text)
        return workspace

    def close(self, workspace: Workspace) -> None:
        remove(workspace.folder)


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
