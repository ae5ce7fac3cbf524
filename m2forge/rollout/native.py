"""The engine of this process: one thread runs the steps, any number of coroutines stream from it.

Prompts, aborts and weights go in through an inbox that the thread empties between steps; chunks come out through one
queue for each request. The thread sleeps while there is nothing to do, and nobody waits by asking again. An exception
in the thread fails every pending and every later request with the same `EngineError`. The engine stays failed, since
weights and KV cache may be half-written; a process that serves it awaits `watch` and exits.
"""

import asyncio
import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from m2forge.errors import EngineError, M2ForgeError
from m2forge.observe.busy import open_busy_log
from m2forge.protocols import Chunk, EngineState, Prompt
from m2forge.records import PolicyVersion
from m2forge.rollout.merge import merge_by_sample

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Steps(Protocol):
    """A synchronous engine, of one thread, that goes on by steps. Every sample of a prompt that it took ends in one
    chunk with a reason, at the prompt's time limit at the latest, and soon after `abort`."""

    @property
    def is_idle(self) -> bool: ...
    @property
    def version(self) -> PolicyVersion: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...

    def add(self, id: str, prompt: Prompt) -> None: ...
    def abort(self, id: str) -> None: ...
    def step(self) -> list[tuple[str, Chunk]]: ...
    def load(self, source: Path, version: PolicyVersion) -> None: ...
    def metrics(self) -> dict[str, float]: ...


@dataclass(slots=True)
class _Stream:
    """Where the chunks of one request go: a queue of the loop that asked."""

    loop: asyncio.AbstractEventLoop
    num_open: int
    """Completions that the core has not ended."""
    queue: asyncio.Queue[Chunk | M2ForgeError] = field(default_factory=asyncio.Queue)


@dataclass(frozen=True, slots=True)
class _Task:
    """Something for the thread to do between two steps, and whom to tell if it cannot be done."""

    run: Callable[[], None]
    fail: Callable[[M2ForgeError], None]


@dataclass(frozen=True, slots=True)
class _Load:
    """Somebody waits until this version samples."""

    version: PolicyVersion
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class _Watcher:
    """A coroutine that waits for the engine's failure."""

    loop: asyncio.AbstractEventLoop
    failed: asyncio.Future[None]


class NativeEngine:
    """See `Engine` and `Watched`."""

    def __init__(self, core: Steps) -> None:
        """From here on `core` belongs to the engine's thread."""
        self._core = core
        self._busy = open_busy_log("engine")
        self._state = EngineState(core.version, 0, 0)
        self._numbers = itertools.count()
        # Shared by the thread and the loops, under the condition's lock:
        self._condition = threading.Condition()
        self._inbox: deque[_Task] = deque()
        self._failure: str | None = None
        self._watchers: list[_Watcher] = []
        self._is_closing = False
        # Touched by the thread alone:
        self._streams: dict[str, _Stream] = {}
        self._loads: deque[_Load] = deque()
        self._thread = threading.Thread(target=self._run, name="m2forge-rollout", daemon=True)
        self._thread.start()

    async def generate(self, prompt: Prompt) -> AsyncGenerator[Chunk, None]:
        loop = asyncio.get_running_loop()
        id, stream = f"r{next(self._numbers)}", _Stream(loop, prompt.num_samples)
        refuse = partial(_call, loop, stream.queue.put_nowait)
        self._submit(_Task(lambda: self._add(id, prompt, stream), refuse))
        num_open = prompt.num_samples
        try:
            while num_open:
                chunks, error = await _take_all(stream.queue)
                for chunk in merge_by_sample(chunks):
                    num_open -= chunk.finish_reason is not None
                    yield chunk
                if error is not None:
                    num_open = 0
                    raise error
        finally:
            if num_open:
                self._abort(id)

    async def load(self, folder: Path, version: PolicyVersion) -> None:
        """Returns when these weights sample; when that is, is the core's to say."""
        loop = asyncio.get_running_loop()
        load = _Load(version, loop, loop.create_future())
        refuse = partial(_call, loop, _reject, load.done)
        self._submit(_Task(lambda: self._start_load(folder, load), refuse))
        await load.done

    async def state(self) -> EngineState:
        if self._failure is not None:
            raise EngineError(self._failure)
        return self._state

    async def metrics(self) -> dict[str, float]:
        """The core's figures, as they are after the step that is under way."""
        return await self._ask(self._core.metrics)

    async def watch(self) -> None:
        """Wait until the engine's thread fails, and raise that failure."""
        loop = asyncio.get_running_loop()
        watcher = _Watcher(loop, loop.create_future())
        with self._condition:
            if self._failure is not None:
                raise EngineError(self._failure)
            self._watchers.append(watcher)
        await watcher.failed

    async def close(self) -> None:
        """Nothing more is accepted; what is under way is finished first."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        await asyncio.to_thread(self._thread.join)

    # -- from the loops to the thread ---------------------------------------------------------------------------------

    def _submit(self, task: _Task) -> None:
        with self._condition:
            if self._failure is not None:
                raise EngineError(self._failure)
            if self._is_closing:
                raise EngineError("the engine is closed; make another")
            self._inbox.append(task)
            self._condition.notify()

    def _abort(self, id: str) -> None:
        """Taken while closing too, and of no effect once the request has ended."""
        with self._condition:
            self._inbox.append(_Task(lambda: self._core.abort(id), lambda error: None))
            self._condition.notify()

    async def _ask(self, question: Callable[[], T]) -> T:
        """What the thread answers between two steps."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            _call(loop, _resolve, answer, question())

        self._submit(_Task(run, lambda error: _call(loop, _reject, answer, error)))
        return await answer

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait():
                self._empty_inbox()
                outputs = [] if self._core.is_idle else self._step()
                # Before anybody hears of this step, so that who has heard sees the state it left.
                self._state = EngineState(self._core.version, self._core.num_running, self._core.num_waiting)
                self._deliver(outputs)
                self._settle_loads()
        except BaseException as error:  # noqa: BLE001  (even a panic of a library's: those who wait must hear of it)
            _log.exception("the rollout engine failed")
            self._fail_all(f"the engine failed ({type(error).__name__}: {error}); start another")

    def _step(self) -> list[tuple[str, Chunk]]:
        """It has read what was sampled when it returns, so the device's work lies within."""
        with self._busy:
            return self._core.step()

    def _wait(self) -> bool:
        """Sleep until there is something to do; false when closed and done."""
        with self._condition:
            while not self._inbox and self._core.is_idle:
                self._busy.flush()
                if self._is_closing:
                    return False
                self._condition.wait()
        return True

    def _empty_inbox(self) -> None:
        while self._inbox:
            task = self._inbox.popleft()
            try:
                task.run()
            except M2ForgeError as error:
                task.fail(error)
            except BaseException:
                self._inbox.appendleft(task)  # to be told with all others
                raise

    def _add(self, id: str, prompt: Prompt, stream: _Stream) -> None:
        self._core.add(id, prompt)
        self._streams[id] = stream

    def _deliver(self, outputs: list[tuple[str, Chunk]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Chunk]]] = {}
        for id, chunk in outputs:
            stream = self._streams[id]
            by_loop.setdefault(stream.loop, []).append((stream, chunk))
            stream.num_open -= chunk.finish_reason is not None
            if not stream.num_open:
                del self._streams[id]
        # One wake-up of a loop for a whole step, not one for each token.
        for loop, items in by_loop.items():
            _call(loop, _put_all, items)

    def _start_load(self, folder: Path, load: _Load) -> None:
        self._core.load(folder, load.version)
        self._loads.append(load)

    def _settle_loads(self) -> None:
        """Answer who waits for the version that samples, and for those it has overtaken."""
        reached = [place for place, load in enumerate(self._loads) if load.version == self._core.version]
        for _ in range(reached[-1] + 1 if reached else 0):
            load = self._loads.popleft()
            _call(load.loop, _resolve, load.done, None)

    def _fail_all(self, failure: str) -> None:
        with self._condition:
            self._failure = failure
            tasks, self._inbox = self._inbox, deque()
            watchers, self._watchers = self._watchers, []
        for stream in self._streams.values():
            _call(stream.loop, stream.queue.put_nowait, EngineError(failure))
        for load in self._loads:
            _call(load.loop, _reject, load.done, EngineError(failure))
        for task in tasks:
            task.fail(EngineError(failure))
        for watcher in watchers:
            _call(watcher.loop, _reject, watcher.failed, EngineError(failure))


async def _take_all(queue: asyncio.Queue[Chunk | M2ForgeError]) -> tuple[list[Chunk], M2ForgeError | None]:
    """What is there, at least one thing: who reads slower than the engine samples gets more tokens at a time. An error
    is the last to come."""
    items = [await queue.get()]
    while not queue.empty():
        items.append(queue.get_nowait())
    last = items[-1]
    return [item for item in items if isinstance(item, Chunk)], last if isinstance(last, M2ForgeError) else None


def _put_all(items: list[tuple[_Stream, Chunk]]) -> None:
    for stream, chunk in items:
        stream.queue.put_nowait(chunk)


def _resolve(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _reject(future: asyncio.Future[T], error: M2ForgeError) -> None:
    if not future.done():
        future.set_exception(error)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    """Run on the loop; one that has been closed meanwhile has nobody left to tell."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)
