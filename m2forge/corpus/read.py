"""Documents of a file span, one after the other. What cannot be read is noted, with file and line, and passed over."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from m2forge.corpus.config import Source, SourceKind
from m2forge.corpus.document import Document, ProblemKind, Problems
from m2forge.corpus.extra import parquet, pdf, zstd
from m2forge.corpus.source import FileSpan

if TYPE_CHECKING:
    from pyarrow import Array

_BLOCK_BYTES = 1 << 20
_PARQUET_ROWS = 64


def read_span(span: FileSpan, source: Source, problems: Problems) -> Iterator[Document]:
    try:
        match span.kind:
            case SourceKind.FOLDER:
                yield from _read_file(span, problems)
            case SourceKind.JSONL:
                yield from _read_jsonl(span, source.text_key, problems)
            case SourceKind.PARQUET:
                yield from _read_parquet(span, source.text_key, problems)
            case SourceKind.PDF:
                yield from _read_pdf(span, problems)
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


def _read_jsonl(span: FileSpan, key: str, problems: Problems) -> Iterator[Document]:
    place = _Place(span)
    for line in _lines(span, place, problems):
        place.line += 1
        if line.isspace():
            continue
        try:
            record = json.loads(line)
        except UnicodeDecodeError as error:
            problems.add(ProblemKind.NOT_UTF8, place.text(), f"not UTF-8: {error.reason} at byte {error.start}")
            continue
        except (ValueError, RecursionError) as error:
            problems.add(ProblemKind.NOT_JSON, place.text(), f"not JSON: {error}")
            continue
        if not isinstance(record, dict):
            problems.add(ProblemKind.NOT_OBJECT, place.text(), f"a JSON {type(record).__name__}, not an object")
        elif key not in record:
            found = ", ".join(map(repr, list(record)[:8]))
            problems.add(ProblemKind.MISSING_KEY, place.text(), f"no key {key!r} among {found or 'none'}")
        elif not isinstance(record[key], str):
            problems.add(ProblemKind.NOT_TEXT, place.text(), f"{key!r} is a {type(record[key]).__name__}, not text")
        else:
            try:
                yield Document(record[key].encode(), "")
            except UnicodeEncodeError as error:
                problems.add(ProblemKind.NOT_UTF8, place.text(), f"{key!r} has half a surrogate pair: {error.reason}")


class _Place:
    """File and line for messages. Lines before a span in the middle of a file are counted when first asked for."""

    def __init__(self, span: FileSpan) -> None:
        self.line = 0
        self._span = span
        self._before: int | None = None if span.begin else 0

    def text(self, line: int | None = None) -> str:
        if self._before is None:
            self._before = _newlines_before(self._span.path, self._span.begin)
        return f"{self._span.path}:{self._before + (self.line if line is None else line)}"


def _newlines_before(path: str, end: int) -> int:
    """Newlines that close a line beginning before `end`."""
    count, place = 0, 0
    with Path(path).open("rb") as file:
        while place < end - 1:
            block = file.read(min(_BLOCK_BYTES, end - 1 - place))
            count += block.count(b"\n")
            place += len(block)
    return count + 1


def _lines(span: FileSpan, place: _Place, problems: Problems) -> Iterator[bytes]:
    if span.path.endswith(".gz"):
        with gzip.open(span.path, "rb") as file:
            yield from _archive_lines(file.read, place, problems, (EOFError, gzip.BadGzipFile, zlib.error))
    elif span.path.endswith(".zst"):
        with zstd().open(span.path) as stream:
            yield from _archive_lines(stream.read, place, problems, (OSError,))
    else:
        with Path(span.path).open("rb", buffering=_BLOCK_BYTES) as plain:
            yield from _plain_lines(plain, span)


def _plain_lines(file: BinaryIO, span: FileSpan) -> Iterator[bytes]:
    """Lines that begin inside the span."""
    place = span.begin
    if place:
        file.seek(place - 1)
        place += len(file.readline()) - 1
    for line in file:
        if 0 <= span.end <= place:
            return
        place += len(line)
        yield line


def _archive_lines(
    read: Callable[[int], bytes], place: _Place, problems: Problems, errors: tuple[type[Exception], ...]
) -> Iterator[bytes]:
    """Lines of an archive; of a broken one, those that are whole."""
    rest = b""
    while True:
        try:
            block = read(_BLOCK_BYTES)
        except errors as error:
            ends_early = isinstance(error, EOFError) or "runcated" in str(error)
            kind = ProblemKind.TRUNCATED if ends_early else ProblemKind.UNREADABLE
            problems.add(kind, place.text(place.line + 1), f"the archive breaks off here: {error}")
            return
        if not block:
            break
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        yield from (line + b"\n" for line in lines)
    if rest:
        yield rest


def _read_parquet(span: FileSpan, key: str, problems: Problems) -> Iterator[Document]:
    library = parquet()
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
        num_groups = file.metadata.num_row_groups
        row = sum(file.metadata.row_group(group).num_rows for group in range(span.begin))
        for group in range(span.begin, num_groups if span.end < 0 else min(span.end, num_groups)):
            first_row, num_rows = row, file.metadata.row_group(group).num_rows
            try:
                for batch in file.iter_batches(_PARQUET_ROWS, row_groups=[group], columns=[key]):
                    yield from _read_column(batch.column(0), f"{span.path}:row ", row, key, problems)
                    row += batch.num_rows
            except library.errors as error:
                left = first_row + num_rows - row
                detail = f"row group {group} breaks off here, {left} rows left out: {_first_line(error)}"
                problems.add(ProblemKind.UNREADABLE, f"{span.path}:row {row + 1}", detail)
            row = first_row + num_rows


def _read_column(column: "Array", place: str, first: int, key: str, problems: Problems) -> Iterator[Document]:
    for row, scalar in enumerate(column, first + 1):
        try:
            value = scalar.as_py()
        except UnicodeDecodeError as error:
            detail = f"{key!r} is not UTF-8: {error.reason} at byte {error.start}"
            problems.add(ProblemKind.NOT_UTF8, f"{place}{row}", detail)
            continue
        if isinstance(value, str):
            yield Document(value.encode(), "")
        elif value is None:
            problems.add(ProblemKind.MISSING_KEY, f"{place}{row}", f"{key!r} is empty")
        else:
            problems.add(ProblemKind.NOT_TEXT, f"{place}{row}", f"{key!r} is a {type(value).__name__}, not text")


def _read_pdf(span: FileSpan, problems: Problems) -> Iterator[Document]:
    library = pdf()
    try:
        with library.PdfReader(span.path) as reader:
            pages = [page.extract_text().strip() for page in reader.pages]
        text = "\n\n".join(page for page in pages if page).encode()
    except library.errors as error:
        problems.add(ProblemKind.UNREADABLE, span.path, f"not a readable PDF: {_first_line(error)}")
        return
    if text:
        yield Document(text, span.name)
    else:
        problems.add(ProblemKind.NO_TEXT, span.path, "no text on any page; scanned pages need recognition first")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
