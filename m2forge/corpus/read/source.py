"""Lists the input: sources of a configuration in, parts of about equal size out, in a fixed order.

A part is a list of file spans: whole files, byte ranges of large plain JSONL files, row groups of large Parquet files.
Parts are generated lazily, so that neither all files nor all parts are in memory at once.
"""

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from m2forge.corpus.config import Source, SourceKind
from m2forge.corpus.read.extra import parquet
from m2forge.errors import ConfigError, NotFoundError, suggest

_CODE = """.c .cc .cl .clj .coffee .cpp .cs .cu .cuh .cxx .dart .ex .exs .f .f90 .go .h .hh .hpp .hs .java .jl .js .jsx
.kt .lua .m .ml .mjs .mm .php .pl .ps1 .py .pyi .pyx .r .rb .rs .s .scala .sh .sql .swift .ts .tsx .v .vhd .vue .zig"""
CODE_SUFFIXES = frozenset(_CODE.split())
TEXT_SUFFIXES = frozenset((".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".html", ".htm"))
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".json.gz", ".jsonl.zst", ".ndjson.zst", ".json.zst")
SKIPPED_FOLDERS = frozenset(("__pycache__", "node_modules"))


@dataclass(frozen=True, slots=True)
class FileSpan:
    path: str
    kind: SourceKind
    name: str
    """Path relative to the source's folder."""
    begin: int
    end: int
    """Byte offsets of a JSONL file, row groups of a Parquet file; an end of -1 means the end of the file."""
    size: int
    modified_ns: int
    """Size and mtime of the file, by which a resumed build knows that it has not changed."""


@dataclass(frozen=True, slots=True)
class Part:
    source: int
    """Index of the source."""
    spans: tuple[FileSpan, ...]
    num_bytes: int


def list_parts(sources: Sequence[Source], part_bytes: int) -> Iterator[Part]:
    """The parts of all sources. Raises if a source matches no file."""
    for index, source in enumerate(sources):
        spans: list[FileSpan] = []
        filled, found = 0, False
        for span, num_bytes in _spans(source, part_bytes):
            found = True
            if spans and filled + num_bytes > part_bytes:
                yield Part(index, tuple(spans), filled)
                spans, filled = [], 0
            spans.append(span)
            filled += num_bytes
        if not found:
            kinds = " ".join(source.suffixes) or (source.kind.value if source.kind else "known kind")
            raise NotFoundError(f"source {source.path!r}: no file of {kinds}; give a file, a folder or a pattern")
        yield Part(index, tuple(spans), filled)


def kind_of(path: str) -> SourceKind | None:
    """The format implied by a file's suffix; None if unknown."""
    name = path.lower()
    if name.endswith(JSONL_SUFFIXES):
        return SourceKind.JSONL
    suffix = name[name.rfind(".") :] if "." in name else ""
    match suffix:
        case ".parquet":
            return SourceKind.PARQUET
        case ".pdf":
            return SourceKind.PDF
    return SourceKind.FOLDER if suffix in CODE_SUFFIXES or suffix in TEXT_SUFFIXES else None


def _spans(source: Source, part_bytes: int) -> Iterator[tuple[FileSpan, int]]:
    """Every span of a source with its approximate size in bytes."""
    for path, name in _files(source):
        kind = kind_of(path)
        if source.kind is not None and (kind is source.kind or not _walks(source)):
            kind = source.kind
        if kind is None or (source.kind is not None and kind is not source.kind):
            continue
        if source.suffixes and not path.endswith(source.suffixes):
            continue
        size, modified_ns = _size_and_time(path)
        for begin, end, num_bytes in _ranges(path, kind, size, part_bytes):
            yield FileSpan(path, kind, name, begin, end, size, modified_ns), num_bytes


def _size_and_time(path: str) -> tuple[int, int]:
    try:
        status = Path(path).stat()
    except OSError:
        return 0, 0  # a dangling link, for example: reading it will report the problem
    return status.st_size, status.st_mtime_ns


def _ranges(path: str, kind: SourceKind, size: int, part_bytes: int) -> Iterator[tuple[int, int, int]]:
    """How a file is split: begin, end and bytes of each span."""
    if size > part_bytes and kind is SourceKind.JSONL and not path.endswith((".gz", ".zst")):
        for begin in range(0, size, part_bytes):
            yield begin, min(begin + part_bytes, size), min(part_bytes, size - begin)
    elif size > part_bytes and kind is SourceKind.PARQUET:
        yield from _row_group_ranges(path, size, part_bytes)
    else:
        yield 0, -1, size


def _row_group_ranges(path: str, size: int, part_bytes: int) -> Iterator[tuple[int, int, int]]:
    library = parquet()
    try:
        with library.ParquetFile(path) as file:
            num_groups = file.metadata.num_row_groups
    except library.errors:
        num_groups = 1  # reading it will report the problem
    step = max(1, num_groups * part_bytes // size)
    for begin in range(0, max(1, num_groups), step):
        end = min(begin + step, num_groups)
        yield begin, end, size * (end - begin) // max(1, num_groups)


def _walks(source: Source) -> bool:
    """Whether the source is a folder or pattern, rather than one file."""
    return glob.has_magic(source.path) or Path(source.path).is_dir()


def _files(source: Source) -> Iterator[tuple[str, str]]:
    """Path and name of every file, in name order."""
    path = source.path
    if glob.has_magic(path):
        root = "/".join(takewhile(lambda part: not glob.has_magic(part), path.split("/")[:-1]))
        matches = glob.glob(path, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        for match in sorted(matches, key=_order):
            if Path(match).is_dir():
                continue
            yield match, match.removeprefix(root).lstrip("/")
    elif Path(path).is_dir():
        yield from _walk(path, "", source.exclude)
    elif Path(path).is_file():
        if source.kind is None and kind_of(path) is None:
            known = [kind.value for kind in SourceKind]
            raise ConfigError(
                f"source {path!r}: its suffix does not determine the kind; set kind, {suggest('', known)}"
            )
        yield path, Path(path).name
    else:
        raise NotFoundError(f"source {path!r}: no such file or folder; relative paths count from the working directory")


def _order(path: str) -> list[tuple[bool, str]]:
    """A sort key that gives the order of `_walk`."""
    *folders, name = path.split("/")
    return [*((True, folder) for folder in folders), (False, name)]


def _walk(folder: str, name: str, exclude: Sequence[str]) -> Iterator[tuple[str, str]]:
    """A folder's own files before those of its subfolders, so that each folder's files are contiguous."""
    with os.scandir(folder) as entries:
        names = sorted((entry.is_dir(follow_symlinks=False), entry.name) for entry in entries)
    for is_folder, entry in names:
        if entry.startswith("."):
            continue
        path, below = f"{folder}/{entry}", f"{name}/{entry}" if name else entry
        if not is_folder:
            yield path, below
        elif entry not in SKIPPED_FOLDERS and entry not in exclude:
            yield from _walk(path, below, exclude)
