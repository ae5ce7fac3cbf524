"""Archives of unknown origin: a tar or zip in, its files out, unpacked in memory.

A link to a file of the archive is a copy of that file; other links and devices are left out. An archive that is damaged
or needs a password, or that unpacks to more than its limits (bytes of headers and of what is left out count too), ends
with one DataError.
"""

import bz2
import gzip
import io
import lzma
import posixpath
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from m2forge.errors import DataError

ZIP_HEAD, GZIP_HEAD, BZIP2_HEAD, XZ_HEADS = b"PK\x03\x04", b"\x1f\x8b", b"BZh", (b"\xfd7zXZ\0", b"\x5d\0\0")
_HEADER_BYTES = 2048
"""Header, long name and padding of a member of a tar."""
_DAMAGED = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError),
    *(NotImplementedError, RuntimeError),  # of a zip: another compression, a password
)


def is_archive(path: Path) -> bool:
    """Whether a file is one by its name or its first bytes, sound or not."""
    is_packed = _head(path).startswith((ZIP_HEAD, GZIP_HEAD, BZIP2_HEAD, *XZ_HEADS))
    return is_packed or path.suffix in (".zip", ".whl", ".tar") or tarfile.is_tarfile(path)


def members(path: Path, max_bytes: int, max_files: int) -> Iterator[tuple[str, bytes, bool]]:
    """Name, content and whether it is executable of each file."""
    try:
        is_zip = path.suffix in (".zip", ".whl") or _head(path).startswith(ZIP_HEAD)
        yield from (_zip_members if is_zip else _tar_members)(path, max_bytes, max_files)
    except DataError:
        raise
    except _DAMAGED as error:
        raise DataError(f"{path}: cannot be unpacked: {error}") from error


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(6)


def _too_large(path: Path, max_bytes: int, max_files: int) -> DataError:
    return DataError(f"{path}: unpacks to over {max_files} files or {max_bytes} bytes")


def _zip_members(path: Path, max_bytes: int, max_files: int) -> Iterator[tuple[str, bytes, bool]]:
    num_left = max_bytes
    with zipfile.ZipFile(path) as archive:
        if len(archive.infolist()) > max_files:
            raise _too_large(path, max_bytes, max_files)
        for info in archive.infolist():
            if not info.is_dir():
                with archive.open(info) as file:
                    content = file.read(num_left + 1)
                num_left -= len(content)
                if num_left < 0:
                    raise _too_large(path, max_bytes, max_files)
                yield info.filename, content, bool(info.external_attr >> 16 & 0o100)


def _tar_members(path: Path, max_bytes: int, max_files: int) -> Iterator[tuple[str, bytes, bool]]:
    too_large = _too_large(path, max_bytes, max_files)
    with (
        _unpacked(path) as file,
        tarfile.open(
            fileobj=(limited := _Limited(file, max_bytes + max_files * _HEADER_BYTES, too_large)), mode="r|"
        ) as tar,
    ):
        files: dict[str, tuple[bytes, bool]] = {}
        links: list[tuple[str, str]] = []
        for number, member in enumerate(tar, 1):
            if number > max_files:
                raise too_large
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
    if sum(len(content) for _, content, _ in copies) > max_bytes:
        raise too_large
    yield from copies


def _unpacked(path: Path) -> BinaryIO:
    head = _head(path)
    if head.startswith(GZIP_HEAD):
        return cast("BinaryIO", gzip.open(path))
    if head.startswith(BZIP2_HEAD):
        return cast("BinaryIO", bz2.open(path))
    if head.startswith(XZ_HEADS):
        return cast("BinaryIO", lzma.open(path))
    return path.open("rb")


class _Limited(io.RawIOBase):
    """The bytes of a tar, counted before tarfile keeps them: a header can be as large as a file."""

    def __init__(self, file: BinaryIO, max_bytes: int, too_large: DataError) -> None:
        self._file, self._num_left, self._too_large = file, max_bytes, too_large

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(min(size, self._num_left + 1) if size >= 0 else self._num_left + 1)
        self._num_left -= len(data)
        if self._num_left < 0:
            raise self._too_large
        return data
