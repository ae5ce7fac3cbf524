"""Streams the bytes of a plain, .gz or .zst file: `read_all` and `read_lines`; `READ_ERRORS` lists what they raise.

A broken archive yields the lines before the break and then raises one of `READ_ERRORS`; one that decompresses to more
than the limit raises an `UnpackError` (unpack.py).
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path

from m2forge.errors import DataError
from m2forge.unpack import UnpackConfig, Unpacked, read_blocks, split_lines

READ_ERRORS = (OSError, EOFError, zlib.error)
COMPRESSED = (".gz", ".zst")


def read_lines(path: Path, config: UnpackConfig) -> Iterator[bytes | None]:
    """Yields None in place of a line that exceeds the limit."""
    with _open(path) as file:
        if path.suffix in COMPRESSED:
            yield from split_lines(read_blocks(file.read1, Unpacked(path, config)), config.max_line_bytes)
        else:
            yield from file


def read_all(path: Path, config: UnpackConfig) -> bytes:
    with _open(path) as file:
        return b"".join(read_blocks(file.read1, Unpacked(path, config))) if path.suffix in COMPRESSED else file.read()


def plain_suffix(path: Path) -> str:
    """The suffix that gives the content type: `.jsonl` for `a.jsonl.gz`."""
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix


def _open(path: Path) -> io.BufferedIOBase:
    match path.suffix:
        case ".gz":
            return gzip.GzipFile(path, "rb")
        case ".zst":
            return _open_zstd(path)
        case _:
            return path.open("rb")


def _open_zstd(path: Path) -> io.BufferedIOBase:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"{path}: reading .zst needs pyarrow; install m2forge[corpus] or unpack the file") from error
    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
