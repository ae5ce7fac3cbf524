"""Journals of closed episodes: moved to their own folder and compacted there.

    FOLDER/ID.journal                     open
    FOLDER/closed/ID~HASH.journal         closed; HASH is the key's, so that the key is known without reading the file
    FOLDER/closed/ID~HASH.compact         closed and compacted

At startup the gateway reads the open journals and only lists the others. Once an episode is closed and has no request
in flight, its conversations cannot continue, so compaction drops prompt texts and the definitions of tools. It keeps
everything else that can still be requested: tokens of every prompt and completion with logprobs, policy versions and
times, the names of tools, the responses as clients received them (for retries), rewards, budget and the reason for
closing. Late rewards are appended.

A compacted journal is written to a temporary file and renamed; then the original is deleted. If the process is killed
in between, both exist with equal remaining content, and the compacted one is used.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from m2forge.gateway.episodes.journal import SUFFIX, Answered, Entry, read_entries, write_entries
from m2forge.gateway.history.turn import PathRecord
from m2forge.text.message import Message, Tool

FOLDER = "closed"
COMPACT_SUFFIX = ".compact"
_PARTIAL_SUFFIX = ".partial"
_MARK = "~"


def closed_path(folder: Path, id: str, key_hash: str, suffix: str = SUFFIX) -> Path:
    """`folder` contains the open journals."""
    return folder / FOLDER / f"{id}{_MARK}{key_hash}{suffix}"


def find_journal(folder: Path, id: str, key_hash: str) -> Path:
    """Return the path of an episode's journal."""
    for suffix in (COMPACT_SUFFIX, SUFFIX):
        path = closed_path(folder, id, key_hash, suffix)
        if path.exists():
            return path
    return folder / f"{id}{SUFFIX}"


def list_closed(folder: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield id, key hash and whether it is compacted, for each closed journal. Deletes leftovers of a killed
    process."""
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
    """Return the ids of all episodes with a journal; safe while a gateway is writing."""
    closed = [path for suffix in (SUFFIX, COMPACT_SUFFIX) for path in folder.glob(f"{FOLDER}/*{_MARK}*{suffix}")]
    return sorted(
        {*(path.stem.partition(_MARK)[0] for path in closed), *(path.stem for path in folder.glob(f"*{SUFFIX}"))}
    )


def closed_marks(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Return a fingerprint of each closed episode's journal, which changes when something is appended; safe while a
    gateway is writing."""
    marks: dict[str, tuple[str, int, int]] = {}
    for suffix in (SUFFIX, COMPACT_SUFFIX):
        for path in folder.glob(f"{FOLDER}/*{_MARK}*{suffix}"):
            with contextlib.suppress(FileNotFoundError):  # compacted or deleted concurrently
                stat = path.stat()
                marks[path.stem.partition(_MARK)[0]] = (path.name, stat.st_mtime_ns, stat.st_size)
    return marks


def write_compacted(path: Path) -> Path:
    """Write a compacted copy beside a closed journal, under a name that startup does not take for a journal. It is
    fsynced before it replaces the original, which is probably on disk already."""
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
    """Keeps roles and positions of turns: they determine which tokens prompts share."""
    turns = tuple(replace(turn, message=Message(turn.message.role)) for turn in path.turns)
    return replace(path, tools=_digested(path.tools), turns=turns)


def _digested(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Replace the tools' definitions by hashes: conversations with different tools share no prefix, and calls with
    tools of the same names may belong to one conversation."""
    definitions = [json.dumps([tool.description, tool.parameters]) for tool in tools]
    hashes = [hashlib.sha256(text.encode()).hexdigest()[:32] for text in definitions]
    return tuple(Tool(tool.name, hash) for tool, hash in zip(tools, hashes, strict=True))
