"""A family from task folders: `folders:PATH` in, its tasks out. PATH is a task folder, or holds some at any depth.

A folder that cannot be used is rejected with its reason and the others are used; `rejected` lists them, and a run
reports them before it begins. A path without a usable folder is refused.

Folders have no levels: their difficulty is measured by pass rates (`tasks/curriculum.py`). All tasks of one source
package are held out, or none, so that an evaluation meets no code that was trained on: a hash of the package of
`[metadata.m2forge]`, else of its source, else of the folder's name decides, unless it sets `split`.

A task's metadata names the folder (`FOLDER_KEY`): attempts run in its image, and its tests decide in a fresh one
(`tasks/folders/verification.py`).
"""

import random
from pathlib import Path

from m2forge.errors import ConfigError, DataError
from m2forge.records import Domain, JsonValue, Submission, Task, Verdict
from m2forge.tasks.family import FAMILY_KEY, SPLIT_KEY, Family
from m2forge.tasks.folders.folder import TaskFolder, read_folders, unsupported
from m2forge.tasks.task_set import Split, split_by_hash

FOLDER_KEY = "folder"
"""Metadata key of the absolute path of a task's folder."""
SPLIT_SALT = "package"
"""A package has the same split in every source."""


class FolderFamily(Family):
    name: str
    domain: Domain
    levels = range(1)
    has_levels = False

    def __init__(self, path: Path, domain: Domain | None = None) -> None:
        """`domain`: take only the tasks of this domain, and those without one; None: all, which must have one
        domain."""
        path = path.absolute()
        folders, rejected = read_folders(path)
        problems = [item.problem for item in rejected]
        problems += [problem for folder in folders if (problem := _problem(folder)) is not None]
        usable = [folder for folder in folders if _problem(folder) is None]
        self.name, self.domain = path.name, domain or _domain_of(path, usable)
        chosen = [folder for folder in usable if folder.provenance.domain in (None, self.domain)]
        self.rejected = tuple(problems)
        if not chosen:
            why = f"; {len(problems)} are rejected, the first: {problems[0]}" if problems else ""
            raise ConfigError(f"{path}: holds no task folder that can be used in the domain {self.domain}{why}")
        self.tasks = tuple(self._task(folder, path) for folder in chosen)

    def _task(self, folder: TaskFolder, root: Path) -> Task:
        inner = folder.path.relative_to(root).as_posix()
        metadata: dict[str, JsonValue] = {
            FAMILY_KEY: self.name,
            FOLDER_KEY: str(folder.path),
            SPLIT_KEY: split_of_folder(folder),
        }
        id = self.name if inner == "." else f"{self.name}-{inner}"
        return Task(id, self.domain, folder.instruction(), 0.0, metadata)

    def draw(self, difficulty: int, seed: int) -> Task:
        return random.Random(seed).choice(self.tasks)

    def verify(self, task: Task, submission: Submission) -> Verdict:
        raise DataError(
            f"Task {task.id}: the tests of a task folder run in a sandbox of its image, not in a worker; set "
            'agent.sandbox.backend = "namespace"'
        )


def split_of_folder(folder: TaskFolder) -> Split:
    origin = folder.provenance
    return origin.split or split_by_hash(SPLIT_SALT, origin.package or origin.source or folder.name)


def _problem(folder: TaskFolder) -> str | None:
    """Why an agent cannot attempt the task; None if it can."""
    if folder.steps:
        return f"{folder.path}: {len(folder.steps)} steps; an attempt has one instruction"
    missing = unsupported(folder)
    return f"{folder.path}: not offered here: {', '.join(missing)}" if missing else None


def _domain_of(path: Path, folders: list[TaskFolder]) -> Domain:
    domains = sorted({folder.provenance.domain or Domain.CODING for folder in folders})
    if len(domains) > 1:
        raise ConfigError(f"{path}: tasks of several domains ({', '.join(domains)}); name one: {path}#{domains[0]}")
    return domains[0] if domains else Domain.CODING
