"""A small file as a parsed value, parsed again only if the file changes.

A list of a hundred runs reads some hundreds of files every few seconds; nearly all of them are the same as before.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


class CachedFile(Generic[T]):
    """Thread-safe. A missing file, or one that `parse` raises ValueError for, has the value `missing`."""

    def __init__(self, path: Path, parse: Callable[[bytes], T], missing: T) -> None:
        self._path, self._parse, self._missing = path, parse, missing
        self._lock = threading.Lock()
        self._version: tuple[int, int, int] | None = None
        self._value = missing

    def read(self) -> T:
        with self._lock:
            try:
                # The version is read before the content: if the file changes in between, the next call parses again.
                found = self._path.stat()
                version = (found.st_ino, found.st_size, found.st_mtime_ns)
                if version == self._version:
                    return self._value
                data = self._path.read_bytes()
            except OSError:
                self._version, self._value = None, self._missing
                return self._value
            try:
                value = self._parse(data)
            except (ValueError, RecursionError):
                value = self._missing
            self._version, self._value = version, value
            return value
