"""The in-process engine: one thread runs the steps, any number of coroutines stream from it.

Prompts, aborts and weights enter through an inbox that the thread empties between steps; chunks leave through one queue
per request. The thread sleeps while idle, and no coroutine polls. An exception in the thread fails every pending and
every later request with the same `EngineError`. The engine stays failed, since weights and KV cache may be
half-written; a process that serves it awaits `watch` and exits.
"""

import asyncio
import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from m2forge.errors import EngineError, M2ForgeError
from m2forge.observe.busy import open_busy_log
from m2forge.protocols import Chunk, EngineState, Prompt
from m2forge.records import PolicyVersion


def merge_chunks(chunks: Sequence[Chunk]) -> Chunk:
    """All chunks of one completion as one."""
    experts = [chunk.experts for chunk in chunks if chunk.experts is not None]
    return Chunk(
        sample=chunks[0].sample,
        ids=np.concatenate([chunk.ids for chunk in chunks]),
        logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
        raw_logprobs=np.concatenate([chunk.raw_logprobs for chunk in chunks]),
        versions=np.concatenate([chunk.versions for chunk in chunks]),
        num_cached=max(chunk.num_cached for chunk in chunks),
        experts=np.concatenate(experts) if experts else None,
        finish_reason=chunks[-1].finish_reason,
    )


def merge_by_sample(chunks: Sequence[Chunk]) -> list[Chunk]:
    """One chunk per completion that has any, in the order of their first chunks."""
    found: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        found.setdefault(chunk.sample, []).append(chunk)
    return [parts[0] if len(parts) == 1 else merge_chunks(parts) for parts in found.values()]


T = TypeVar("T")
CLOSED = "the engine is closed; create another"

_log = logging.getLogger(__name__)


class Steps(Protocol):
    """A synchronous, single-threaded engine that advances by steps. Every sample of an accepted prompt ends in one
    chunk with a finish reason, at the prompt's deadline at the latest, and soon after `abort`."""

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
    def stage(self, folder: Path, version: PolicyVersion) -> Callable[[], None]:
        """Read weights, in any thread while the engine steps; the result loads them, called between two steps."""
        ...

    def metrics(self) -> dict[str, float]: ...


@dataclass(slots=True)
class _Stream:
    """The queue that receives a request's chunks, and the event loop of its consumer."""

    loop: asyncio.AbstractEventLoop
    num_open: int
    """Completions that the core has not finished."""
    queue: asyncio.Queue[Chunk | M2ForgeError] = field(default_factory=asyncio.Queue)


@dataclass(frozen=True, slots=True)
class _Task:
    """A call for the thread to make between two steps, and the callback for its error."""

    run: Callable[[], None]
    fail: Callable[[M2ForgeError], None]


@dataclass(frozen=True, slots=True)
class _Load:
    """A coroutine that waits until this version samples."""

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
        self._is_closing = self._is_staged_out = False
        # One thread: the update that was asked for last takes effect last.
        self._stager = ThreadPoolExecutor(1, "m2forge-staging")
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
        """Returns once these weights sample; the core decides when. They are read while it steps."""
        loop = asyncio.get_running_loop()
        load = _Load(version, loop, loop.create_future())
        with self._condition:
            self._refuse_ended()
            if self._is_staged_out:
                raise EngineError(CLOSED)
            self._stager.submit(self._stage, folder, load)
        await load.done

    def _stage(self, folder: Path, load: _Load) -> None:
        refuse = partial(_call, load.loop, _reject, load.done)
        try:
            start = self._core.stage(folder, load.version)
            self._submit(_Task(lambda: self._start_load(start, load), refuse))
        except M2ForgeError as error:
            refuse(error)
        except BaseException as error:  # noqa: BLE001  (its coroutine must see any error)
            refuse(EngineError(f"{folder} cannot be staged ({type(error).__name__}: {error})"))

    async def state(self) -> EngineState:
        if self._failure is not None:
            raise EngineError(self._failure)
        return self._state

    async def metrics(self) -> dict[str, float]:
        """The core's metrics, read after the current step."""
        return await self._call_on_thread(self._core.metrics)

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
        """Finish staging, then reject new requests, finish those in flight, and stop the thread."""
        with self._condition:
            self._is_staged_out = True
        await asyncio.to_thread(self._stager.shutdown)
        self.stop()
        await asyncio.to_thread(self.join)

    def stop(self) -> None:
        """Like `close`, without waiting."""
        with self._condition:
            self._is_closing = self._is_staged_out = True
            self._condition.notify()
        self._stager.shutdown(wait=False)

    def join(self) -> None:
        """Wait until the thread of a stopped engine has ended."""
        self._thread.join()

    # -- from the loops to the thread ---------------------------------------------------------------------------------

    def _submit(self, task: _Task) -> None:
        with self._condition:
            self._refuse_ended()
            self._inbox.append(task)
            self._condition.notify()

    def _refuse_ended(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)
        if self._is_closing:
            raise EngineError(CLOSED)

    def _abort(self, id: str) -> None:
        """Also accepted while closing; has no effect once the request has ended."""
        with self._condition:
            self._inbox.append(_Task(lambda: self._core.abort(id), lambda error: None))
            self._condition.notify()

    async def _call_on_thread(self, function: Callable[[], T]) -> T:
        """Calls `function` on the thread between two steps and returns its result."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            _call(loop, _resolve, result, function())

        self._submit(_Task(run, lambda error: _call(loop, _reject, result, error)))
        return await result

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait():
                self._empty_inbox()
                outputs = [] if self._core.is_idle else self._step()
                # Set before delivery, so that a client that has received a chunk sees the state after its step.
                self._state = EngineState(self._core.version, self._core.num_running, self._core.num_waiting)
                self._deliver(outputs)
                self._settle_loads()
        except BaseException as error:  # noqa: BLE001  (waiting clients must see any error, even a library's panic)
            _log.exception("the rollout engine failed")
            self._fail_all(f"the engine failed ({type(error).__name__}: {error}); start another")

    def _step(self) -> list[tuple[str, Chunk]]:
        """Runs one step. It returns after the sampled tokens are copied to the host, so the busy time includes the
        device's work."""
        with self._busy:
            return self._core.step()

    def _wait(self) -> bool:
        """Sleep until there is work; returns False once closed and idle."""
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
                self._inbox.appendleft(task)  # `_fail_all` rejects it with the others
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
        # Wake each event loop once per step, not once per token.
        for loop, items in by_loop.items():
            _call(loop, _put_all, items)

    def _start_load(self, start: Callable[[], None], load: _Load) -> None:
        start()
        self._loads.append(load)

    def _settle_loads(self) -> None:
        """Resolve loads of the version that samples, and of earlier loads that it replaced."""
        reached = [index for index, load in enumerate(self._loads) if load.version == self._core.version]
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
    """Waits for one item and takes all that are queued: a consumer slower than the engine gets more tokens at a time.
    An error is always the last item."""
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
    """Run a function on the loop; a closed loop has no consumer left and is ignored."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)
