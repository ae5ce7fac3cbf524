"""Small files that unpack to much: archives, Parquet pages, PDF pages. Each is noted once, soon, in little memory."""

import gzip
import json
import zlib
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from pypdf import PdfReader, PdfWriter

from m2forge.corpus.read.file import page_sizes
from m2forge.errors import DataError
from tests.bounds import within
from tests.corpus.read.test_file import first, read, write_pdf

LEAST = 1 << 20
GOOD = json.dumps({"text": "a good line"}).encode() + b"\n"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the real bound, in less time."""
    monkeypatch.setattr("m2forge.unpack.MIN_BYTES", LEAST)


def write_archive(path: Path, num_bytes: int, piece: bytes = bytes(1 << 20)) -> None:
    if path.suffix == ".gz":
        packer = zlib.compressobj(1, wbits=31)
        path.write_bytes(
            packer.compress(GOOD)
            + b"".join(packer.compress(piece) for _ in range(num_bytes // len(piece)))
            + packer.flush()
        )
        return
    with pyarrow.output_stream(str(path), compression="zstd") as stream:
        stream.write(GOOD)
        for _ in range(num_bytes // len(piece)):
            stream.write(piece)


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("piece", [bytes(1 << 20), (b'{"text": "' + b"x" * 10_000 + b'"}\n') * 100])
def test_an_archive_that_unpacks_to_too_much_stops_at_the_bound(tmp_path: Path, kind: str, piece: bytes) -> None:
    path = tmp_path / f"a.jsonl.{kind}"
    write_archive(path, 200 << 20, piece)
    assert path.stat().st_size < 2 << 20
    with within(megabytes=160):
        documents, problems = read(path, unpack={"max_ratio": 10.0})
    assert documents[0] == "a good line"
    assert sum(map(len, documents)) <= max(LEAST, 10 * path.stat().st_size)
    (place,) = first(problems)["too_large"]
    assert place.startswith(f"{path}:{len(documents) + 1}: it unpacks to ")
    assert place.endswith("10 times its size; raise unpack.max_ratio if the file is sound")
    with within(megabytes=160), pytest.raises(DataError, match=r"raise unpack\.max_ratio"):
        read(path, unpack={"max_ratio": 10.0}, strict=True)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_line_that_is_too_long_is_skipped_and_the_next_is_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.jsonl.{kind}"
    data = GOOD + b"x" * (40 << 20) + b"\n" + GOOD
    path.write_bytes(gzip.compress(data, 1) if kind == "gz" else pyarrow.compress(data, codec="zstd", asbytes=True))
    with within(megabytes=16):
        documents, problems = read(path, unpack={"max_ratio": 1e6, "max_line_bytes": 1 << 20})
    assert documents == ["a good line"] * 2
    assert first(problems)["too_large"][0].startswith(f"{path}:2: the line is longer than it may be in an archive")


def write_column(path: Path, values: list[str | None], *, use_dictionary: bool = False, lines: int = 50) -> None:
    table = pyarrow.table({"text": pyarrow.array(values, pyarrow.string())})
    pyarrow.parquet.write_table(
        table, path, row_group_size=lines, compression="zstd", use_dictionary=use_dictionary, write_statistics=False
    )


def varint(value: int, length: int | None = None) -> bytes:
    """Zigzag; padded to `length`, as decoders accept it."""
    value <<= 1
    out: list[int] = []
    while value or not out:
        out.append(value & 127)
        value >>= 7
    out += [0] * ((length or 0) - len(out))
    return bytes([*(byte | 128 for byte in out[:-1]), out[-1]])


@pytest.mark.parametrize("is_stated", [True, False])
def test_a_parquet_page_that_unpacks_to_too_much_is_not_unpacked(tmp_path: Path, is_stated: bool) -> None:
    path = tmp_path / "a.parquet"
    write_column(path, ["good", "x" * (100 << 20), "good too"], lines=1)
    size = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0).total_uncompressed_size
    assert size > 100 << 20
    if not is_stated:  # the footer says a hundred bytes, the page says what it is
        data, stated = path.read_bytes(), varint(size)
        assert stated in data
        path.write_bytes(data.replace(stated, varint(100, len(stated))))
        changed = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0)
        assert changed.total_uncompressed_size == 100
    with within(megabytes=16):
        documents, problems = read(path)
    assert documents == ["good", "good too"]
    (place,) = first(problems)["too_large"]
    assert place.startswith(f"{path}:row 2: row group 1 is left out from here, 1 rows: it unpacks to {100 << 20}"[:60])


@pytest.mark.slow
def test_a_dictionary_yields_few_rows_at_a_time_within_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_column(path, ["x" * 900_000] * 300, use_dictionary=True, lines=300)
    assert path.stat().st_size < 10_000
    with within(megabytes=160):
        documents, problems = read(path)
    assert [len(document) for document in documents] == [900_000]
    assert "row group 0 is left out from here, 300 rows" in first(problems)["too_large"][0]


@pytest.mark.slow
def test_rows_that_hold_nothing_are_bounded_too(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_column(path, [None] * 2_000_000, lines=2_000_000)
    assert path.stat().st_size < 5000
    with within(seconds=2.0):
        documents, problems = read(path)
    assert documents == []
    assert problems.counts.total() < LEAST // 64 + 100
    assert len(first(problems)["too_large"]) == 1


def test_a_column_of_lists_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [["a"] * 1000] * 100}), path)
    with within():
        documents, problems = read(path)
    assert documents == []
    assert first(problems)["not_text"] == [f"{path}: the column 'text' is a list<element: string>, not text"]


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_page_sizes_are_those_of_the_file(tmp_path: Path, version: str) -> None:
    path = tmp_path / "a.parquet"
    values = [f"{number} " * 50 for number in range(5000)]
    table = pyarrow.table({"text": values})
    pyarrow.parquet.write_table(
        table,
        path,
        compression="zstd",
        data_page_size=4096,
        data_page_version=version,
        use_dictionary=False,
        write_batch_size=16,
    )
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(0).column(0)
    with path.open("rb") as file:
        sizes = page_sizes(file, column.data_page_offset, column.total_compressed_size)
        with pytest.raises(ValueError, match="page"):
            page_sizes(file, column.data_page_offset + 1, column.total_compressed_size)
    assert len(sizes) > 20
    # The chunk counts headers too, with the least and the greatest value, about 250 bytes each.
    assert 0 <= column.total_uncompressed_size - sum(sizes) < 600 * len(sizes)


def test_pages_of_a_pdf_that_share_their_text_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2forge.unpack.MIN_BYTES", 1 << 16)
    write_pdf(tmp_path / "one.pdf", "word " * 4000)
    writer = PdfWriter()
    page = PdfReader(tmp_path / "one.pdf").pages[0]
    for _ in range(5):
        writer.add_page(page)
    writer.compress_identical_objects()
    path = tmp_path / "a.pdf"
    writer.write(path)
    (tmp_path / "one.pdf").unlink()
    with within(seconds=2.0):
        documents, problems = read(path, unpack={"max_ratio": 0.1})
    assert documents == []
    assert first(problems)["too_large"][0].startswith(f"{path}: it unpacks to ")
