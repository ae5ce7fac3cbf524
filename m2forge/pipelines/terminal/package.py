"""Reads two packages of PyPI as questions: `eg`, examples of commands, and `intercode-bench`, queries with commands.

Neither package is shipped. Paths are of the archives that `pip download --no-deps eg intercode-bench` leaves, or of
what they hold. The items have the fields of questions of a dump; their answers have no score and count as accepted.
"""

import html
import json
import re
import tarfile
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from m2forge.errors import DataError, NotFoundError
from m2forge.pipelines.stage import Context, Item, Rejection, Source
from m2forge.records import JsonValue

MAX_BYTES = 16 << 20
"""Limit of one file of a package."""
QUERIES = "bash_queries.json"
_EG_AUTHORS, _INTERCODE_AUTHORS = ["authors of eg"], ["authors of InterCode"]


def _fingerprint(path: Path) -> str:
    if not path.exists():
        raise NotFoundError(f"{path}: no such file; expected the package, or the folder with its files")
    status = path.stat()
    return f"{path.name} {status.st_size} {status.st_mtime_ns}"


def read_members(path: Path, pattern: str) -> Iterator[tuple[str, str]]:
    """Texts whose path ends as the pattern says, of a folder, a tar, a zip or the file itself, by path."""
    try:
        if path.is_dir():
            found = sorted(one for one in path.rglob("*") if re.search(pattern, f"/{one.relative_to(path)}"))
            for one in found:
                yield one.name, one.read_text(encoding="utf-8")
        elif zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for info in archive.infolist():
                    if re.search(pattern, f"/{info.filename}") and info.file_size <= MAX_BYTES:
                        yield info.filename.rpartition("/")[2], archive.read(info).decode()
        elif tarfile.is_tarfile(path):
            with tarfile.open(path) as packed:
                for member in packed:
                    if member.isfile() and member.size <= MAX_BYTES and re.search(pattern, f"/{member.name}"):
                        file = packed.extractfile(member)
                        assert file is not None
                        yield member.name.rpartition("/")[2], file.read().decode()
        else:
            yield path.name, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


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
        except ValueError as error:
            raise DataError(f"{self._path}: {QUERIES} is not JSON: {error}") from error
        for number, record in enumerate(records if isinstance(records, list) else []):
            match record:
                case {"query": str(query), "gold": str(gold)}:
                    inside = gold.replace("/testbed", "testbed")
                    text = (
                        f"<p>{html.escape(query.replace('/testbed', 'testbed'), quote=False)}. How can I do this?</p>"
                    )
                    yield _item(f"intercode-{number}", query, text, inside, "intercode", _INTERCODE_AUTHORS)
                case _:
                    yield Rejection("not a query", {"record": str(record)[:200]}, id=f"intercode-{number}")
