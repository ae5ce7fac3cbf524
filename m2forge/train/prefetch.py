"""Prefetches packs in a thread, each step's with the source's state after them: a checkpoint records what was trained
on, not what was prefetched."""

import queue
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from m2forge.records import JsonValue, Pack

DEPTH = 2


class PackSource(Protocol):
    """A source of packs, such as a corpus or SFT trajectories."""

    @property
    def domains(self) -> tuple[str, ...]:
        """Names that `Pack.tags` index into."""
        ...

    def next_pack(self) -> Pack: ...

    def state(self) -> Mapping[str, JsonValue]:
        """Small and JSON-serializable; a source created with it resumes exactly here."""
        ...


class Ahead(NamedTuple):
    packs: list[Pack]
    state: Mapping[str, JsonValue]
    """State of the source after these packs."""


class Prefetch:
    """Use as a context manager; `take` returns the packs of one step."""

    def __init__(self, source: PackSource, packs_per_step: int) -> None:
        self._source, self._packs_per_step = source, packs_per_step
        self._queue: queue.Queue[Ahead | BaseException] = queue.Queue(DEPTH)
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
        self.waited_s = 0.0
        """Seconds the last `take` waited."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving.set()
        while self._thread.is_alive():
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def take(self) -> Ahead:
        start_s = time.perf_counter()
        item = self._queue.get()
        self.waited_s = time.perf_counter() - start_s
        if isinstance(item, BaseException):
            raise item
        return item

    def _fill(self) -> None:
        try:
            while not self._leaving.is_set():
                packs = [self._source.next_pack() for _ in range(self._packs_per_step)]
                self._queue.put(Ahead(packs, self._source.state()))
        except BaseException as error:  # noqa: BLE001, raised again by `take`
            self._queue.put(error)
