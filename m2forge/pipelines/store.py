"""The state of a pipeline's run in one SQLite file: items and their outcomes, completions, blobs.

    item        what enters stage n, in the order of `path`; stage 0 is the source and has none, the items of the stage
                after the last are the accepted ones
    outcome     of an item in stage n: passed, rejected or failed; in stage 0: of a record
    completion  a model's response, by the hash of its request
    blob        bytes, by their SHA-256

An outcome and the items that it passes on are committed together and once, so a killed run resumes where it stopped. A
path is the number of a record, and for each fan-out the number of the item: paths of one stage are in the order of the
source, whatever the order in which workers finish, and none is a prefix of another.
"""

import hashlib
import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import quote

from m2forge.errors import DataError, NotFoundError, RunError
from m2forge.pipelines.stage import Completion, Failure, Item, Outcome, Rejection
from m2forge.records import JsonValue

VERSION = "1"
NUM_FETCHED = 1024
"""Items that are read at once."""
_TABLES = """
CREATE TABLE IF NOT EXISTS fact (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS item (
    stage INTEGER NOT NULL, path TEXT NOT NULL, id TEXT NOT NULL, data TEXT NOT NULL,
    PRIMARY KEY (stage, path)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS outcome (
    stage INTEGER NOT NULL, path TEXT NOT NULL, id TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
    evidence TEXT NOT NULL, num_made INTEGER NOT NULL, num_cached INTEGER NOT NULL, seconds REAL NOT NULL,
    PRIMARY KEY (stage, path)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS completion (
    key TEXT PRIMARY KEY, stage TEXT NOT NULL, request TEXT NOT NULL, response TEXT NOT NULL,
    num_prompt INTEGER NOT NULL, num_sampled INTEGER NOT NULL, num_requests INTEGER NOT NULL, seconds REAL NOT NULL);
CREATE TABLE IF NOT EXISTS blob (digest TEXT PRIMARY KEY, data BLOB NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Row:
    """An item in its order."""

    path: str
    item: Item


@dataclass(frozen=True, slots=True)
class Processed:
    path: str
    id: str
    outcome: Outcome
    num_cached: int = 0
    """Completions that came from the store."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StageYield:
    """Counts of one stage."""

    name: str
    num_in: int
    num_passed: int
    num_made: int
    """Number of items made from those that passed."""
    rejected: dict[str, int] = field(default_factory=dict)
    """By reason."""
    failed: dict[str, int] = field(default_factory=dict)
    num_asked: int = 0
    """Completions that endpoints returned."""
    num_cached: int = 0
    """Completions that came from the store."""
    num_prompt: int = 0
    """Tokens of the prompts of `num_asked` completions."""
    num_sampled: int = 0
    seconds: float = 0.0
    """Time that workers spent on the items."""

    @property
    def num_rejected(self) -> int:
        return sum(self.rejected.values())

    @property
    def num_failed(self) -> int:
        return sum(self.failed.values())

    def to_json(self) -> dict[str, JsonValue]:
        return {**asdict(self), "seconds": round(self.seconds, 3)}


class Store:
    """Thread-safe."""

    def __init__(self, path: Path, *, is_read_only: bool = False) -> None:
        self._lock = threading.RLock()
        if is_read_only and not path.is_file():
            raise NotFoundError(f"{path}: no such file; give the file pipeline.db of a run")
        uri = f"file:{quote(str(path.absolute()))}?mode={'ro' if is_read_only else 'rwc'}"
        try:
            self._connection = sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level="IMMEDIATE")
            if not is_read_only:
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.executescript(_TABLES)
            version = self.fact("version", "" if is_read_only else VERSION)
        except sqlite3.DatabaseError as error:
            raise DataError(f"{path}: cannot be opened ({error}); remove it, or start a run of another name") from error
        if version != VERSION:
            raise DataError(f"{path}: written by another version of m2forge; start a run of another name")
        if not is_read_only:
            self.set_fact("version", VERSION)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._connection.close()

    # -- facts and blobs -----------------------------------------------------------------------------------------------

    def fact(self, name: str, default: str) -> str:
        found = self._all("SELECT value FROM fact WHERE name = ?", name)
        return str(found[0][0]) if found else default

    def set_fact(self, name: str, value: str) -> None:
        with self._lock, self._connection:
            self._set_fact(name, value)

    def put(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        with self._lock, self._connection:
            self._connection.execute("INSERT OR IGNORE INTO blob VALUES (?, ?)", (digest, data))
        return digest

    def get(self, digest: str) -> bytes:
        found = self._all("SELECT data FROM blob WHERE digest = ?", digest)
        if not found:
            raise NotFoundError(f"no blob has the digest {digest!r}")
        return bytes(found[0][0])

    # -- items ---------------------------------------------------------------------------------------------------------

    def num_items(self, stage: int) -> int:
        return int(self._all("SELECT COUNT(*) FROM item WHERE stage = ?", stage)[0][0])

    def num_outcomes(self, stage: int) -> int:
        return int(self._all("SELECT COUNT(*) FROM outcome WHERE stage = ?", stage)[0][0])

    def items(self, stage: int, *, pending: bool = False) -> Iterator[Row]:
        """The items that enter a stage, in order. `pending`: only those without an outcome."""
        condition = " AND NOT EXISTS (SELECT 1 FROM outcome o WHERE o.stage = item.stage AND o.path = item.path)"
        for path, id, data in self._item_rows(stage, condition if pending else ""):
            yield Row(path, Item(id, json.loads(data)))

    def digest(self, stage: int) -> str:
        """SHA-256 of the items that enter a stage."""
        digest = hashlib.sha256()
        for row in self._item_rows(stage):
            digest.update("\0".join((*row, "")).encode())
        return digest.hexdigest()

    def _item_rows(self, stage: int, condition: str = "") -> Iterator[tuple[str, str, str]]:
        """Path, id and data, in order. Other statements may run in between."""
        query = "SELECT path, id, data FROM item WHERE stage = ? AND path > ?"
        last = ""
        while found := self._all(f"{query}{condition} ORDER BY path LIMIT {NUM_FETCHED}", stage, last):
            yield from cast("list[tuple[str, str, str]]", found)
            last = found[-1][0]

    def add_records(self, start: int, records: Sequence[Item | Rejection], seconds: float) -> None:
        """Store records of the source from number `start` on; `seconds`: how long it took to read them."""
        each_s = seconds / max(1, len(records))
        processed = [
            Processed(f"{number:08x}", record.id, record, seconds=each_s)
            for number, record in enumerate(records, start)
        ]
        with self._lock, self._connection:
            self._insert(0, processed)
            self._set_fact("num_records", str(start + len(records)))

    def commit(self, stage: int, processed: Sequence[Processed]) -> None:
        """An outcome that is not JSON is a failure of its item."""
        try:
            with self._lock, self._connection:
                self._insert(stage, processed)
        except (TypeError, ValueError, RecursionError):
            with self._lock, self._connection:
                self._insert(stage, [_storable(stage, one) for one in processed])

    def replace(self, stage: int, processed: Sequence[Processed], digest: str) -> None:
        """Store the outcomes of a stage that maps all items at once; `digest`: that of its items. Later outcomes of
        items that passed before and are unchanged stay."""
        with self._lock, self._connection:
            before = {path: f"{id}\0{data}" for path, id, data in self._item_rows(stage + 1)}
            rows = [row for one in processed for row in _made_rows(stage, one)]
            after = {path: f"{id}\0{data}" for _, path, id, data in rows}
            for path, data in before.items():
                if after.get(path) != data:
                    self._remove(stage + 1, path)
            self._connection.execute("DELETE FROM outcome WHERE stage = ?", (stage,))
            self._insert_outcomes(stage, processed)
            new = [row for row in rows if before.get(row[1]) != after[row[1]]]
            self._connection.executemany("INSERT INTO item (stage, path, id, data) VALUES (?, ?, ?, ?)", new)
            self._set_fact(f"digest-{stage}", digest)

    def forget_failures(self) -> int:
        """Remove failed outcomes, so that their items are processed again; returns how many."""
        with self._lock, self._connection:
            return self._connection.execute("DELETE FROM outcome WHERE state = 'failed'").rowcount

    # -- completions ---------------------------------------------------------------------------------------------------

    def completion(self, key: str) -> Completion | None:
        query = "SELECT response FROM completion WHERE key = ?"
        found = self._all(query, key)
        return Completion(**json.loads(found[0][0])) if found else None

    def add_completion(
        self, key: str, stage: str, request: str, completion: Completion, num_requests: int, seconds: float
    ) -> None:
        """`num_requests`: how many requests it took; 0 for a copy from another run."""
        row = (key, stage, request, json.dumps(asdict(completion)), completion.num_prompt, completion.num_sampled)
        with self._lock, self._connection:
            query = "INSERT OR IGNORE INTO completion VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
            self._connection.execute(query, (*row, num_requests, seconds))

    # -- yields --------------------------------------------------------------------------------------------------------

    def stage_yield(self, stage: int, name: str) -> StageYield:
        query = (
            "SELECT state, reason, COUNT(*), SUM(num_made), SUM(num_cached), SUM(seconds) FROM outcome "
            "WHERE stage = ? GROUP BY state, reason ORDER BY state, COUNT(*) DESC, reason"
        )
        rows = self._all(query, stage)
        by_state: dict[str, dict[str, int]] = {"passed": {}, "rejected": {}, "failed": {}}
        for state, reason, count, *_ in rows:
            by_state[state][reason] = count
        asked = (
            "SELECT COUNT(*), TOTAL(num_prompt), TOTAL(num_sampled) FROM completion WHERE stage = ? AND num_requests"
        )
        ((num_asked, num_prompt, num_sampled),) = self._all(asked, name)
        return StageYield(
            name=name,
            num_in=self.num_items(stage) if stage else int(self.fact("num_records", "0")),
            num_passed=sum(by_state["passed"].values()),
            num_made=sum(row[3] for row in rows),
            rejected=by_state["rejected"],
            failed=by_state["failed"],
            num_asked=num_asked,
            num_cached=sum(row[4] for row in rows),
            num_prompt=int(num_prompt),
            num_sampled=int(num_sampled),
            seconds=sum(row[5] for row in rows),
        )

    def check(self, stage: int, name: str) -> None:
        """Raises unless every item of a finished stage has one outcome, and every item it made is stored."""
        found, num_next = self.stage_yield(stage, name), self.num_items(stage + 1)
        if found.num_in != found.num_passed + found.num_rejected + found.num_failed or found.num_made != num_next:
            raise RunError(
                f"stage {name}: {found.num_in} items in, {found.num_passed} passed + {found.num_rejected} rejected + "
                f"{found.num_failed} failed; {found.num_made} made, {num_next} stored; the store is damaged: start a "
                "run of another name"
            )

    # -- statements ----------------------------------------------------------------------------------------------------

    def _all(self, query: str, *values: str | int) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    def _set_fact(self, name: str, value: str) -> None:
        self._connection.execute("INSERT OR REPLACE INTO fact VALUES (?, ?)", (name, value))

    def _insert(self, stage: int, processed: Sequence[Processed]) -> None:
        self._insert_outcomes(stage, processed)
        rows = (row for one in processed for row in _made_rows(stage, one))
        self._connection.executemany("INSERT INTO item (stage, path, id, data) VALUES (?, ?, ?, ?)", rows)

    def _insert_outcomes(self, stage: int, processed: Iterable[Processed]) -> None:
        query = "INSERT INTO outcome VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        self._connection.executemany(query, (_outcome_row(stage, one) for one in processed))

    def _remove(self, stage: int, path: str) -> None:
        """Remove an item that enters a stage, with everything derived from it."""
        for table in ("item", "outcome"):
            # "0" follows "/": the range holds the paths below this one.
            query = f"DELETE FROM {table} WHERE stage >= ? AND (path = ? OR (path > ? AND path < ?))"
            self._connection.execute(query, (stage, path, f"{path}/", f"{path}0"))


def _storable(stage: int, one: Processed) -> Processed:
    try:
        _outcome_row(stage, one), list(_made_rows(stage, one))
    except (TypeError, ValueError, RecursionError) as error:
        return replace(one, outcome=Failure("not JSON", {"error": f"{type(error).__name__}: {error}"}))
    return one


def _outcome_row(stage: int, one: Processed) -> tuple[str | int | float, ...]:
    match one.outcome:
        case Rejection(reason, evidence):
            state, num_made = "rejected", 0
        case Failure(reason, evidence):
            state, num_made = "failed", 0
        case Item():
            state, reason, evidence, num_made = "passed", "", {}, 1
        case _:
            state, reason, evidence, num_made = "passed", "", {}, len(one.outcome)
    shown = json.dumps(evidence) if evidence else "{}"
    return stage, one.path, _plain(one.id), state, _plain(reason), shown, num_made, one.num_cached, one.seconds


def _made_rows(stage: int, one: Processed) -> Iterator[tuple[int, str, str, str]]:
    """The items made from an item, for the next stage."""
    match one.outcome:
        case Rejection() | Failure():
            return
        case Item(id, data):
            yield stage + 1, one.path, _plain(id), json.dumps(data)
        case _:
            for number, made in enumerate(one.outcome):
                id = f"{made.id}-{number}" if made.id == one.id else made.id
                yield stage + 1, f"{one.path}/{number:06x}", _plain(id), json.dumps(made.data)


def _plain(text: str) -> str:
    """A text that SQLite can store: without lone surrogates."""
    return text if text.isascii() else text.encode(errors="replace").decode()
