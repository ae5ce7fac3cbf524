"""The stages that write what a pipeline accepted: task folders and JSON Lines, in the directory of the run.

A folder or file is complete or absent. After a stage has run, its folder holds the accepted items and nothing else,
whatever an earlier, killed process has left. All items pass, except those that cannot be written.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from m2forge.errors import DataError
from m2forge.files import write_atomic
from m2forge.pipelines.stage import Context, Item, Outcome, Rejection, SetStage
from m2forge.records import JsonValue
from m2forge.tasks.folders.export import folder_name
from m2forge.tasks.folders.folder import CONFIG_NAME, FolderFile, read_files, write_folder


class WriteFolders(SetStage):
    """Writes a task folder per item; two items of one name: the first one."""

    repeats: ClassVar[bool] = True

    def __init__(
        self,
        folder: str,
        files: Callable[[Item, Context], tuple[str, Mapping[str, FolderFile]]],
        *,
        name: str = "write",
    ) -> None:
        """`files`: the folder's name, and its files by path."""
        self.name, self._folder, self._files = name, folder, files

    def process_all(self, items: Iterable[Item], context: Context) -> Iterator[Outcome]:
        root = context.run_dir / self._folder
        root.mkdir(exist_ok=True)
        owner: dict[str, str] = {}
        for item in items:
            try:
                name, files = self._files(item, context)
                _require_task(name, files)
            except DataError as error:
                yield Rejection("no valid task folder", {"error": str(error)})
                continue
            if name in owner:
                yield Rejection("name is taken", {"name": name, "by": owner[name]})
                continue
            owner[name] = item.id
            _write(root / name, files)
            yield item
        for path in root.iterdir():
            if path.name not in owner:
                _remove(path)


class WriteLines(SetStage):
    """Writes a JSON object per item, one a line."""

    repeats: ClassVar[bool] = True

    def __init__(
        self, path: str, line: Callable[[Item], Mapping[str, JsonValue]], *, name: str = "write-lines"
    ) -> None:
        self.name, self._path, self._line = name, path, line

    def process_all(self, items: Iterable[Item], context: Context) -> Iterator[Outcome]:
        lines = []
        for item in items:
            lines.append(json.dumps(self._line(item), ensure_ascii=False) + "\n")
            yield item
        # Text that a model wrote may contain lone surrogates.
        write_atomic(context.run_dir / self._path, "".join(lines).encode(errors="replace"))


class WriteFiles(SetStage):
    """Writes a JSON file per item."""

    repeats: ClassVar[bool] = True

    def __init__(
        self, folder: str, document: Callable[[Item], Mapping[str, JsonValue]], *, name: str = "write-files"
    ) -> None:
        self.name, self._folder, self._document = name, folder, document

    def process_all(self, items: Iterable[Item], context: Context) -> Iterator[Outcome]:
        root = context.run_dir / self._folder
        root.mkdir(exist_ok=True)
        names = set()
        for item in items:
            name = f"{folder_name(item.id)}.json"
            if name in names:
                yield Rejection("name is taken", {"name": name})
                continue
            names.add(name)
            text = json.dumps(self._document(item), ensure_ascii=False, indent=1) + "\n"
            write_atomic(root / name, text.encode(errors="replace"))
            yield item
        for path in root.iterdir():
            if path.name not in names:
                _remove(path)


def _require_task(name: str, files: Mapping[str, FolderFile]) -> None:
    if not name or name.startswith(".") or "/" in name:
        raise DataError(f"expected the name of a folder, received {name!r}")
    if CONFIG_NAME not in files:
        raise DataError(f"{name}: {CONFIG_NAME} is missing")


def _write(dest: Path, files: Mapping[str, FolderFile]) -> None:
    if dest.is_dir() and not dest.is_symlink() and read_files(dest) == files:
        return
    _remove(dest)
    write_folder(dest, files)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
