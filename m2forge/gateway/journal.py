"""The journal of an episode: entries appended to one file, there for good when `append` returns.

    magic                           8 bytes
    length, crc32, entry            for each entry: two little-endian uint32, then the bytes

An entry is handed to the operating system in one write before `append` returns, so it outlives the process; with
`sync="disk"` it is on the disk as well. A write that fails is taken back: the file is cut to what it was, and the error
says what to do. A process that was killed while it wrote leaves a torn tail, which `open` cuts off. Damage anywhere
else is no torn tail: it is refused with its place in the file.
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
"""Files that stay open at once, of all journals together."""
_MODE = 0o600
"""Prompts and completions are nobody else's business."""


class JournalError(M2ForgeError, OSError):
    """A journal that cannot be written."""


class Journal:
    """Files stay open while they are among those that were written last: there may be more episodes than a process may
    hold files open."""

    def __init__(self, path: Path, size: int, sync: Literal["system", "disk"]) -> None:
        self.path = path
        self._size, self._sync = size, sync
        self._is_torn = False
        """Whether a write failed that could not be taken back."""

    @classmethod
    def create(cls, path: Path, *, sync: Literal["system", "disk"] = "system") -> Self:
        """An empty journal at `path`, where nothing may be yet."""
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
        """The journal at `path`, ready to go on, and what it holds. A torn tail is cut off."""
        entries, size = read_entries(path)
        try:
            if size < path.stat().st_size or size == 0:
                os.truncate(path, size)
        except OSError as error:
            raise _unwritable(path, error) from error
        return cls(path, size, sync), entries

    def append(self, entry: Entry) -> None:
        """Returns when the entry is written; if it raises, the journal is as before."""
        frame = _framed(entry)
        descriptor = self._open()
        try:
            self._check_end(descriptor)
            self._write(descriptor, frame if self._size else MAGIC + frame)
        except BaseException:
            self.release()
            raise

    def move(self, path: Path) -> None:
        """Rename the file; nothing may be there yet."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.rename(path)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self.path = path

    def switch(self, path: Path) -> None:
        """Go on in another file, which holds what this one does."""
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
        """The file must end where this journal left it."""
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
"""Descriptors of open files, those that were written last at the end."""


def write_entries(path: Path, entries: Iterable[Entry], sync: Literal["system", "disk"]) -> None:
    """A journal of these entries, where nothing may be yet."""
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
    """The entries of a journal and the size of what they take, without a torn tail; the file is not changed."""
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
