"""Bytes of a plain, .gz or .zst file, read as a stream: `open_archive` opens, `READ_ERRORS` is what may break.

A broken archive gives the bytes before the break and then raises one of `READ_ERRORS`.
"""

import gzip
import io
import zlib
from pathlib import Path
from typing import BinaryIO, cast

from m2forge.errors import DataError

READ_ERRORS = (OSError, EOFError, zlib.error)
COMPRESSED = (".gz", ".zst")


def open_archive(path: Path) -> BinaryIO:
    match path.suffix:
        case ".gz":
            return cast(BinaryIO, gzip.open(path, "rb"))
        case ".zst":
            return _open_zstd(path)
        case _:
            return path.open("rb")


def plain_suffix(path: Path) -> str:
    """The suffix that says what the content is: `.jsonl` of `a.jsonl.gz`."""
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix


def _open_zstd(path: Path) -> BinaryIO:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"{path}: reading .zst needs pyarrow; install m2forge[corpus] or unpack the file") from error
    return cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd")))
