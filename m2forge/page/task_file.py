"""The files of a task: its metadata in; paths, sizes and texts out, within limits.

A task of a JSONL file carries its files' texts; that of a task folder names the folder, whose files are read as they
are now. Files that are not text, or are too large, are listed without their text. Links are not followed.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from m2forge.records import JsonValue

FILES_KEY, FOLDER_KEY = "files", "folder"
"""Metadata keys: texts by path, and the path of a task folder."""
MAX_FILES = 100
MAX_CHARS = 64 << 10
MAX_TOTAL_CHARS = 1 << 20


def task_files(metadata: Mapping[str, JsonValue]) -> list[JsonValue]:
    """One object for each file: `path`, `num_bytes`, and `text`, which is None where it is left out."""
    shown: list[JsonValue] = []
    left = MAX_TOTAL_CHARS
    for path, num_bytes, text in _files(metadata):
        if len(shown) == MAX_FILES:
            break
        is_shown = text is not None and len(text) <= min(MAX_CHARS, left)
        left -= len(text) if text is not None and is_shown else 0
        shown.append({"path": path, "num_bytes": num_bytes, "text": text if is_shown else None})
    return shown


def _files(metadata: Mapping[str, JsonValue]) -> Iterator[tuple[str, int, str | None]]:
    files, folder = metadata.get(FILES_KEY), metadata.get(FOLDER_KEY)
    if isinstance(files, Mapping):
        for path, text in sorted(files.items()):
            if isinstance(text, str):
                yield path, len(text.encode(errors="replace")), text
    if isinstance(folder, str):
        yield from _folder_files(Path(folder))


def _folder_files(folder: Path) -> Iterator[tuple[str, int, str | None]]:
    for root, names, files in os.walk(folder):
        names.sort()
        for name in sorted(files):
            path = Path(root) / name
            try:
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    yield path.relative_to(folder).as_posix(), status.st_size, _text(path, status.st_size)
            except OSError:
                continue  # It was removed meanwhile.


def _text(path: Path, num_bytes: int) -> str | None:
    if num_bytes > 4 * MAX_CHARS:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
