"""Every kind of source is read, and every kind of broken input is noted with its place while the rest goes on."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from m2forge.corpus.config import Source, SourceKind
from m2forge.corpus.read.document import Problems
from m2forge.corpus.read.file import read_span
from m2forge.corpus.read.source import list_parts
from m2forge.errors import ConfigError, DataError, NotFoundError

LINES = [json.dumps({"text": f"document {n} has words", "id": n}) for n in range(400)]
TEXTS = [f"document {n} has words" for n in range(400)]


def read(
    path: Path, *, strict: bool = False, part_bytes: int = 10**9, **settings: object
) -> tuple[list[str], Problems]:
    source = Source.model_validate({"path": str(path), **settings})
    problems = Problems(strict)
    documents = [
        document.text.decode()
        for part in list_parts([source], part_bytes)
        for span in part.spans
        for document in read_span(span, source, problems)
    ]
    return documents, problems


def first(problems: Problems) -> dict[str, list[str]]:
    return {kind.value: places for kind, places in problems.examples.items()}


def packed(kind: str) -> bytes:
    data = "\n".join(LINES).encode()
    return gzip.compress(data) if kind == "gz" else pyarrow.compress(data, codec="zstd", asbytes=True)


def test_broken_lines_are_counted_by_kind_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        b'{"text": "good"}',
        b'{"text": "cut off',
        b"[1, 2]",
        b'{"body": "elsewhere"}',
        b'{"text": 5}',
        b'{"text": "bad \xff byte"}',
        b'{"text": "half \\ud800 pair"}',
        b"",
        b"[" * 100_000,
        b'{"text": "last"}',
    ]
    path.write_bytes(b"\n".join(lines))
    documents, problems = read(path)
    assert documents == ["good", "last"]
    assert {kind.value: count for kind, count in problems.counts.items()} == {
        "not_json": 2,
        "not_object": 1,
        "missing_key": 1,
        "not_text": 1,
        "not_utf8": 2,
    }
    places = first(problems)
    assert places["not_json"][0].startswith(f"{path}:2: not JSON")
    assert places["not_json"][1].startswith(f"{path}:9: ")
    assert places["not_object"] == [f"{path}:3: a JSON list, not an object"]
    assert places["missing_key"] == [f"{path}:4: no key 'text' among 'body'"]
    assert places["not_text"] == [f"{path}:5: 'text' is a int, not text"]
    assert places["not_utf8"][0].startswith(f"{path}:6: not UTF-8")
    assert places["not_utf8"][1].startswith(f"{path}:7: 'text' has half a surrogate pair")


def test_strict_refuses_at_the_first_problem(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n{"body": "elsewhere"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: no key 'text' among 'body'; fix or remove it"):
        read(path, strict=True)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_archives_are_unpacked_and_several_in_one_file_too(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(packed(kind))
    assert read(path)[0] == TEXTS
    data = packed(kind)
    path.write_bytes(data + data)
    documents, problems = read(path)
    # The last line of the first has no newline, so it and the first of the second are one broken line.
    assert len(documents) == 2 * len(TEXTS) - 2
    assert problems.total == 1


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("keep", [0.5, 0.99])
def test_a_truncated_archive_gives_its_whole_lines(tmp_path: Path, kind: str, keep: float) -> None:
    path = tmp_path / f"a.jsonl.{kind}"
    data = packed(kind)
    path.write_bytes(data[: int(len(data) * keep)])
    documents, problems = read(path)
    assert documents == TEXTS[: len(documents)]
    ((name, places),) = first(problems).items()
    assert name == "truncated"
    assert places[0].startswith(f"{path}:{len(documents) + 1}: the archive breaks off here")
    with pytest.raises(DataError, match="breaks off"):
        read(path, strict=True)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_file_that_is_no_archive_is_noted(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(b"this is plain text\n" * 10)
    documents, problems = read(path)
    assert documents == []
    assert list(first(problems)) == ["unreadable"]


@given(
    st.lists(st.text(st.characters(codec="utf-8"), max_size=30), max_size=30),
    st.integers(1, 200),
    st.sets(st.integers(0, 29)),
)
def test_spans_of_a_file_read_each_line_once_and_know_its_number(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], part_bytes: int, broken: set[int]
) -> None:
    path = tmp_path_factory.mktemp("spans") / "a.jsonl"
    lines = [json.dumps({"text": text}) if n not in broken else "{broken" for n, text in enumerate(texts)]
    path.write_text("".join(line + "\n" for line in lines))
    documents, problems = read(path, part_bytes=part_bytes)
    assert documents == [text for n, text in enumerate(texts) if n not in broken]
    expected = [f"{path}:{n + 1}" for n in sorted(broken) if n < len(texts)]
    assert [place.rpartition(": not JSON")[0] for place in first(problems).get("not_json", [])] == expected[:5]


def write_parquet(path: Path, values: list[str | None], compression: str = "zstd") -> None:
    table = pyarrow.table({"text": pyarrow.array(values, pyarrow.string()), "other": list(range(len(values)))})
    pyarrow.parquet.write_table(table, path, row_group_size=50, compression=compression)


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd"])
@pytest.mark.parametrize("part_bytes", [10**9, 2000])
def test_parquet_is_read_by_row_groups(tmp_path: Path, compression: str, part_bytes: int) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, [*TEXTS, None], compression)
    documents, problems = read(path, part_bytes=part_bytes)
    assert documents == TEXTS
    assert first(problems) == {"missing_key": [f"{path}:row 401: 'text' is empty"]}


def test_a_truncated_parquet_file_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, [*TEXTS])
    path.write_bytes(path.read_bytes()[:-20])
    documents, problems = read(path)
    assert documents == []
    assert first(problems)["unreadable"][0].startswith(f"{path}: not a whole Parquet file")


def test_a_damaged_row_group_costs_only_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, [*TEXTS])
    group = pyarrow.parquet.ParquetFile(path).metadata.row_group(2).column(0)
    data = bytearray(path.read_bytes())
    begin = group.dictionary_page_offset or group.data_page_offset
    data[begin : begin + group.total_compressed_size] = bytes(group.total_compressed_size)
    path.write_bytes(data)
    documents, problems = read(path)
    assert documents == TEXTS[:100] + TEXTS[150:]
    assert first(problems)["unreadable"][0].startswith(f"{path}:row 101: row group 2 breaks off here, 50 rows left out")


def test_a_missing_column_and_bad_bytes_in_one_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, [*TEXTS])
    documents, problems = read(path, text_key="body")
    assert documents == []
    assert first(problems) == {"missing_key": [f"{path}: no column 'body' among text, other"]}
    raw = pyarrow.array([b"good", b"bad \xff", b"good too"], pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), 3, raw.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), path)
    documents, problems = read(path)
    assert documents == ["good", "good too"]
    assert first(problems)["not_utf8"][0].startswith(f"{path}:row 2: 'text' is not UTF-8")


def write_pdf(path: Path, text: str) -> None:
    writer = PdfWriter()
    page = writer.add_blank_page(width=300, height=300)
    font = DictionaryObject(
        {
            NameObject("/Type"): NameObject("/Font"),
            NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
        }
    )
    fonts = DictionaryObject({NameObject("/F1"): font})
    page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
    content = DecodedStreamObject()
    content.set_data(f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode())
    page[NameObject("/Contents")] = writer._add_object(content)
    writer.write(path)


def test_pdf_text_is_read_and_broken_or_empty_ones_are_noted(tmp_path: Path) -> None:
    write_pdf(tmp_path / "a.pdf", "Hello from a page")
    write_pdf(tmp_path / "b.pdf", "")
    (tmp_path / "c.pdf").write_bytes(b"%PDF-1.4 and nothing more")
    (tmp_path / "d.pdf").write_bytes((tmp_path / "a.pdf").read_bytes()[:200])
    documents, problems = read(tmp_path)
    assert documents == ["Hello from a page"]
    assert {kind.value: count for kind, count in problems.counts.items()} == {"no_text": 1, "unreadable": 2}


def test_folders_give_text_and_code_files_in_order(tmp_path: Path) -> None:
    for name in ("b.py", "a.md", "c.bin", ".hidden.py", "sub/a.js", "__pycache__/x.py", "sub/deep/z.c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "bad.txt").write_bytes(b"one\ntwo \xff\n")
    documents, problems = read(tmp_path)
    assert documents == ["a.md", "b.py", "sub/a.js", "sub/deep/z.c"]
    assert first(problems)["not_utf8"][0].startswith(f"{tmp_path / 'bad.txt'}:2: not UTF-8")
    assert read(tmp_path, suffixes=(".py",))[0] == ["b.py"]
    assert read(tmp_path / "**" / "*.c")[0] == ["sub/deep/z.c"]
    assert read(tmp_path / "c.bin", kind=SourceKind.FOLDER)[0] == ["c.bin"]


def test_a_pattern_names_and_orders_files_as_its_folder_does(tmp_path: Path) -> None:
    for name in ("z.py", "a/b.py", "a/c/d.py", "a-b/e.py", "m.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)

    def names(path: Path) -> list[str]:
        return [span.name for part in list_parts([Source(path=str(path))], 10**9) for span in part.spans]

    assert names(tmp_path / "**" / "*.py") == names(tmp_path) == ["m.py", "z.py", "a/b.py", "a/c/d.py", "a-b/e.py"]
    assert names(tmp_path / "a" / "*.py") == ["b.py"]


def test_sources_that_match_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file or folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match="no file of"):
        read(tmp_path / "*.jsonl")
    (tmp_path / "a.bin").write_text("x")
    with pytest.raises(ConfigError, match="its suffix does not determine the kind"):
        read(tmp_path / "a.bin")
