"""Write files and folders so that a reader, or the next run, finds them whole or not at all.

Both functions build beside the destination, on the same file system, and rename at the end. A process killed in
between leaves a hidden `.NAME.*.partial` sibling, never a torn destination.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from m2forge.errors import ExistsError


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace `path` by `content` (text as UTF-8), on disk when this returns. Missing parent folders are made."""
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(path)
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync(path.parent)


@contextmanager
def staged_folder(dest: Path) -> Iterator[Path]:
    """Yield a folder to fill; it becomes `dest`, synced to disk, on success and is removed on failure.

    A `dest` that exists and is not an empty folder is refused before anything is written.
    """
    _refuse_occupied(dest)
    dest.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(dest)
    partial.mkdir()
    try:
        yield partial
        _refuse_occupied(dest)
        for path in [*partial.rglob("*"), partial]:
            _sync(path)
        partial.replace(dest)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync(dest.parent)


def _partial(path: Path) -> Path:
    path = path.absolute()
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def _refuse_occupied(dest: Path) -> None:
    if dest.is_dir() and not dest.is_symlink():
        if any(dest.iterdir()):
            raise ExistsError(f"{dest} exists and is not empty; choose another destination or remove it first")
    elif dest.exists() or dest.is_symlink():
        raise ExistsError(f"{dest} exists and is not a folder; choose another destination or remove it first")


def _sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
