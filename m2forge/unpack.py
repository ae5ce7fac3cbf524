"""Limits on the decompressed size of files, so that a small file fills neither memory nor disk.

A file may decompress to `max_ratio` times its own size, and to MIN_BYTES whatever its size. More raises an
`UnpackError` as soon as the bytes are counted; at most one block and one line are in memory then.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import Field

from m2forge.config import Config
from m2forge.errors import DataError

MIN_BYTES = 64 << 20
"""Any file may decompress to this much: a little text, repeated often, is compressed by a factor of hundreds."""
BLOCK_BYTES = 1 << 16
"""Small, because the block in which an archive breaks off is lost."""


class UnpackConfig(Config):
    max_ratio: float = Field(default=100.0, gt=0)
    """Maximum decompressed bytes per compressed byte. Text is compressed by a factor of 3 to 30."""
    max_line_bytes: int = Field(default=64 << 20, gt=0)
    """Maximum line length of a compressed JSONL file, in SFT also size of a table's row; longer ones are skipped and
    reported."""


class UnpackError(DataError):
    """A file that decompresses to more than its limit."""


class Unpacked:
    """Counts the decompressed bytes of one file."""

    def __init__(self, path: Path | str, config: UnpackConfig) -> None:
        size = Path(path).stat().st_size
        self.limit = max(MIN_BYTES, int(min(config.max_ratio * size, 2.0**62)))
        self._config, self._num_bytes = config, 0

    def add(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self.refuse(self._num_bytes)

    def refuse(self, num_bytes: int) -> None:
        """Raise if this many bytes, counted or stated by the file, exceed the limit."""
        if num_bytes > self.limit:
            raise UnpackError(
                f"it unpacks to {num_bytes} or more bytes; at most {self.limit} are allowed, "
                f"{self._config.max_ratio:g} times its size; raise unpack.max_ratio if the file is sound"
            )


def read_blocks(read: Callable[[int], bytes], unpacked: Unpacked) -> Iterator[bytes]:
    while block := read(BLOCK_BYTES):
        unpacked.add(len(block))
        yield block


def split_lines(blocks: Iterator[bytes], max_line_bytes: int) -> Iterator[bytes | None]:
    """Lines with their newlines; None in place of each that is too long."""
    begun: list[bytes] = []
    num_begun = 0
    for block in blocks:
        *whole, rest = block.split(b"\n")
        for piece in whole:
            num_bytes = num_begun + len(piece)
            yield None if num_bytes > max_line_bytes else b"".join((*begun, piece, b"\n"))
            begun, num_begun = [], 0
        num_begun += len(rest)
        if num_begun > max_line_bytes:
            begun = []  # counted to its end, but not stored
        elif rest:
            begun.append(rest)
    if num_begun:
        yield None if num_begun > max_line_bytes else b"".join(begun)
