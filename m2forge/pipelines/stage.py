"""The protocol of a pipeline: a source of items, and stages that map items to items, rejections or failures.

    Source ──items──▶ Stage ──▶ Stage ──▶ SetStage ──▶ … ──▶ accepted items

An item is a JSON object with an id. `m2forge/pipelines/run.py` runs the stages one after the other: every item of a
stage has its outcome in the store before the next stage begins. Items of a `Stage` are independent of each other and
run concurrently; a `SetStage` sees all of its items at once, in order. For every stage

    items in = items passed + items rejected + items failed

A rejection is a decision about the item (reason and evidence) and is final. A failure is no decision about the item: an
endpoint or a sandbox did not work, or the stage raised. The next start of the run processes failed items again.

A killed run resumes to the same files only if an outcome is a function of the item, the configuration, completions and
stored blobs. Stages must not read the clock, and draw random numbers from `Context.random` alone.
"""

import hashlib
import os
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, Protocol, TypeAlias, TypeVar

from m2forge.errors import DataError, NotFoundError
from m2forge.records import JsonValue

T = TypeVar("T")
Messages: TypeAlias = Sequence[Mapping[str, JsonValue]]


@dataclass(frozen=True, slots=True)
class Item:
    id: str
    """Names the item in reports and outputs; its source makes ids unique."""
    data: Mapping[str, JsonValue]

    def adding(self, **fields: JsonValue) -> "Item":
        """The item with these fields added or replaced."""
        return Item(self.id, {**self.data, **fields})

    def text(self, key: str) -> str:
        value = self.data.get(key)
        if not isinstance(value, str):
            raise DataError(f"item {self.id}: expected text in {key!r}, received {str(value)[:100]}")
        return value


@dataclass(frozen=True, slots=True)
class Rejection:
    """A decision against an item."""

    reason: str
    """A few words, the same for all items that are rejected for it: reports count by it."""
    evidence: Mapping[str, JsonValue] = field(default_factory=dict)
    """Evidence of the decision."""
    id: str = ""
    """Only for a source record that became no item: its name."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an item has no outcome. Stages raise instead; only a `SetStage` yields one."""

    reason: str
    evidence: Mapping[str, JsonValue] = field(default_factory=dict)


Passed: TypeAlias = Item | Sequence[Item]
"""One item, or several. Of several, those with the id of their source item get a number appended."""
Outcome: TypeAlias = Passed | Rejection | Failure


@dataclass(frozen=True, slots=True)
class Completion:
    """A model's response, from its endpoint or from the store."""

    message: Mapping[str, JsonValue]
    """In OpenAI's form: role, content, tool_calls."""
    finish_reason: str
    num_prompt: int
    """Number of prompt tokens; 0 if the endpoint does not report it."""
    num_sampled: int

    @property
    def content(self) -> str:
        content = self.message.get("content")
        return content if isinstance(content, str) else ""


class Context(Protocol):
    """Services that a stage may use."""

    @property
    def run_dir(self) -> Path: ...

    @property
    def seed(self) -> int: ...

    def random(self, item: Item) -> random.Random:
        """A generator seeded by the run's seed, the stage and the item."""
        ...

    def ask(
        self,
        model: str,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, JsonValue]] = (),
        draw: int = 0,
        **sampling: JsonValue,
    ) -> Completion:
        """A completion of a model of the table `models`. The same model, messages, tools, sampling parameters and draw
        are requested once per run: the response is stored before this returns. Raises `EndpointError`, which makes the
        item failed, after the configured retries."""
        ...

    def remember(self, key: JsonValue, text: str) -> str:
        """The first text given for this key of the stage in this run, stored before this returns. For prompt texts that
        may differ between executions."""
        ...

    def put(self, data: bytes) -> str:
        """Store bytes that are too large for an item; returns their digest, for the item."""
        ...

    def get(self, digest: str) -> bytes: ...

    def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run a coroutine in the event loop of the run, which all stages share, and wait for its result."""
        ...


def stamp(path: Path) -> str:
    """A text that changes with the size or time of a file, or of any file below a folder, and with their names. Raises
    if the path does not exist."""
    try:
        status = path.stat()
        if not path.is_dir():
            return f"{status.st_size} {status.st_mtime_ns}"
        digest = hashlib.sha256()
        for top, folders, names in os.walk(path):
            folders.sort()
            for found in (Path(top, name) for name in sorted(names)):
                status = found.lstat()
                line = f"{found.relative_to(path)}\0{status.st_size} {status.st_mtime_ns}\n"
                digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()
    except OSError as error:
        raise NotFoundError(f"{path}: cannot be read ({error.strerror})") from error


class Source:
    """Where items come from."""

    name: str = "source"

    def fingerprint(self) -> str:
        """A text that changes with the records: a run is not resumed with other input. Raises if the input is
        missing."""
        raise NotImplementedError

    def read(self, context: Context) -> Iterator[Item | Rejection]:
        """Every record, in the same order each time. Called again after a kill; records that are stored already are
        skipped."""
        raise NotImplementedError


class Stage:
    """Maps one item at a time."""

    name: str
    """Unique in its pipeline."""
    runs_in: ClassVar[Literal["main", "threads", "processes"]] = "main"
    """threads: up to `workers` items at once, for stages that wait for models or commands. processes: the same in
    worker processes, for stages that compute, or whose code may crash; the stage must be picklable. main: one after
    the other, for rules that take less time than a hand-over."""

    def open(self, context: Context) -> None:
        """Called before the first item; in every worker process."""

    def close(self) -> None:
        """Called after the last item, also after an error."""

    def process(self, item: Item, context: Context) -> Passed | Rejection:
        raise NotImplementedError


class SetStage:
    """Maps all items at once."""

    name: str
    repeats: ClassVar[bool] = False
    """Whether it runs at every start, even if its items are those of the last time: it writes files."""

    def process_all(self, items: Iterable[Item], context: Context) -> Iterator[Outcome]:
        """One outcome per item, in order. `items` may be iterated several times."""
        raise NotImplementedError


class Rule(Stage):
    """A stage that is one function."""

    def __init__(self, name: str, decide: Callable[[Item], Passed | Rejection]) -> None:
        self.name, self._decide = name, decide

    def process(self, item: Item, context: Context) -> Passed | Rejection:
        return self._decide(item)


@dataclass(frozen=True, slots=True)
class Pipeline:
    source: Source
    stages: tuple[Stage | SetStage, ...]
