"""A task as a folder, in the format of Harbor: a path in, its configuration and files out, and back again.

    task.toml               the configuration (`tasks/folders/task_toml.py`)
    instruction.md          what the agent is asked
    environment/            Dockerfile and the files it copies
    tests/                  test.sh, copied to /tests after the attempt; writes /logs/verifier/reward.txt
    solution/               solve.sh, which solves the task; never shown to an agent
    steps/NAME/             a task with steps: instruction.md, tests/, solution/ and workdir/ of each

`read_folder` refuses a folder that cannot be used with one `DataError` that names file and key: a link that leads out
of the folder, a compose file, a missing instruction. `read_folders` skips such a folder and returns the reason.

`read_files` and `write_folder` are inverse to each other: bytes, executable bits, links and empty folders survive, and
so do comments and unknown keys of `task.toml`.
"""

import hashlib
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from m2forge.errors import DataError, NotFoundError
from m2forge.files import staged_folder
from m2forge.tasks.folders.task_toml import (
    Provenance,
    Step,
    Table,
    TaskConfig,
    VerifierMode,
    parse_provenance,
    parse_table,
    unsupported_keys,
)

CONFIG_NAME, INSTRUCTION_NAME = "task.toml", "instruction.md"
TEST_NAME, SOLVE_NAME, DOCKERFILE_NAME = "test.sh", "solve.sh", "Dockerfile"
COMPOSE_NAMES = frozenset(
    f"{stem}.{ending}" for stem in ("docker-compose", "compose", "singularity-compose") for ending in ("yaml", "yml")
)
"""Files that start several containers; a sandbox is one."""
UNSUPPORTED_NAMES = (".harborignore", "trajectory.json")
"""Files that leave tests out, or that give the agent a conversation to begin with."""
MAX_TEXT_BYTES = 4 << 20
"""Limit of task.toml and of an instruction."""
MAX_FILES = 200_000
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)


class FileKind(StrEnum):
    FILE = "file"
    EXECUTABLE = "executable"
    LINK = "link"
    """`content` is the path that it points to."""
    FOLDER = "folder"
    """An empty folder."""


@dataclass(frozen=True, slots=True)
class FolderFile:
    content: bytes
    kind: FileKind = FileKind.FILE


@dataclass(frozen=True, slots=True)
class TaskFolder:
    """A folder that was read and can be used."""

    path: Path
    table: Table
    config: TaskConfig
    provenance: Provenance

    @property
    def name(self) -> str:
        """The package's name without its organisation, else the folder's."""
        return self.path.name if self.config.task is None else self.config.task.name.rpartition("/")[2]

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.config.steps or ()

    @property
    def environment(self) -> Path:
        return self.path / "environment"

    @property
    def dockerfile(self) -> Path | None:
        path = self.environment / DOCKERFILE_NAME
        return path if path.is_file() else None

    def part(self, name: str, step: Step | None = None) -> Path:
        """The path of a file or folder of the task, or of one step."""
        return self.path / name if step is None else self.path / "steps" / step.name / name

    def instruction(self, step: Step | None = None) -> str:
        """What the agent is asked, without the canary lines at its head that mark test data."""
        return strip_canary(_read_text(self.part(INSTRUCTION_NAME, step), self.path))

    def tests(self, step: Step | None = None) -> list[Path]:
        """The folders whose files are copied to /tests, later ones over earlier ones."""
        folders = [self.path / "tests", *([self.part("tests", step)] if step is not None else [])]
        return [folder for folder in folders if folder.is_dir()]

    def test_script(self, step: Step | None = None) -> Path | None:
        """The script that decides, on this machine; None if there is none."""
        return next(
            (folder / TEST_NAME for folder in reversed(self.tests(step)) if (folder / TEST_NAME).is_file()), None
        )

    def has_bundled_tests(self, step: Step | None = None) -> bool:
        """Whether a separate verifier has an image of its own, which holds the tests."""
        if self.config.mode(step) is VerifierMode.SHARED:
            return False
        tables = [self.config.verifier, *([step.verifier] if step is not None else [])]
        has_image = any(table.environment is not None and table.environment.docker_image for table in tables)
        return has_image or self.verifier_dockerfile(step) is not None

    def verifier_dockerfile(self, step: Step | None = None) -> Path | None:
        """The Dockerfile of a separate verifier that has an image of its own, with the tests in it."""
        if self.config.mode(step) is VerifierMode.SEPARATE:
            for folder in reversed(self.tests(step)):
                if (folder / DOCKERFILE_NAME).is_file():
                    return folder / DOCKERFILE_NAME
        return None

    def solution(self, step: Step | None = None) -> Path | None:
        """The script that solves the task, or one step; None if there is none."""
        candidates = [self.part("solution", step), self.part("solution")]
        return next((found / SOLVE_NAME for found in candidates if (found / SOLVE_NAME).is_file()), None)

    def digest(self) -> str:
        """SHA-256 over all files: names, kinds and bytes."""
        digest = hashlib.sha256()
        for name, file in sorted(read_files(self.path).items()):
            head = f"{name}\0{file.kind}\0{len(file.content)}\0"
            digest.update(os.fsencode(head) + file.content)
        return digest.hexdigest()


def unsupported(folder: TaskFolder) -> list[str]:
    """Keys and files that ask for what attempts here do not offer; such a folder is refused instead of run without."""
    names = {name.rpartition("/")[2]: name for name, _ in walk(folder.path) if not name.startswith("environment/")}
    files = [names[name] for name in UNSUPPORTED_NAMES if name in names]
    return unsupported_keys(folder.config) + files


@dataclass(frozen=True, slots=True)
class Rejected:
    """A folder that cannot be used, and why."""

    path: Path
    problem: str


# -- reading ----------------------------------------------------------------------------------------------------------


def read_folder(path: Path) -> TaskFolder:
    if not path.is_dir():
        raise NotFoundError(f"{path}: expected a task folder, a folder with {CONFIG_NAME} and {INSTRUCTION_NAME}")
    if not (path / CONFIG_NAME).exists():
        raise DataError(f"{path / CONFIG_NAME}: missing; a task folder needs one")
    for name, _ in walk(path):
        if name.rpartition("/")[2] in COMPOSE_NAMES and _may_be_built(name):
            raise DataError(
                f"{path / name}: compose files are not supported, because a sandbox is one container; "
                f"write what the task needs into {DOCKERFILE_NAME}"
            )
    folder = read_table(path)
    require_files(folder)
    return folder


def read_folders(root: Path) -> tuple[list[TaskFolder], list[Rejected]]:
    """All task folders at or below `root`, by path, and those that cannot be used."""
    if not root.is_dir():
        raise NotFoundError(f"{root}: expected a task folder, or a folder of such; it is not a folder")
    folders, rejected = list[TaskFolder](), list[Rejected]()
    for path in find_folders(root):
        try:
            folders.append(read_folder(path))
        except (DataError, NotFoundError) as error:
            rejected.append(Rejected(path, str(error)))
    if not folders and not rejected:
        raise NotFoundError(f"{root}: holds no task folder; each needs {CONFIG_NAME} and {INSTRUCTION_NAME}")
    return folders, rejected


def find_folders(root: Path) -> Iterator[Path]:
    """Folders that are tasks by what they hold, complete or not; hidden ones are skipped."""
    if any((root / name).exists() for name in (CONFIG_NAME, INSTRUCTION_NAME)):
        yield root
        return
    try:
        inner = sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError as error:
        raise DataError(f"{root}: cannot be read ({error.strerror})") from error
    for path in inner:
        if not path.name.startswith("."):
            yield from find_folders(path)


def require_files(folder: TaskFolder) -> None:
    """Refuse a folder without what its configuration needs."""
    if not folder.config.environment.docker_image and not folder.environment.is_dir():
        raise DataError(
            f"{folder.environment}: missing; add it with a {DOCKERFILE_NAME}, or set environment.docker_image"
        )
    for step in folder.steps or (None,):
        instruction = folder.part(INSTRUCTION_NAME, step)
        if not folder.instruction(step).strip():
            raise DataError(f"{instruction}: empty; write what the agent is asked")
        if folder.test_script(step) is None and not folder.has_bundled_tests(step):
            raise DataError(f"{folder.part('tests', step) / TEST_NAME}: missing; it decides whether the task is solved")


def read_table(path: Path) -> TaskFolder:
    """Read `task.toml` alone; the other files may be missing or broken."""
    origin = str(path / CONFIG_NAME)
    try:
        table = tomllib.loads(_read_text(path / CONFIG_NAME, path))
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{origin}: not valid TOML: {error}") from error
    return TaskFolder(path, table, parse_table(table, origin), parse_provenance(table, origin))


def _may_be_built(name: str) -> bool:
    """Whether a file lies directly in a folder from which an image is built."""
    match name.split("/"):
        case ["environment" | "tests", _] | ["steps", _, "tests", _]:
            return True
    return False


def _read_text(path: Path, root: Path) -> str:
    try:
        if not path.resolve().is_relative_to(root.resolve()):
            raise DataError(f"{path}: a link that leads out of the task folder")
        with path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
        if len(content) > MAX_TEXT_BYTES:
            raise DataError(f"{path}: over {MAX_TEXT_BYTES} bytes; it should be a text to read")
        return content.decode("utf-8")
    except FileNotFoundError as error:
        raise DataError(f"{path}: missing; a task folder needs it") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error}") from error


def strip_canary(text: str) -> str:
    lines = text.split("\n")
    num = 0
    while num < len(lines) and _CANARY.fullmatch(lines[num].strip()):
        num += 1
    while num < len(lines) and not lines[num].strip():
        num += 1
    return "\n".join(lines[num:])


# -- files ------------------------------------------------------------------------------------------------------------


def walk(root: Path) -> Iterator[tuple[str, FileKind]]:
    """The files of a folder by their path in it, sorted; links are not followed, but may not lead out. `.git` of the
    folder itself is left out."""
    num = 0
    pending = [""]
    while pending:
        prefix = pending.pop()
        try:
            entries = sorted(os.scandir(root / prefix), key=lambda entry: entry.name)
        except OSError as error:
            raise DataError(f"{root / prefix}: cannot be read ({error.strerror})") from error
        if prefix and not entries:
            yield prefix.rstrip("/"), FileKind.FOLDER
        for entry in entries:
            name = prefix + entry.name
            if name == ".git":
                continue
            num += 1
            if num > MAX_FILES:
                raise DataError(f"{root}: over {MAX_FILES} files; pack large trees into an archive")
            if entry.is_dir(follow_symlinks=False):
                pending.append(name + "/")
            else:
                yield name, _kind(root, name)


def _kind(root: Path, name: str) -> FileKind:
    path = root / name
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        if not path.exists():
            raise DataError(f"{path}: a link to {path.readlink()}, which does not exist")
        if path.readlink().is_absolute() or not path.resolve().is_relative_to(root.resolve()):
            raise DataError(f"{path}: a link that leads out of the task folder, to {path.readlink()}")
        return FileKind.LINK
    if not stat.S_ISREG(mode):
        raise DataError(f"{path}: neither a file, a folder nor a link")
    return FileKind.EXECUTABLE if mode & 0o100 else FileKind.FILE


def read_files(root: Path) -> dict[str, FolderFile]:
    """All files of a folder with their content, by path."""
    files = {}
    for name, kind in walk(root):
        path = root / name
        match kind:
            case FileKind.LINK:
                content = os.fsencode(path.readlink())
            case FileKind.FOLDER:
                content = b""
            case _:
                content = path.read_bytes()
        files[name] = FolderFile(content, kind)
    return files


def write_folder(dest: Path, files: Mapping[str, FolderFile]) -> None:
    """Write files to a folder that does not exist or is empty, all of them or none, synced to disk."""
    with staged_folder(dest) as folder:
        write_files(folder, files)


def write_files(folder: Path, files: Mapping[str, FolderFile]) -> None:
    """Write files to an empty folder, which is made if it is missing."""
    for name in files:
        if not name or name.startswith("/") or "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
            raise DataError(f"{folder}: expected paths inside the folder, received {name!r}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        match file.kind:
            case FileKind.LINK:
                path.symlink_to(os.fsdecode(file.content))
            case FileKind.FOLDER:
                path.mkdir(parents=True)
            case _:
                path.write_bytes(file.content)
                path.chmod(0o755 if file.kind is FileKind.EXECUTABLE else 0o644)
