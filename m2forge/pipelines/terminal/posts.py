"""Reads Posts.xml of a Stack Exchange dump: a stream of rows in, questions with their accepted answers out.

    <row Id="7" PostTypeId="1" AcceptedAnswerId="9" Tags="&lt;bash&gt;&lt;awk&gt;" Score="31" Body="…" … />
    <row Id="9" PostTypeId="2" ParentId="7" Score="44" Body="…" … />

A dump is larger than memory, and an accepted answer may stand far behind its question. So a question that passes the
gates on its attributes (accepted answer, score, tags) is written to a temporary file until its answer arrives; memory
holds one small entry for it. Tags are read in both notations of the dumps, `<bash><awk>` and `|bash|awk|`.

A dump that is cut or damaged is reported once; the questions before that place are used.
"""

import bz2
import gzip
import logging
import lzma
import marshal
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast
from xml.parsers import expat

from m2forge.errors import DataError, NotFoundError
from m2forge.pipelines.stage import Context, Item, Rejection, Source
from m2forge.pipelines.terminal.config import TerminalConfig

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
                chunk = file.read(CHUNK_BYTES)
                parser.Parse(chunk, not chunk)
            except (expat.ExpatError, EOFError, OSError, lzma.LZMAError) as error:
                problem, chunk = error, b""
            yield from rows
            rows.clear()
            if problem is not None:
                place = f"after {parser.CurrentByteIndex} bytes"
                _log.warning("%s: cut or damaged %s (%s); the rows before are used", path, place, problem)
            if not chunk:
                return


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".7z":
        raise DataError(f"{path}: 7z archives are not read; unpack Posts.xml first")
    try:
        match path.suffix:
            case ".gz":
                return cast("BinaryIO", gzip.open(path, "rb"))
            case ".bz2":
                return cast("BinaryIO", bz2.open(path, "rb"))
            case ".xz":
                return cast("BinaryIO", lzma.open(path, "rb"))
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
        # Id, place and size of questions in the temporary file, by the id of the answer that they wait for.
        waiting: dict[str, tuple[str, int, int]] = {}
        position = 0
        with tempfile.TemporaryFile() as spool:
            for row in read_rows(self._path):
                match row.get("PostTypeId"):
                    case "1":
                        if (rejection := self._refused(row)) is not None:
                            yield rejection
                            continue
                        data = marshal.dumps(row)
                        spool.write(data)
                        waiting[row["AcceptedAnswerId"]] = row["Id"], position, len(data)
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
            "licence": question.get("ContentLicense", "unknown"),
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
