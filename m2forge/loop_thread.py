"""An event loop in a thread of its own, so that synchronous code can run coroutines anywhere: in a script, in a thread,
and in a notebook, whose thread already runs an event loop.

    with LoopThread("name") as thread:
        thread.run(coroutine)                      # its result, or its exception; Ctrl-C cancels it

`run_anywhere` uses such a thread only if the calling thread already runs an event loop.

`run` returns, even on Ctrl-C, after the coroutine has ended, so its cleanup is complete. `close` cancels what still
runs.
"""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Running(Generic[T]):
    """A coroutine that runs in the thread of a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[object, object, T]) -> None:
        self._loop, self._coroutine = loop, coroutine
        self._task: asyncio.Task[T] | None = None
        self._ended: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            loop.call_soon_threadsafe(self._start)
        except RuntimeError:
            coroutine.close()
            raise

    def cancel(self) -> None:
        """Cancel it from any thread; has no effect once it has ended."""
        with contextlib.suppress(RuntimeError):  # a closed loop has ended everything
            self._loop.call_soon_threadsafe(self._cancel)

    def wait(self) -> T:
        """Wait for its end and return its result. An interrupt (Ctrl-C) cancels it first."""
        try:
            return self._ended.result()
        except KeyboardInterrupt:
            self.cancel()
            concurrent.futures.wait([self._ended])
            raise

    def _start(self) -> None:
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        assert self._task is not None, "the loop runs callbacks in order"
        self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._ended.set_exception(concurrent.futures.CancelledError())
        elif (error := task.exception()) is not None:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(task.result())


class LoopThread:
    def __init__(self, name: str, on_close: Callable[[], None] = lambda: None) -> None:
        """`on_close` is called in the thread, after everything that ran in it has ended."""
        self._loop, self._on_close = asyncio.new_event_loop(), on_close
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, coroutine: Coroutine[object, object, T]) -> Running[T]:
        """Raises RuntimeError if the thread is closed."""
        return Running(self._loop, coroutine)

    def run(self, coroutine: Coroutine[object, object, T]) -> T:
        return self.start(coroutine).wait()

    def close(self) -> None:
        """Cancel what runs, wait until it has ended, and end the thread."""
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        """Like `close`, without waiting: safe in any thread, also in a finalizer that garbage collection calls."""
        with contextlib.suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._stopped.set)

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        await self._stopped.wait()
        own = asyncio.current_task()
        while others := asyncio.all_tasks() - {own}:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        self._on_close()


def run_anywhere(coroutine: Coroutine[object, object, T], name: str = "m2forge-loop") -> T:
    """Run a coroutine to its end, also where an event loop already runs in this thread, as in a notebook. `name`: that
    of the thread which then runs it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with LoopThread(name) as thread:
        return thread.run(coroutine)
