"""Source archives: an sdist or another archive in, its files by path out. Nothing is written to disk.

A link to a file of the archive is a copy of that file. Other links, devices, and paths that lead outside or into `.git`
are left out. An archive that is damaged, that unpacks to
more than its limits (bytes of headers and of what is left out count too), or whose names no file system can hold is
refused with one message.
"""

import bz2
import gzip
import io
import lzma
import posixpath
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from m2forge.errors import DataError
from m2forge.tasks.folders.folder import FileKind, FolderFile

MAX_TREE_BYTES = 128 << 20
MAX_TREE_FILES = 20_000
MAX_NAME, MAX_PATH = 255, 2000
"""Bytes of a part of a path, and of a path."""
_HEADER_BYTES = 2048
"""Header, long name and padding of a member of a tar."""
_DAMAGED = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError),
    *(NotImplementedError, RuntimeError),  # of a zip: another compression, a password
)


def read_files(path: Path) -> dict[str, FolderFile]:
    """The files of an archive, without its one top folder."""
    files: dict[str, FolderFile] = {}
    try:
        for name, content, is_executable in _zip_members(path) if path.suffix == ".zip" else _tar_members(path):
            parts = [part for part in name.split("/") if part not in ("", ".")][1:]
            if parts and ".." not in parts and ".git" not in parts:
                kind = FileKind.EXECUTABLE if is_executable else FileKind.FILE
                files["/".join(parts)] = FolderFile(content, kind)
    except DataError:
        raise
    except _DAMAGED as error:
        raise DataError(f"{path}: cannot be unpacked: {error}") from error
    if not files:
        raise DataError(f"{path}: holds no file in a top folder; expected a source archive")
    check_paths(path, files)
    return files


def check_paths(origin: Path, paths: Iterable[str]) -> None:
    """Raises unless a folder can hold files of these paths, and all of them lie inside of it."""
    known = set(paths)
    for path in known:
        try:
            encoded = path.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{origin}: the name {path!r} is not UTF-8") from error
        if len(encoded) > MAX_PATH or any(len(part) > MAX_NAME for part in encoded.split(b"/")):
            raise DataError(f"{origin}: the name {path[:100]!r}… is too long")
        if not path.isprintable() or '"' in path:
            raise DataError(f"{origin}: the name {path!r} holds a quote or a control character")
        parts = path.split("/")
        if any(part in ("", ".", "..", ".git") for part in parts):
            raise DataError(f"{origin}: the name {path!r} leads outside of the tree, or into a repository")
        for num in range(1, len(parts)):
            if (folder := "/".join(parts[:num])) in known:
                raise DataError(f"{origin}: {folder!r} is a file and a folder")


def _too_large(path: Path) -> DataError:
    return DataError(f"{path}: unpacks to over {MAX_TREE_FILES} files or {MAX_TREE_BYTES} bytes")


def _zip_members(path: Path) -> Iterator[tuple[str, bytes, bool]]:
    num_left = MAX_TREE_BYTES
    with zipfile.ZipFile(path) as archive:
        if len(archive.infolist()) > MAX_TREE_FILES:
            raise _too_large(path)
        for info in archive.infolist():
            if not info.is_dir():
                with archive.open(info) as file:
                    content = file.read(num_left + 1)
                num_left -= len(content)
                if num_left < 0:
                    raise _too_large(path)
                yield info.filename, content, bool(info.external_attr >> 16 & 0o100)


def _tar_members(path: Path) -> Iterator[tuple[str, bytes, bool]]:
    with _unpacked(path) as file, tarfile.open(fileobj=(limited := _Limited(file, path)), mode="r|") as tar:
        files: dict[str, tuple[bytes, bool]] = {}
        links: list[tuple[str, str]] = []
        for number, member in enumerate(tar, 1):
            if number > MAX_TREE_FILES:
                raise _too_large(path)
            name = posixpath.normpath(member.name)
            if member.issym() and not member.linkname.startswith("/"):
                links.append((name, posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))))
            elif member.isfile() and (opened := tar.extractfile(member)) is not None:
                files[name] = opened.read(), bool(member.mode & 0o100)
                yield member.name, *files[name]
        # The checksum stands at the end.
        while limited.read(1 << 16):
            pass
    copies = [(name, *files[target]) for name, target in links if target in files]
    if sum(len(content) for _, content, _ in copies) > MAX_TREE_BYTES:
        raise _too_large(path)
    yield from copies


def _unpacked(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        head = file.read(6)
    if head.startswith(b"\x1f\x8b"):
        return cast("BinaryIO", gzip.open(path))
    if head.startswith(b"BZh"):
        return cast("BinaryIO", bz2.open(path))
    if head.startswith((b"\xfd7zXZ\0", b"\x5d\0\0")):
        return cast("BinaryIO", lzma.open(path))
    return path.open("rb")


class _Limited(io.RawIOBase):
    """The bytes of a tar, counted before tarfile keeps them: a header can be as large as a file."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._num_left = MAX_TREE_BYTES + MAX_TREE_FILES * _HEADER_BYTES

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(min(size, self._num_left + 1) if size >= 0 else self._num_left + 1)
        self._num_left -= len(data)
        if self._num_left < 0:
            raise _too_large(self._path)
        return data
