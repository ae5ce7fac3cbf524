"""The journal of an episode: entries appended to one file, durable when `append` returns.

    magic                           8 bytes
    length, crc32, entry            for each entry: two little-endian uint32, then the bytes

`append` writes an entry to the operating system before it returns, so the entry survives a crash of the process; with
`sync="disk"` it is fsynced too. A failed write is undone: the file is truncated to its former size, and the error says
what to do. A process killed while writing leaves a torn tail, which `open` truncates. Damage anywhere else is refused
with its position in the file.
"""

import os
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, Self

from m2forge.errors import ExistsError, M2ForgeError, RecordError
from m2forge.gateway.entry import Entry, decode_entry, encode_entry

MAGIC = b"M2GWJ\x00\x01\n"
SUFFIX = ".journal"
_FRAME = struct.Struct("<II")
MAX_OPEN = 128
"""Maximum number of open files of all journals together."""
_MODE = 0o600
"""File mode: only the owner may read prompts and completions."""


class JournalError(M2ForgeError, OSError):
    """A journal cannot be written or read."""


class Journal:
    """Only the most recently written files stay open: there may be more episodes than a process may have open
    files."""

    def __init__(self, path: Path, size: int, sync: Literal["system", "disk"]) -> None:
        self.path = path
        self._size, self._sync = size, sync
        self._is_torn = False
        """Whether a failed write could not be undone."""

    @classmethod
    def create(cls, path: Path, *, sync: Literal["system", "disk"] = "system") -> Self:
        """Create an empty journal at `path`, which must not exist."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
        except FileExistsError:
            raise ExistsError(f"{path} exists; an episode has one journal") from None
        except OSError as error:
            raise _unwritable(path, error) from error
        journal = cls(path, 0, sync)
        try:
            journal._write(descriptor, MAGIC)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        if sync == "disk":
            sync_folder(path.parent)
        return journal

    @classmethod
    def open(cls, path: Path, *, sync: Literal["system", "disk"] = "system") -> tuple[Self, list[Entry]]:
        """Open the journal at `path` for appending and return its entries. Truncates a torn tail."""
        entries, size = read_entries(path)
        try:
            if size < path.stat().st_size or size == 0:
                os.truncate(path, size)
        except OSError as error:
            raise _unwritable(path, error) from error
        return cls(path, size, sync), entries

    def append(self, entry: Entry) -> None:
        """Return when the entry is written; if it raises, the journal is unchanged."""
        frame = _framed(entry)
        descriptor = self._open()
        try:
            self._check_end(descriptor)
            self._write(descriptor, frame if self._size else MAGIC + frame)
        except BaseException:
            self.release()
            raise

    def move(self, path: Path) -> None:
        """Rename the file to `path`, which must not exist."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.rename(path)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self.path = path

    def switch(self, path: Path) -> None:
        """Continue in another file with the same content."""
        self.release()
        self.path, self._size = path, path.stat().st_size

    def release(self) -> None:
        """Close the file until the next entry."""
        descriptor = _OPEN.pop(self, None)
        if descriptor is not None:
            os.close(descriptor)

    def delete(self) -> None:
        self.release()
        self.path.unlink(missing_ok=True)

    def _open(self) -> int:
        descriptor = _OPEN.get(self)
        if descriptor is not None:
            _OPEN.move_to_end(self)
            return descriptor
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        _OPEN[self] = descriptor
        while len(_OPEN) > MAX_OPEN:
            next(iter(_OPEN)).release()
        return descriptor

    def _check_end(self, descriptor: int) -> None:
        """Check that the file ends where this journal left it."""
        try:
            if self._is_torn:
                os.ftruncate(descriptor, self._size)
                self._is_torn = False
            found, ours = self.path.stat(), os.fstat(descriptor)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        if not os.path.samestat(found, ours) or found.st_size != self._size:
            raise JournalError(
                f"{self.path}: the journal cannot be written: another file of {found.st_size} bytes, expected ours of "
                f"{self._size}: is it another gateway's as well?"
            )

    def _write(self, descriptor: int, data: bytes) -> None:
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(descriptor, left) :]
            if self._sync == "disk":
                os.fsync(descriptor)
        except OSError as error:
            try:
                os.ftruncate(descriptor, self._size)
            except OSError:
                self._is_torn = True
            raise _unwritable(self.path, error) from error
        self._size += len(data)


_OPEN: OrderedDict[Journal, int] = OrderedDict()
"""Descriptors of open files, most recently written last."""


def write_entries(path: Path, entries: Iterable[Entry], sync: Literal["system", "disk"]) -> None:
    """Write a journal of these entries to `path`, which must not exist."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(MAGIC)
        file.writelines(map(_framed, entries))
        file.flush()
        if sync == "disk":
            os.fsync(descriptor)


def _framed(entry: Entry) -> bytes:
    data = encode_entry(entry)
    return _FRAME.pack(len(data), zlib.crc32(data)) + data


def read_entries(path: Path) -> tuple[list[Entry], int]:
    """Return the entries and their total size without a torn tail; does not change the file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JournalError(f"{path}: the journal cannot be read ({error.strerror})") from error
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            return [], 0
        raise RecordError(f"{path}: not a journal; it begins with {data[:8]!r}")
    entries, size = [], len(MAGIC)
    for frame, end in _frames(path, data):
        try:
            entries.append(decode_entry(frame))
        except RecordError as error:
            raise RecordError(f"{path}: byte {size}: {error}") from error
        size = end
    return entries, size


def _frames(path: Path, data: bytes) -> Iterator[tuple[bytes, int]]:
    at = len(MAGIC)
    while at + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, at)
        start = at + _FRAME.size
        frame = data[start : start + length]
        if len(frame) < length or not length or zlib.crc32(frame) != checksum:
            if start + length >= len(data) or not any(data[at:]):
                return
            raise RecordError(
                f"{path}: byte {at}: damaged, and entries follow; restore the file, or cut it there to go without them"
            )
        at = start + length
        yield frame, at


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(path: Path, error: OSError) -> JournalError:
    return JournalError(
        f"{path}: the journal cannot be written ({error.strerror}); nothing of the entry was kept: make room, or set "
        "gateway.journal to a folder that can be written"
    )
