"""Records URLs, starts and ends of a run's processes, for other processes and for the run page.

    FOLDER/ROLE.jsonl     {"at_s": 1763477270.9, "event": "placed", "node": "n1", "url": "http://10.0.0.5:40123"}
                          {"at_s": 1763477271.5, "event": "started", "node": "n1"}
                          {"at_s": 1763477305.1, "event": "ended", "node": "n1", "status": -9}

A line is written before a process starts and after it ends, and files only grow. So from the size of a file another
process, on any machine that shares the folder, detects whether the role was restarted since its last check. The last
URL is that of the role; it changes if the role moves to another node.

    FOLDER/versions.json  {"sampler-0": 12, "sampler-1": 11}

The loop writes the step of the policy version that each sampler is known to serve.
"""

import contextlib
import json
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from m2forge.errors import EngineError
from m2forge.files import append_line, whole_lines

SUFFIX = ".jsonl"
VERSIONS_FILE = "versions.json"
FRESH_S = 1.0
"""Seconds for which a URL is cached before the record is read again."""


class Event(StrEnum):
    PLACED = "placed"
    STARTED = "started"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class RoleHistory:
    """The records of one role, summarised."""

    name: str
    node: str
    num_starts: int
    is_running: bool
    """Whether its last line is a start; a machine that failed leaves such a line too."""
    deaths: tuple[tuple[float, int], ...]
    """Time and exit status of each end that was not requested."""


class ProcessRecord:
    def __init__(self, folder: Path, role: str, node: str) -> None:
        self._path, self._node = record_path(folder, role), node
        folder.mkdir(parents=True, exist_ok=True)

    def place(self, url: str) -> None:
        """Record the URL of a server; call it before the server's process starts."""
        self._append({"event": Event.PLACED, "url": url})

    def start(self) -> None:
        self._append({"event": Event.STARTED})

    def end(self, status: int, *, is_death: bool) -> None:
        self._append({"event": Event.ENDED, "status": status, "is_death": is_death})

    def _append(self, event: dict[str, object]) -> None:
        append_line(self._path, json.dumps({"at_s": time.time(), "node": self._node, **event}))


def record_path(folder: Path, role: str) -> Path:
    return folder / f"{role}{SUFFIX}"


def record_size(folder: Path, role: str) -> int:
    """Changes whenever the role's process starts or ends; read before a restarted server can answer anything."""
    try:
        # Opened, because network file systems may answer `stat` from a cache.
        with record_path(folder, role).open("rb") as file:
            return file.seek(0, 2)
    except FileNotFoundError:
        return 0


class RoleUrl:
    """Call it for the URL under which a role currently serves."""

    def __init__(self, folder: Path, role: str) -> None:
        self._folder, self._role = folder, role
        self._url, self._size, self._fresh_until_s = "", 0, 0.0

    def __call__(self) -> str:
        if time.monotonic() >= self._fresh_until_s:
            size = record_size(self._folder, self._role)
            if size != self._size or not self._url:
                self._url, self._size = read_url(self._folder, self._role), size
            self._fresh_until_s = time.monotonic() + FRESH_S
        return self._url


def read_url(folder: Path, role: str) -> str:
    """The URL of a role that has been placed; raises EngineError if it never was."""
    path, url = record_path(folder, role), ""
    for line in whole_lines(path.read_bytes() if path.exists() else b""):
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            url = str(event["url"]) if event.get("event") == Event.PLACED else url
    if not url:
        raise EngineError(f"{path} holds no URL: the {role} process was never placed")
    return url


def read_histories(folder: Path) -> list[RoleHistory]:
    """By name; lines that cannot be read are skipped."""
    return [_read(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]


def _read(path: Path) -> RoleHistory:
    node, num_starts, is_running = "", 0, False
    deaths: list[tuple[float, int]] = []
    for line in whole_lines(path.read_bytes()):
        try:
            event = json.loads(line)
            is_running, node = event["event"] == Event.STARTED, str(event["node"])
            num_starts += is_running
            if event.get("is_death"):
                deaths.append((float(event["at_s"]), int(event["status"])))
        except (ValueError, KeyError, TypeError):
            continue
    return RoleHistory(path.name.removesuffix(SUFFIX), node, num_starts, is_running, tuple(deaths))


def read_versions(folder: Path) -> dict[str, int]:
    """The step of the version that each sampler serves; empty if nothing can be read."""
    try:
        return {str(name): int(step) for name, step in json.loads((folder / VERSIONS_FILE).read_bytes()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
