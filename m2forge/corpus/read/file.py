"""Reads the documents of a file span in order. What cannot be read is reported with file and line, and skipped.

Compressed files are read in blocks within the limits of `Source.unpack`: a decompression bomb costs no more memory than
an ordinary file.

Page sizes of Parquet column chunks are checked first, from the page headers, without decompressing: the library
allocates the size in a page's header before it decompresses the page, and the file's footer, which it does check, need
not agree with it. A header is a Thrift struct in the compact protocol,

    PageHeader { 1: i32 type, 2: i32 uncompressed_page_size, 3: i32 compressed_page_size, … }

followed by the page's bytes. Anything else is a ValueError.
"""

import gzip
import json
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from m2forge.corpus.config import Source, SourceKind
from m2forge.corpus.read.document import Document, ProblemKind, Problems
from m2forge.corpus.read.extra import Parquet, parquet, pdf, zstd
from m2forge.corpus.read.source import FileSpan
from m2forge.unpack import UnpackConfig, Unpacked, UnpackError, read_blocks, split_lines

if TYPE_CHECKING:
    from pyarrow import Array
    from pyarrow.parquet import ParquetFile, RowGroupMetaData


_UNCOMPRESSED, _COMPRESSED = 2, 3
_STOP, _BYTE, _VARINTS, _DOUBLE, _BINARY, _LISTS, _MAP, _STRUCT = 0, 3, (4, 5, 6), 7, 8, (9, 10), 11, 12
_BOOLEANS = (1, 2)
_MAX_DEPTH = 8


def checked_page_sizes(
    path: Path, group: "RowGroupMetaData", columns: Collection[str], unpacked: Unpacked
) -> list[int]:
    """Uncompressed size of each page of these columns in a row group, nested fields included. Raises `UnpackError` if
    they exceed the limit, OSError if they cannot be read."""
    all_chunks = [group.column(index) for index in range(group.num_columns)]
    chunks = [
        chunk
        for chunk in all_chunks
        if any(chunk.path_in_schema == name or chunk.path_in_schema.startswith(f"{name}.") for name in columns)
    ]
    unpacked.refuse(sum(chunk.total_uncompressed_size for chunk in chunks))
    sizes: list[int] = []
    try:
        with path.open("rb") as file:
            for chunk in chunks:
                offsets = [chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset]
                sizes += page_sizes(file, min(offsets), chunk.total_compressed_size)
    except ValueError as error:
        raise OSError(str(error)) from error
    unpacked.refuse(sum(sizes))
    return sizes


def page_sizes(file: BinaryIO, begin: int, num_bytes: int) -> list[int]:
    """Uncompressed size of each page, in a chunk of `num_bytes` starting at `begin`."""
    sizes, at = [], begin
    while at < begin + num_bytes:
        file.seek(at)
        fields = _Reader(file).numbers()
        uncompressed, compressed = fields.get(_UNCOMPRESSED, -1), fields.get(_COMPRESSED, -1)
        if uncompressed < 0 or compressed < 0:
            raise ValueError(f"no page begins at byte {at}")
        sizes.append(uncompressed)
        at = file.tell() + compressed
    return sizes


class _Reader:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def numbers(self, depth: int = 0) -> dict[int, int]:
        """The integer fields of the struct that starts here, by field id; other fields are skipped."""
        found: dict[int, int] = {}
        field = 0
        while (head := self._byte()) != _STOP:
            kind = head & 15
            field = field + (head >> 4) if head >> 4 else self._zigzag()
            if kind in _VARINTS:
                found[field] = self._zigzag()
            elif kind not in _BOOLEANS:
                self._pass_over(kind, depth)
        return found

    def _pass_over(self, kind: int, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise ValueError("a page's header is nested too deep")
        if kind in (*_BOOLEANS, _BYTE):
            self._byte()  # a boolean inside a list takes one byte
        elif kind in _VARINTS:
            self._varint()
        elif kind == _DOUBLE:
            self._file.seek(8, 1)
        elif kind == _BINARY:
            self._file.seek(self._varint(), 1)
        elif kind in _LISTS:
            head = self._byte()
            for _ in range(head >> 4 if head >> 4 < 15 else self._varint()):
                self._pass_over(head & 15, depth + 1)
        elif kind == _MAP:
            if num_items := self._varint():
                kinds = self._byte()
                for _ in range(num_items):
                    self._pass_over(kinds >> 4, depth + 1)
                    self._pass_over(kinds & 15, depth + 1)
        elif kind == _STRUCT:
            self.numbers(depth + 1)
        else:
            raise ValueError(f"a page's header has a field of the unknown type {kind}")

    def _byte(self) -> int:
        byte = self._file.read(1)
        if not byte:
            raise ValueError("a page's header breaks off")
        return byte[0]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 64, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a page's header has a number of more than 64 bits")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)


_BLOCK_BYTES = 1 << 20
_BATCH_ROWS, _BATCH_BYTES = 64, 64 << 20
_ROW_BYTES = 64
"""Minimum size that a row counts for: millions of empty rows take only a few bytes in a Parquet file."""


def read_span(span: FileSpan, source: Source, problems: Problems) -> Iterator[Document]:
    try:
        match span.kind:
            case SourceKind.FOLDER:
                yield from _read_file(span, problems)
            case SourceKind.JSONL:
                yield from _read_jsonl(span, source, problems)
            case SourceKind.PARQUET:
                yield from _read_parquet(span, source, problems)
            case SourceKind.PDF:
                yield from _read_pdf(span, source, problems)
    except UnpackError as error:
        problems.add(ProblemKind.TOO_LARGE, span.path, str(error))
    except OSError as error:
        problems.add(ProblemKind.UNREADABLE, span.path, f"cannot be read: {error.strerror or error}")
    except UnicodeEncodeError as error:
        problems.add(ProblemKind.UNREADABLE, span.path, f"the library takes no name that is not UTF-8: {error.reason}")


def _read_file(span: FileSpan, problems: Problems) -> Iterator[Document]:
    data = Path(span.path).read_bytes()
    try:
        data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problems.add(ProblemKind.NOT_UTF8, f"{span.path}:{line}", f"not UTF-8: {error.reason} at byte {error.start}")
        return
    yield Document(data, span.name)


def _read_jsonl(span: FileSpan, source: Source, problems: Problems) -> Iterator[Document]:
    location, key = _Location(span), source.text_key
    for line in _lines(span, source.unpack, location, problems):
        location.line += 1
        if line.isspace():
            continue
        try:
            record = json.loads(line)
        except UnicodeDecodeError as error:
            problems.add(ProblemKind.NOT_UTF8, location.text(), f"not UTF-8: {error.reason} at byte {error.start}")
            continue
        except (ValueError, RecursionError) as error:
            problems.add(ProblemKind.NOT_JSON, location.text(), f"not JSON: {error}")
            continue
        if not isinstance(record, dict):
            problems.add(ProblemKind.NOT_OBJECT, location.text(), f"a JSON {type(record).__name__}, not an object")
        elif key not in record:
            found = ", ".join(map(repr, list(record)[:8]))
            problems.add(ProblemKind.MISSING_KEY, location.text(), f"no key {key!r} among {found or 'none'}")
        elif not isinstance(record[key], str):
            problems.add(ProblemKind.NOT_TEXT, location.text(), f"{key!r} is a {type(record[key]).__name__}, not text")
        else:
            try:
                yield Document(record[key].encode(), "")
            except UnicodeEncodeError as error:
                problems.add(
                    ProblemKind.NOT_UTF8, location.text(), f"{key!r} has half a surrogate pair: {error.reason}"
                )


class _Location:
    """File and line for messages. Lines before a span in the middle of a file are counted on first use."""

    def __init__(self, span: FileSpan) -> None:
        self.line = 0
        self._span = span
        self._before: int | None = None if span.begin else 0

    def text(self, line: int | None = None) -> str:
        if self._before is None:
            self._before = _newlines_before(self._span.path, self._span.begin)
        return f"{self._span.path}:{self._before + (self.line if line is None else line)}"


def _newlines_before(path: str, end: int) -> int:
    """Newlines that end a line starting before `end`."""
    count, location = 0, 0
    with Path(path).open("rb") as file:
        while location < end - 1:
            block = file.read(min(_BLOCK_BYTES, end - 1 - location))
            count += block.count(b"\n")
            location += len(block)
    return count + 1


def _lines(span: FileSpan, config: UnpackConfig, location: _Location, problems: Problems) -> Iterator[bytes]:
    if span.path.endswith(".gz"):
        with gzip.open(span.path, "rb") as file:
            lines = split_lines(read_blocks(file.read1, Unpacked(span.path, config)), config.max_line_bytes)
            yield from _archive_lines(lines, location, problems, (EOFError, gzip.BadGzipFile, zlib.error))
    elif span.path.endswith(".zst"):
        with zstd().open(span.path) as stream:
            lines = split_lines(read_blocks(stream.read, Unpacked(span.path, config)), config.max_line_bytes)
            yield from _archive_lines(lines, location, problems, (OSError,))
    else:
        with Path(span.path).open("rb", buffering=_BLOCK_BYTES) as plain:
            yield from _plain_lines(plain, span)


def _plain_lines(file: BinaryIO, span: FileSpan) -> Iterator[bytes]:
    """Lines that start inside the span."""
    location = span.begin
    if location:
        file.seek(location - 1)
        location += len(file.readline()) - 1
    for line in file:
        if 0 <= span.end <= location:
            return
        location += len(line)
        yield line


def _archive_lines(
    lines: Iterator[bytes | None], location: _Location, problems: Problems, errors: tuple[type[Exception], ...]
) -> Iterator[bytes]:
    """Lines of an archive; if it is broken or decompresses to too much, the lines before that."""
    while True:
        try:
            line = next(lines, b"")
        except UnpackError as error:
            problems.add(ProblemKind.TOO_LARGE, location.text(location.line + 1), str(error))
            return
        except errors as error:
            ends_early = isinstance(error, EOFError) or "runcated" in str(error)
            kind = ProblemKind.TRUNCATED if ends_early else ProblemKind.UNREADABLE
            problems.add(kind, location.text(location.line + 1), f"the archive breaks off here: {error}")
            return
        if line is None:
            location.line += 1
            detail = "the line is longer than it may be in an archive; raise unpack.max_line_bytes if it is sound"
            problems.add(ProblemKind.TOO_LARGE, location.text(), detail)
        elif line:
            yield line
        else:
            return


def _read_parquet(span: FileSpan, source: Source, problems: Problems) -> Iterator[Document]:
    library, key = parquet(), source.text_key
    try:
        file = library.ParquetFile(span.path)
    except library.errors as error:
        problems.add(ProblemKind.UNREADABLE, span.path, f"not a whole Parquet file: {_first_line(error)}")
        return
    with file:
        names = list(file.schema_arrow.names)
        if key not in names:
            problems.add(ProblemKind.MISSING_KEY, span.path, f"no column {key!r} among {', '.join(names[:8])}")
            return
        if (kind := file.schema_arrow.field(key).type).num_fields:
            problems.add(ProblemKind.NOT_TEXT, span.path, f"the column {key!r} is a {kind}, not text")
            return
        unpacked = Unpacked(span.path, source.unpack)
        num_groups = file.metadata.num_row_groups
        row = sum(file.metadata.row_group(group).num_rows for group in range(span.begin))
        for group in range(span.begin, num_groups if span.end < 0 else min(span.end, num_groups)):
            yield from _read_group(library, file, span, group, row, key, unpacked, problems)
            row += file.metadata.row_group(group).num_rows


def _read_group(
    library: Parquet,
    file: "ParquetFile",
    span: FileSpan,
    group: int,
    first_row: int,
    key: str,
    unpacked: Unpacked,
    problems: Problems,
) -> Iterator[Document]:
    """Read one row group. A group that is too large is skipped before the library allocates anything for it."""
    row, num_rows = first_row, file.metadata.row_group(group).num_rows
    try:
        batch_rows = _find_batch_rows(file, span, group, key, unpacked)
        for batch in file.iter_batches(batch_rows, row_groups=[group], columns=[key]):
            for document in _read_column(batch.column(0), f"{span.path}:row ", row, key, problems):
                unpacked.add(len(document.text))
                yield document
            row += batch.num_rows
            unpacked.add(_ROW_BYTES * batch.num_rows)
    except UnpackError as error:
        detail = f"row group {group} is left out from here, {first_row + num_rows - row} rows: {error}"
        problems.add(ProblemKind.TOO_LARGE, f"{span.path}:row {row + 1}", detail)
    except library.errors as error:
        left = first_row + num_rows - row
        detail = f"row group {group} breaks off here, {left} rows left out: {_first_line(error)}"
        problems.add(ProblemKind.UNREADABLE, f"{span.path}:row {row + 1}", detail)


def _find_batch_rows(file: "ParquetFile", span: FileSpan, group: int, key: str, unpacked: Unpacked) -> int:
    """Batch size in rows such that a batch takes at most `_BATCH_BYTES`, or one row: no value is larger than its page,
    and one dictionary page may hold the values of all rows."""
    sizes = checked_page_sizes(Path(span.path), file.metadata.row_group(group), (key,), unpacked)
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, *sizes)))


def _read_column(column: "Array", location: str, first: int, key: str, problems: Problems) -> Iterator[Document]:
    for row, scalar in enumerate(column, first + 1):
        try:
            value = scalar.as_py()
        except UnicodeDecodeError as error:
            detail = f"{key!r} is not UTF-8: {error.reason} at byte {error.start}"
            problems.add(ProblemKind.NOT_UTF8, f"{location}{row}", detail)
            continue
        if isinstance(value, str):
            yield Document(value.encode(), "")
        elif value is None:
            problems.add(ProblemKind.MISSING_KEY, f"{location}{row}", f"{key!r} is empty")
        else:
            problems.add(ProblemKind.NOT_TEXT, f"{location}{row}", f"{key!r} is a {type(value).__name__}, not text")


def _read_pdf(span: FileSpan, source: Source, problems: Problems) -> Iterator[Document]:
    library, unpacked = pdf(), Unpacked(span.path, source.unpack)
    try:
        pages = []
        with library.PdfReader(span.path) as reader:
            for page in reader.pages:
                pages.append(page.extract_text().strip())
                unpacked.add(len(pages[-1]))
        text = "\n\n".join(page for page in pages if page).encode()
    except UnpackError:
        raise
    except library.errors as error:
        problems.add(ProblemKind.UNREADABLE, span.path, f"not a readable PDF: {_first_line(error)}")
        return
    if text:
        yield Document(text, span.name)
    else:
        problems.add(ProblemKind.NO_TEXT, span.path, "no text on any page; scanned pages need recognition first")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
