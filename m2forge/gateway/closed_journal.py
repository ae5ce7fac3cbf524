"""Journals of closed episodes: moved to a folder of their own, and compacted there.

    FOLDER/ID.journal                     open
    FOLDER/closed/ID~HASH.journal         closed; HASH is its key's, so that nothing need be read to know the key
    FOLDER/closed/ID~HASH.compact         closed and compacted

A start reads the open ones and lists the others' names. Once an episode is closed and nothing of it runs, nothing can
continue its conversations: the texts of prompts and the schemas of tools are left out. What remains is all that can
still be asked for: the tokens of every prompt and completion with log-probabilities, versions and times, the answers
as clients were told them (for retries), rewards, budget, and why it was closed. Late rewards are appended as before.

A compacted journal is written beside its place and renamed; then the other one is deleted. Killed in between, both are
there, equal in what remains, and the compacted one counts.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from m2forge.gateway.entry import Answered, Entry
from m2forge.gateway.journal import SUFFIX, read_entries, write_entries
from m2forge.gateway.turn import PathRecord
from m2forge.text.message import Message, Tool

FOLDER = "closed"
COMPACT_SUFFIX = ".compact"
_PARTIAL_SUFFIX = ".partial"
_MARK = "~"


def closed_path(folder: Path, id: str, key_hash: str, suffix: str = SUFFIX) -> Path:
    """`folder` is that of the open journals."""
    return folder / FOLDER / f"{id}{_MARK}{key_hash}{suffix}"


def find_journal(folder: Path, id: str, key_hash: str) -> Path:
    """Where the journal of an episode lies."""
    for suffix in (COMPACT_SUFFIX, SUFFIX):
        path = closed_path(folder, id, key_hash, suffix)
        if path.exists():
            return path
    return folder / f"{id}{SUFFIX}"


def list_closed(folder: Path) -> Iterator[tuple[str, str, bool]]:
    """Id, hash of the key and whether it is compacted, of each closed journal. What a killed process left behind is
    deleted."""
    closed = folder / FOLDER
    paths = sorted(closed.iterdir()) if closed.is_dir() else []
    compacted = {path.stem for path in paths if path.suffix == COMPACT_SUFFIX}
    for path in paths:
        if path.suffix == _PARTIAL_SUFFIX or (path.suffix == SUFFIX and path.stem in compacted):
            path.unlink(missing_ok=True)
        elif path.suffix in (SUFFIX, COMPACT_SUFFIX):
            id, _, key_hash = path.stem.partition(_MARK)
            yield id, key_hash, path.suffix == COMPACT_SUFFIX


def journal_ids(folder: Path) -> list[str]:
    """Ids of all episodes whose journals are there, while a gateway may write them."""
    closed = [path for suffix in (SUFFIX, COMPACT_SUFFIX) for path in folder.glob(f"{FOLDER}/*{_MARK}*{suffix}")]
    return sorted(
        {*(path.stem.partition(_MARK)[0] for path in closed), *(path.stem for path in folder.glob(f"*{SUFFIX}"))}
    )


def closed_marks(folder: Path) -> dict[str, tuple[str, int, int]]:
    """A mark for each closed episode that changes when something is appended to its journal, while a gateway may write
    them."""
    marks: dict[str, tuple[str, int, int]] = {}
    for suffix in (SUFFIX, COMPACT_SUFFIX):
        for path in folder.glob(f"{FOLDER}/*{_MARK}*{suffix}"):
            with contextlib.suppress(FileNotFoundError):  # compacted or deleted meanwhile
                found = path.stat()
                marks[path.stem.partition(_MARK)[0]] = (path.name, found.st_mtime_ns, found.st_size)
    return marks


def write_compacted(path: Path) -> Path:
    """A compacted copy of a closed journal, beside it, under a name that no start takes for a journal. It is on disk
    before it replaces the original, which may have been there for long."""
    entries, _ = read_entries(path)
    partial = path.with_name(f".{path.stem}{_PARTIAL_SUFFIX}")
    partial.unlink(missing_ok=True)
    write_entries(partial, compacted(entries), "disk")
    return partial


def compacted(entries: Sequence[Entry]) -> list[Entry]:
    return [
        replace(entry, path=_without_texts(entry.path))
        if isinstance(entry, Answered) and entry.path is not None
        else entry
        for entry in entries
    ]


def _without_texts(path: PathRecord) -> PathRecord:
    """Roles and positions of turns remain: they say which tokens prompts share."""
    turns = tuple(replace(turn, message=Message(turn.message.role)) for turn in path.turns)
    return replace(path, tools=_digested(path.tools), turns=turns)


def _digested(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """One name that differs where the tools do: conversations with other tools begin apart."""
    if not tools:
        return ()
    told = json.dumps([[tool.name, tool.description, tool.parameters] for tool in tools])
    return (Tool(hashlib.sha256(told.encode()).hexdigest()[:32]),)
