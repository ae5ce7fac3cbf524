"""Posts with questions about the command line: their sources, and a post's HTML as blocks of text and of code.

The sources are Posts.xml of a Stack Exchange dump, and two packages of PyPI. A dump is read as a stream of rows;
questions with their accepted answers come out:

    <row Id="7" PostTypeId="1" AcceptedAnswerId="9" Tags="&lt;bash&gt;&lt;awk&gt;" Score="31" Body="…" … />
    <row Id="9" PostTypeId="2" ParentId="7" Score="44" Body="…" … />

A dump is larger than memory, and an accepted answer may come long after its question. So a question that passes the
gates on its attributes (accepted answer, score, tags) is written to a temporary file until its answer arrives; memory
holds one small entry for it. Tags are read in both notations of the dumps, `<bash><awk>` and `|bash|awk|`.

A dump that is cut or damaged is reported once; the questions before that point are used.

The packages are `eg`, examples of commands, and `intercode-bench`, queries with commands. Neither is shipped. Paths are
of the archives that `pip download --no-deps eg intercode-bench` leaves, or of what they hold. The items have the fields
of questions of a dump; their answers have no score and count as accepted.
"""

import bz2
import gzip
import html
import json
import logging
import lzma
import marshal
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import cast
from xml.parsers import expat

from m2forge.errors import DataError, NotFoundError
from m2forge.pipelines.package_archive import is_archive, members
from m2forge.pipelines.stage import Context, Item, Rejection, Source, stamp
from m2forge.pipelines.terminal.config import TerminalConfig
from m2forge.records import JsonValue

CHUNK_BYTES = 1 << 18
QUESTION, ANSWER = "1", "2"
_log = logging.getLogger(__name__)

Row = dict[str, str]


def read_rows(path: Path) -> Iterator[Row]:
    """The attributes of every `row` element, in order. Ends with one warning where the file is cut or damaged."""
    rows: list[Row] = []
    parser = expat.ParserCreate()
    parser.buffer_text = True

    def take(name: str, attributes: dict[str, str]) -> None:
        if name == "row":
            rows.append(attributes)

    def refuse(*_: object) -> None:
        raise DataError(f"{path}: it defines entities of its own, which no dump does; it is not read")

    parser.StartElementHandler, parser.StartDoctypeDeclHandler = take, refuse
    with _open(path) as file:
        while True:
            problem: Exception | None = None
            try:
                # Not `read`, which loses what it has unpacked before a cut.
                chunk = file.read1(CHUNK_BYTES)
                parser.Parse(chunk, not chunk)
            except (expat.ExpatError, EOFError, OSError, lzma.LZMAError) as error:
                problem, chunk = error, b""
            yield from rows
            rows.clear()
            if problem is not None:
                position = f"after {parser.CurrentByteIndex} bytes"
                _log.warning("%s: cut or damaged %s (%s); the rows before are used", path, position, problem)
            if not chunk:
                return


def _open(path: Path) -> BufferedReader:
    if path.suffix == ".7z":
        raise DataError(f"{path}: 7z archives are not read; unpack Posts.xml first")
    try:
        match path.suffix:
            case ".gz":
                return cast("BufferedReader", gzip.open(path, "rb"))
            case ".bz2":
                return cast("BufferedReader", bz2.open(path, "rb"))
            case ".xz":
                return cast("BufferedReader", lzma.open(path, "rb"))
        return path.open("rb")
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: no such file; expected Posts.xml of a dump") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def read_tags(text: str) -> list[str]:
    """Tags in either notation."""
    return [tag for tag in text.replace("<", "|").replace(">", "|").split("|") if tag]


class PostsSource(Source):
    """Questions of a dump, each with its accepted answer."""

    name = "posts"

    def __init__(self, path: Path, config: TerminalConfig) -> None:
        self._path, self._config, self._tags = path, config, frozenset(config.tags)

    def fingerprint(self) -> str:
        try:
            status = self._path.stat()
        except FileNotFoundError as error:
            raise NotFoundError(f"{self._path}: no such file; expected Posts.xml of a dump") from error
        return f"{self._path.name} {status.st_size} {status.st_mtime_ns}"

    def read(self, context: Context) -> Iterator[Item | Rejection]:
        yield from self.questions()

    def questions(self) -> Iterator[Item | Rejection]:
        """Every question: as an item when its accepted answer was read, or rejected."""
        # Id, offset and size of questions in the temporary file, by the id of the answer that they wait for.
        waiting: dict[str, tuple[str, int, int]] = {}
        position = 0
        with tempfile.TemporaryFile() as spool:
            for row in read_rows(self._path):
                match row.get("PostTypeId"):
                    case "1":
                        if (rejection := self._refused(row)) is not None:
                            yield rejection
                            continue
                        if (wanted := row["AcceptedAnswerId"]) in waiting:
                            yield Rejection("answer of another question", {"answer": wanted}, id=row["Id"])
                            continue
                        data = marshal.dumps(row)
                        spool.write(data)
                        waiting[wanted] = row["Id"], position, len(data)
                        position += len(data)
                    case "2" if (found := waiting.pop(row.get("Id", ""), None)) is not None:
                        spool.flush()
                        _, start, num_bytes = found
                        data = os.pread(spool.fileno(), num_bytes, start)
                        yield question_item(marshal.loads(data), row)
        for answer, (id, *_) in waiting.items():
            yield Rejection("accepted answer missing", {"answer": answer}, id=id)

    def _refused(self, row: Row) -> Rejection | None:
        """The gates on attributes alone, so that most rows of a dump are never stored."""
        id, config = row.get("Id", ""), self._config
        if not id:
            return Rejection("no id", {"title": row.get("Title", "")})
        if "AcceptedAnswerId" not in row:
            return Rejection("no accepted answer", {"answers": row.get("AnswerCount", "0")}, id=id)
        score = _integer(row.get("Score"))
        if score < config.min_score:
            return Rejection("low score", {"score": score}, id=id)
        tags = read_tags(row.get("Tags", ""))
        if self._tags.isdisjoint(tags):
            return Rejection("no terminal tag", {"tags": list(tags)}, id=id)
        return None


def question_item(question: Row, answer: Row) -> Item:
    """Authors and licence stay with the item: they are the attribution that a dump's licence asks for."""
    return Item(
        question["Id"],
        {
            "title": question.get("Title", ""),
            "tags": list(read_tags(question.get("Tags", ""))),
            "score": _integer(question.get("Score")),
            "question": question.get("Body", ""),
            "answer": answer.get("Body", ""),
            "answer_id": answer["Id"],
            "licence": " and ".join(dict.fromkeys(row.get("ContentLicense", "unknown") for row in (question, answer))),
            "authors": [_author(question), _author(answer)],
        },
    )


def _author(row: Row) -> str:
    """The name, else the number of the account."""
    return row.get("OwnerDisplayName") or (f"user {row['OwnerUserId']}" if "OwnerUserId" in row else "unknown")


def _integer(text: str | None) -> int:
    try:
        return int(text or "0")
    except ValueError:
        return 0


# -- packages ----------------------------------------------------------------------------------------------------------

MAX_PACKAGE_BYTES, MAX_PACKAGE_FILES = 128 << 20, 20_000
"""Limits of what a package unpacks to."""
QUERIES = "bash_queries.json"
_EG_AUTHORS, _INTERCODE_AUTHORS = ["authors of eg"], ["authors of InterCode"]


def _fingerprint(path: Path) -> str:
    if not path.exists():
        raise NotFoundError(f"{path}: no such file; expected the package, or the folder with its files")
    return f"{path.name} {stamp(path)}"


def read_members(path: Path, pattern: str) -> Iterator[tuple[str, str]]:
    """Texts whose path matches the pattern, of a folder, a tar, a zip or the file itself, by path."""
    try:
        for name, content in _packed(path) if path.is_file() and is_archive(path) else _lying(path, pattern):
            if (path.is_file() and name == path.name) or re.search(pattern, f"/{name}"):
                yield name.rpartition("/")[2], content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _packed(path: Path) -> Iterator[tuple[str, bytes]]:
    for name, content, _ in members(path, MAX_PACKAGE_BYTES, MAX_PACKAGE_FILES):
        yield name, content


def _lying(path: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """The file, or the matching files of a folder."""
    files = {str(one.relative_to(path)): one for one in sorted(path.rglob("*"))} if path.is_dir() else {path.name: path}
    fitting = {name: one for name, one in files.items() if one == path or re.search(pattern, f"/{name}")}
    if sum(one.stat().st_size for one in fitting.values()) > MAX_PACKAGE_BYTES:
        raise DataError(f"{path}: its files have over {MAX_PACKAGE_BYTES} bytes")
    for name, one in fitting.items():
        yield name, one.read_bytes()


def _item(id: str, title: str, question: str, command: str, source: str, authors: list[str]) -> Item:
    data: dict[str, JsonValue] = {
        "title": title,
        "tags": ["command-line"],
        "score": 0,
        "question": question,
        "answer": f"<pre><code>{html.escape(command, quote=False)}\n</code></pre>",
        "answer_id": id,
        "licence": "MIT",
        "authors": list(authors),
        "source": source,
    }
    return Item(id, data)


class EgSource(Source):
    """Each description of a command in eg's Markdown files, with the command below it."""

    name = "eg"

    def __init__(self, path: Path) -> None:
        self._path = path

    def fingerprint(self) -> str:
        return _fingerprint(self._path)

    def read(self, context: Context) -> Iterator[Item | Rejection]:
        for name, text in read_members(self._path, r"/examples/[^/]+\.md$|^/[^/]+\.md$"):
            yield from eg_items(name.removesuffix(".md"), text)


def eg_items(program: str, text: str) -> Iterator[Item]:
    """A paragraph that is followed by an indented block is a description; `$ cat FILE` blocks show files."""
    parts = re.split(r"\n[ \t]*\n+", text.expandtabs(4))
    shown, number = "", 0
    for before, block in pairwise(parts):
        lines = block.split("\n")
        if not all(line.startswith("    ") for line in lines if line.strip()) or before.startswith(("    ", "#")):
            continue
        code = "\n".join(line[4:] for line in lines)
        if re.match(r"\s*\$ cat \S+\s*\n", code):
            shown = code
            continue
        number += 1
        sentence = " ".join(before.split()).rstrip(":")
        described = f"<p>How can I do this on the command line? {html.escape(sentence, quote=False)}</p>"
        described += f"<pre><code>{html.escape(shown, quote=False)}\n</code></pre>" if shown else ""
        yield _item(f"eg-{program}-{number}", sentence, described, code, "eg", _EG_AUTHORS)


class InterCodeSource(Source):
    """The queries over a file system, whose folder /testbed becomes one of the workspace."""

    name = "intercode"

    def __init__(self, path: Path) -> None:
        self._path = path

    def fingerprint(self) -> str:
        return _fingerprint(self._path)

    def read(self, context: Context) -> Iterator[Item | Rejection]:
        texts = [text for name, text in read_members(self._path, rf"/{re.escape(QUERIES)}$") if name == QUERIES]
        if not texts:
            raise DataError(f"{self._path}: holds no {QUERIES}; expected the wheel of intercode-bench")
        try:
            records = json.loads(texts[0])
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self._path}: {QUERIES} is not JSON: {error}") from error
        if not isinstance(records, list):
            raise DataError(f"{self._path}: {QUERIES}: expected a list of queries, received {str(records)[:100]}")
        for number, record in enumerate(records):
            match record:
                case {"query": str(query), "gold": str(gold)}:
                    inside = gold.replace("/testbed", "testbed")
                    text = (
                        f"<p>{html.escape(query.replace('/testbed', 'testbed'), quote=False)}. How can I do this?</p>"
                    )
                    yield _item(f"intercode-{number}", query, text, inside, "intercode", _INTERCODE_AUTHORS)
                case _:
                    yield Rejection("not a query", {"record": str(record)[:200]}, id=f"intercode-{number}")


# -- a post's HTML ----------------------------------------------------------------------------------------------------

_PARAGRAPHS = frozenset(("p", "li", "h1", "h2", "h3", "blockquote", "br", "hr", "ul", "ol", "div"))


@dataclass(frozen=True, slots=True)
class Block:
    text: str
    """Code as it is; in a paragraph, code spans stand between backticks."""
    is_code: bool = False
    language: str = ""
    """The language that a code block declares; empty if none."""

    @property
    def spans(self) -> list[str]:
        """The code spans of a paragraph."""
        return [] if self.is_code else re.findall(r"`([^`\n]+)`", self.text)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[Block] = []
        self._text: list[str] = []
        self._is_code, self._language, self._item = False, "", ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "pre":
            self._flush()
            found = re.search(r"lang-(\w+)", dict(attrs).get("class") or "")
            self._is_code, self._language = True, found[1] if found else ""
        elif tag == "code" and not self._is_code:
            self._text.append("`")
        elif tag in _PARAGRAPHS and not self._is_code:
            self._flush()
            self._item = "- " if tag == "li" else ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "pre":
            self._flush()
        elif tag == "code" and not self._is_code:
            self._text.append("`")
        elif tag in _PARAGRAPHS and not self._is_code:
            self._flush()

    def handle_data(self, data: str) -> None:
        self._text.append(data)

    def close(self) -> None:
        super().close()
        self._flush()

    def _flush(self) -> None:
        text = "".join(self._text)
        self._text.clear()
        if self._is_code:
            self.blocks.append(Block(text.removesuffix("\n"), True, self._language))
            self._is_code, self._language = False, ""
        elif text.strip():
            self.blocks.append(Block(self._item + " ".join(text.split())))
        self._item = ""


def read_blocks(html: str) -> list[Block]:
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return reader.blocks


def plain(blocks: list[Block]) -> str:
    """All text, code included."""
    return "\n".join(block.text for block in blocks)


def markdown(blocks: list[Block]) -> str:
    parts = [f"```{block.language}\n{block.text}\n```" if block.is_code else block.text for block in blocks]
    return "\n\n".join(parts)
