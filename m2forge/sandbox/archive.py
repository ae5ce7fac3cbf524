"""A tree of files as a stream of entries, and entries as a tree of files below one folder.

    header (HEADER)   type, flags, mode, owner, time, size of content, of name, of link
    name, link        relative, without `..`; a symbolic link's target is any text
    content           of a file

c/pack.c is the other side. Entries come from sandboxes and from archives, so nothing in them is trusted: no name leaves
the folder, no link is followed, and what exceeds a limit raises before it is written.
"""

import os
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from m2forge.errors import DataError

HEADER = struct.Struct("<cBHIIIqQII")
IS_OPAQUE = 1
SAME_MODE = 0xFFFFFFFF
"""Mode of a file that keeps the mode of the one it replaces."""
BLOCK_BYTES = 1 << 18
MAX_NAME_BYTES = 1 << 15
OPAQUE_XATTR = "user.overlay.opaque"
"""Marks a folder that hides the folder of that name in the layers below."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class BrokenStreamError(DataError):
    """A stream without its end: the process that wrote it has failed."""


@dataclass(frozen=True, slots=True)
class Entry:
    type: str
    """d folder, f file, l symbolic link, h hard link to an earlier entry, w whiteout (hides the file below)."""
    name: bytes
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime_ns: int = -1
    size: int = 0
    link: bytes = b""
    is_opaque: bool = False

    def pack(self) -> bytes:
        flags = IS_OPAQUE if self.is_opaque else 0
        head = HEADER.pack(
            self.type.encode(), flags, 0, self.mode, self.uid, self.gid, self.mtime_ns, self.size, len(self.name),
            len(self.link),
        )  # fmt: skip
        return head + self.name + self.link


END = Entry("e", b"", mode=0).pack()


Write = Callable[[bytes], object]
_FirstNames = dict[tuple[int, int], bytes]
"""The name of each file that has several, by device and inode."""


def write_tree(source: Path, write: Write, id_base: int = 0) -> None:
    """Write the entries below a folder, or one file under its own name. Sockets, pipes and devices are left out.
    `id_base`: what was added to the owners' ids."""
    if not source.is_dir():
        _write_one(source, source.name.encode(errors="surrogateescape"), write, {}, id_base)
    else:
        _write_folder(source, b"", write, {}, id_base)
    write(END)


def _write_folder(folder: Path, prefix: bytes, write: Write, first: _FirstNames, id_base: int) -> None:
    for name in sorted(os.listdir(folder)):  # noqa: PTH208 (names, sorted so that a digest is reproducible)
        path = folder / name
        full = prefix + name.encode(errors="surrogateescape")
        _write_one(path, full, write, first, id_base)
        if path.is_dir() and not path.is_symlink():
            _write_folder(path, full + b"/", write, first, id_base)


def _write_one(path: Path, name: bytes, write: Write, first: _FirstNames, id_base: int) -> None:
    status = path.lstat()
    mode, mtime_ns = stat.S_IMODE(status.st_mode), status.st_mtime_ns
    owner = (max(0, status.st_uid - id_base), max(0, status.st_gid - id_base))
    if stat.S_ISLNK(status.st_mode):
        target = os.fsencode(os.readlink(path))  # noqa: PTH115 (a Path would normalise the text)
        write(Entry("l", name, mode, *owner, mtime_ns, link=target).pack())
    elif stat.S_ISDIR(status.st_mode):
        write(Entry("d", name, mode, *owner, mtime_ns, is_opaque=_is_opaque(path)).pack())
    elif stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
        write(Entry("w", name, mode).pack())
    elif stat.S_ISREG(status.st_mode):
        earlier = first.setdefault((status.st_dev, status.st_ino), name) if status.st_nlink > 1 else name
        if earlier != name:
            write(Entry("h", name, mode, link=earlier).pack())
            return
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            write(Entry("f", name, mode, *owner, mtime_ns, size).pack())
            while size:
                # A file that shrinks meanwhile is padded to the size in its header.
                block = file.read(min(size, BLOCK_BYTES)) or bytes(min(size, BLOCK_BYTES))
                write(block)
                size -= len(block)


def _is_opaque(path: Path) -> bool:
    try:
        return os.getxattr(path, OPAQUE_XATTR, follow_symlinks=False) == b"y"
    except OSError:
        return False


def read_entries(read: Callable[[int], bytes]) -> Iterator[tuple[Entry, Iterator[bytes]]]:
    """Each entry with its content, which must be used before the next is read."""
    while True:
        type, flags, _, mode, uid, gid, mtime_ns, size, name_size, link_size = HEADER.unpack(
            _exactly(read, HEADER.size)
        )
        if max(name_size, link_size) > MAX_NAME_BYTES:
            raise DataError(f"a name of {max(name_size, link_size)} bytes; at most {MAX_NAME_BYTES} are allowed")
        name, link = _exactly(read, name_size), _exactly(read, link_size)
        if type == b"e":
            return
        content = _content(read, size)
        yield (
            Entry(type.decode("latin-1"), name, mode, uid, gid, mtime_ns, size, link, bool(flags & IS_OPAQUE)),
            content,
        )
        for _ in content:
            pass


def _exactly(read: Callable[[int], bytes], size: int) -> bytes:
    parts = []
    while size:
        part = read(size)
        if not part:
            raise BrokenStreamError("the stream of files broke off")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _content(read: Callable[[int], bytes], size: int) -> Iterator[bytes]:
    while size:
        part = read(min(size, BLOCK_BYTES))
        if not part:
            raise BrokenStreamError("the stream of files broke off")
        size -= len(part)
        yield part


class TreeWriter:
    """Creates entries below a folder, as a context manager: at its end folders get their modes and times.

    As a layer of an image (`id_base` is set, 0 or more), entries have their owners, shifted by that number if this is
    root, and any symbolic link and whiteouts are data. Otherwise files belong to this process, a symbolic link that
    leads out of the folder is left out and listed in `left_out`, and whiteouts are an error.
    """

    def __init__(self, folder: Path, max_bytes: int, max_entries: int, id_base: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._max_bytes, self._max_entries, self._id_base = max_bytes, max_entries, id_base
        self._num_bytes = self._num_entries = 0
        self._folders: list[Entry] = []
        self._parent: tuple[bytes, int] = (b"", os.dup(self._top))
        self.left_out: list[bytes] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                for entry in reversed(self._folders):
                    self._finish_folder(entry)
        finally:
            os.close(self._parent[1])
            os.close(self._top)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def add(self, entry: Entry, content: Iterator[bytes]) -> None:
        self._num_bytes += entry.size
        self._num_entries += 1
        if self._num_bytes > self._max_bytes or self._num_entries > self._max_entries:
            raise DataError(
                f"more than {self._max_bytes} bytes or {self._max_entries} files; raise the limit if they are wanted"
            )
        folder, name = self._open_parent(entry.name)
        match entry.type:
            case "d":
                with suppress(FileExistsError):
                    self._replace_other(folder, name)
                    os.mkdir(name, 0o700, dir_fd=folder)
                self._folders.append(entry)
                if entry.is_opaque and self._id_base is not None:
                    self._mark_opaque(folder, name)
            case "f":
                self._remove(folder, name)
                self._write_file(folder, name, entry, content)
            case "l":
                self._add_link(folder, name, entry)
            case "h":
                source, source_name = self._open_parent(entry.link, is_cached=False)
                try:
                    folder, name = self._open_parent(entry.name)
                    self._remove(folder, name)
                    os.link(source_name, name, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
                finally:
                    os.close(source)
            case "w" if self._id_base is not None:
                self._remove(folder, name)
                os.mknod(name, stat.S_IFCHR, 0, dir_fd=folder)
            case _:
                raise DataError(f"an entry of unknown type {entry.type!r}")

    def _add_link(self, folder: int, name: bytes, entry: Entry) -> None:
        if self._id_base is None and not _stays_inside(entry.name, entry.link):
            self.left_out.append(entry.name)
            return
        self._remove(folder, name)
        os.symlink(entry.link, name, dir_fd=folder)
        self._own(folder, name, entry)
        if entry.mtime_ns >= 0:
            os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=folder, follow_symlinks=False)

    def _write_file(self, folder: int, name: bytes, entry: Entry, content: Iterator[bytes]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "wb", buffering=0) as file:
            for block in content:
                written = 0
                while written < len(block):
                    written += file.write(block[written:])
            self._own(folder, name, entry)
            # Not the bits that run a program as its owner: no sandbox honours them.
            os.fchmod(file.fileno(), entry.mode & 0o777)
            if entry.mtime_ns >= 0:
                os.utime(file.fileno(), ns=(entry.mtime_ns, entry.mtime_ns))

    def _own(self, folder: int, name: bytes, entry: Entry) -> None:
        if self._id_base is not None and os.geteuid() == 0:
            ids = (self._id_base + min(entry.uid, 65534), self._id_base + min(entry.gid, 65534))
            os.chown(name, *ids, dir_fd=folder, follow_symlinks=False)

    def _finish_folder(self, entry: Entry) -> None:
        try:
            parent, name = self._open_parent(entry.name, is_cached=False)
        except OSError:
            return  # A later entry replaced it.
        try:
            with suppress(NotADirectoryError, FileNotFoundError):
                folder = os.open(name, _FOLDER, dir_fd=parent)
                try:
                    self._own(parent, name, entry)
                    os.fchmod(folder, (entry.mode & 0o1777) | (0 if self._id_base is not None else 0o700))
                    if entry.mtime_ns >= 0:
                        os.utime(folder, ns=(entry.mtime_ns, entry.mtime_ns))
                finally:
                    os.close(folder)
        finally:
            os.close(parent)

    def _mark_opaque(self, parent: int, name: bytes) -> None:
        folder = os.open(name, _FOLDER, dir_fd=parent)
        try:
            os.setxattr(folder, OPAQUE_XATTR, b"y")
        finally:
            os.close(folder)

    def _open_parent(self, name: bytes, *, is_cached: bool = True) -> tuple[int, bytes]:
        """The folder of an entry, whose missing parents are created, and the entry's name in it. A folder that is not
        cached must be closed."""
        parts = name.split(b"/")
        if any(part in (b"", b".", b"..") for part in parts) or b"\0" in name:
            raise DataError(f"expected a relative name without '..', received {name[:200]!r}")
        prefix = b"/".join(parts[:-1])
        if is_cached and self._parent[0] == prefix:
            return self._parent[1], parts[-1]
        folder = os.dup(self._top)
        try:
            for part in parts[:-1]:
                with suppress(FileExistsError):
                    self._replace_other(folder, part)
                    os.mkdir(part, 0o755, dir_fd=folder)
                below = os.open(part, _FOLDER, dir_fd=folder)
                os.close(folder)
                folder = below
        except BaseException:
            os.close(folder)
            raise
        if is_cached:
            os.close(self._parent[1])
            self._parent = (prefix, folder)
        return folder, parts[-1]

    def _replace_other(self, folder: int, name: bytes) -> None:
        """Remove what has the name of a folder and is none; a symbolic link is none."""
        with suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=folder)

    def _remove(self, folder: int, name: bytes) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


def _stays_inside(name: bytes, link: bytes) -> bool:
    """Whether a symbolic link's target lies below the top, even if its path goes through other links. The link's own
    folder is no link, so leading `..` climb real folders; after a name, which may be a link, `..` can lead anywhere."""
    parts = [part for part in link.split(b"/") if part not in (b"", b".")]
    num_up = next((place for place, part in enumerate(parts) if part != b".."), len(parts))
    return not link.startswith(b"/") and num_up <= name.count(b"/") and b".." not in parts[num_up:]


def unpack_stream(read: Callable[[int], bytes], writer: TreeWriter) -> None:
    for entry, content in read_entries(read):
        writer.add(entry, content)
