"""Write files and folders atomically: a reader, or the next run, finds them complete or not at all.

`write_atomic` and `staged_folder` write next to the destination, on the same file system, and rename at the end. A
process killed in between leaves a hidden `.NAME.*.partial` sibling, never a partial destination.

Growing line files (metrics, evaluations, busy logs) are appended to with one write per line, including its newline. A
process or machine that crashes while writing leaves at most one incomplete last line: `open_lines` removes it before
anything is appended, and `whole_lines` skips it in reading.

`shared_token` is how machines find out whether a folder is on a file system that they share.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from m2forge.errors import ExistsError

_BLOCK = 1 << 16
_NUM_SYNCED = 16


def write_atomic(path: Path, content: bytes | str, *, mode: int = 0o666) -> None:
    """Replace `path` by `content` (text as UTF-8), synced to disk on return. Creates missing parent folders. `mode`:
    the file's permissions, before the umask."""
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(path)
    try:
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


@contextmanager
def staged_folder(dest: Path) -> Iterator[Path]:
    """Yield a folder to fill; on success it becomes `dest`, synced to disk, on failure it is removed.

    Raises before anything is written if `dest` exists and is not an empty folder.
    """
    _refuse_occupied(dest)
    dest.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(dest)
    partial.mkdir()
    try:
        yield partial
        _refuse_occupied(dest)
        commit_folder(partial, dest)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def commit_folder(partial: Path, dest: Path) -> None:
    """Sync the folder `partial` to disk and rename it `dest`, which is absent or empty."""
    # At once, because a file system's journal writes what many threads wait for together.
    with ThreadPoolExecutor(_NUM_SYNCED) as pool:
        list(pool.map(sync_path, [*partial.rglob("*"), partial]))
    partial.replace(dest)
    sync_path(dest.parent)


def open_lines(path: Path) -> int:
    """A descriptor for appending lines to `path`, created if missing; an incomplete last line is removed first. Only
    one process at a time may append."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        end = size = os.fstat(descriptor).st_size
        while end:
            start = max(0, end - _BLOCK)
            newline = os.pread(descriptor, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            os.ftruncate(descriptor, end)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_line(descriptor: int, line: str) -> None:
    """Append one line, given without its newline; it survives a crash of this process once this returns. If the write
    fails partway, the file is truncated to the start of the line, so the next line is not corrupted."""
    start = os.fstat(descriptor).st_size
    left = memoryview(line.encode() + b"\n")
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except BaseException:
        with suppress(OSError):
            os.ftruncate(descriptor, start)
        raise


def append_line(path: Path, line: str) -> None:
    """Append one line to a file, which is closed again."""
    descriptor = open_lines(path)
    try:
        write_line(descriptor, line)
    finally:
        os.close(descriptor)


def whole_lines(data: bytes) -> list[bytes]:
    """The lines of `data` that end with a newline."""
    return data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]


@contextmanager
def shared_token(folder: Path) -> Iterator[Path]:
    """A new file of the folder that exists for the duration of the context, by which others see whether their folder of
    that name is this one. The folder and its parents are created if missing, and then removed again."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".shared-{secrets.token_hex(8)}"
    try:
        path.touch()
        yield path
    finally:
        path.unlink(missing_ok=True)
        with suppress(OSError):  # another run writes there
            for made in missing:
                made.rmdir()


def sync_path(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _partial(path: Path) -> Path:
    path = path.absolute()
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def _refuse_occupied(dest: Path) -> None:
    if dest.is_dir() and not dest.is_symlink():
        if any(dest.iterdir()):
            raise ExistsError(f"{dest} exists and is not empty; choose another destination or remove it first")
    elif dest.exists() or dest.is_symlink():
        raise ExistsError(f"{dest} exists and is not a folder; choose another destination or remove it first")
