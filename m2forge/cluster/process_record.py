"""Starts and ends of a run's processes, for other processes and for the run page.

    FOLDER/ROLE.jsonl     {"at_s": 1763477271.5, "event": "started", "node": "n1"}
                          {"at_s": 1763477305.1, "event": "ended", "node": "n1", "status": -9}

A line is written before a process starts and after it ends, and files only grow. So the size of a file tells another
process, on any machine that shares the folder, whether the role was restarted since it last looked.
"""

import json
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from m2forge.files import append_line, whole_lines

SUFFIX = ".jsonl"


class Event(StrEnum):
    STARTED = "started"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class RoleHistory:
    """What the records of one role say."""

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
