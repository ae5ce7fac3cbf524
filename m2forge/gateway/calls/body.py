"""Reads request bodies without blocking the event loop: small ones inline, large ones in worker processes.

A body is large if it has many bytes or many JSON values: parsing, validating and counting it would block other requests
too long. Workers start at the first large body and read one body at a time; each episode may have one body in a worker
at a time, so that one key cannot starve the others. A body that exceeds a worker's memory limit is refused. A worker
that dies or exceeds its time limit is replaced, and its request gets a retryable error.

Both paths run `body_worker.read_body`, so the result is the same.

Limits the share of the event loop that long requests may take, however many arrive.

Their work cannot be interrupted, so it runs in pieces, one at a time and in order of arrival, and the loop serves other
requests between two pieces. A piece that took t seconds, more than `FREE_S`, is followed by a pause of
`PAUSES` * (t - `FREE_S`), at most `MAX_PAUSE_S`, while other requests are in flight. A short piece with no other
waiting costs no extra iteration of the loop.
"""

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import numpy as np

from m2forge.errors import EngineError
from m2forge.gateway.calls.body_worker import LENGTH, Failed, Head, Read, Refused, Setup, check_text, read_body

T = TypeVar("T")

FREE_S = 0.005
"""Seconds that a turn in a conversation of a few hundred messages takes."""
PAUSES = 7.0
MAX_PAUSE_S = 0.5
LONG_BYTES = 16 << 10
"""Requests with shorter bodies run without taking turns."""


class LoopShare:
    def __init__(self) -> None:
        self.num_requests = 0
        """Number of requests in flight in the whole gateway, short ones included; the gateway updates it."""
        self._is_taken = False
        """Whether a piece or the pause after it is running, or the next piece was woken."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def run(self, work: Callable[[], T]) -> T:
        """Run one piece when it is its turn."""
        if self._is_taken:
            await self._wait()
        self._is_taken = True
        start_s = time.monotonic()
        try:
            return work()
        finally:
            self._end(time.monotonic() - start_s)

    async def _wait(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._wake_next()  # pass on the turn that this piece had
            raise

    def _end(self, took_s: float) -> None:
        is_long = took_s > FREE_S
        if not is_long and not self._waiting:
            self._is_taken = False
            return
        has_others = self.num_requests > 1
        pause_s = min(PAUSES * (took_s - FREE_S), MAX_PAUSE_S) if is_long and has_others else 0.0
        # Even without a pause the loop runs once, so that it can serve other events.
        asyncio.get_running_loop().call_later(pause_s, self._wake_next)

    def _wake_next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False


SMALL_BYTES = 128 << 10
SMALL_VALUES = 8192
"""Maximum number of JSON delimiters in a small body; a message of a conversation has about ten."""
WORKER_S = 30.0
"""Seconds after which a worker that is still reading a body is killed."""
_PIECE = 256 << 10
_BRACKET_BIT = ord("[") ^ ord("{")
_KEPT_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "VIRTUAL_ENV")
"""Environment variables that workers inherit; others are withheld because they may contain API keys."""

_log = logging.getLogger(__name__)


def is_large(body: bytes) -> bool:
    if len(body) > SMALL_BYTES:
        return True
    if len(body) <= SMALL_VALUES:
        return False  # each value takes at least one byte
    # Runs for every body, so it compares many bytes at once: bytes.count stops at each match.
    signs = np.frombuffer(body, np.uint8)
    num_parted = np.count_nonzero(signs == ord(",")) + np.count_nonzero(signs == ord(":"))
    # The two opening brackets differ in one bit.
    return bool(num_parted + np.count_nonzero((signs | _BRACKET_BIT) == ord("{")) > SMALL_VALUES)


class Bodies:
    def __init__(self, setup: Setup, num_workers: int, share: LoopShare) -> None:
        self._setup, self._share = setup, share
        self._idle: list[_Worker | None] = [None] * num_workers
        """Idle workers; None is a worker that has not been started."""
        self._slots = asyncio.Semaphore(num_workers)

    async def read(self, path: str, body: bytes, turn: asyncio.Lock) -> Read:
        """Raises `Refusal` and `AskError`. `turn` is the episode's lock, held while a worker reads."""
        if is_large(body):
            async with turn:
                return await self._read_apart(path, body)
        if len(body) <= LONG_BYTES:
            read = read_body(self._setup, path, body)
        else:
            read = await self._share.run(lambda: read_body(self._setup, path, body))
        if self._setup.sizes.needs_count(read.ask, len(body)):
            await asyncio.to_thread(check_text, self._setup, path, read.ask)
        return read

    async def close(self) -> None:
        """Kill the idle workers; a busy worker ends when its channel closes."""
        for worker in self._idle:
            if worker is not None:
                worker.end()
        self._idle = [None] * len(self._idle)
        # The loop closes their channels in its next iteration.
        await asyncio.sleep(0)

    async def _read_apart(self, path: str, body: bytes) -> Read:
        async with self._worker() as worker:
            try:
                async with asyncio.timeout(WORKER_S):
                    data = await worker.ask(path, body)
            except TimeoutError:
                # The machine may be overloaded, so the request is not to blame.
                raise EngineError(
                    f"reading the body took longer than {WORKER_S:g} s; ask again, or send less"
                ) from None
            except (OSError, EOFError) as error:
                _log.warning("a worker that read a body of %d bytes died (%s)", len(body), type(error).__name__)
                raise EngineError("the process that read the body died; ask again") from None
        answer: Read | Refused | Failed = await self._share.run(lambda: pickle.loads(data))
        if isinstance(answer, Failed):
            _log.error("a body: %s\n%s", answer.kind, answer.frames)
            raise EngineError(f"the gateway failed ({answer.kind}); ask again")
        if isinstance(answer, Refused):
            raise answer.error()
        return answer

    @contextlib.asynccontextmanager
    async def _worker(self) -> "AsyncIterator[_Worker]":
        """Yield a worker exclusively. If anything raises, the worker is killed, since it may still be reading."""
        async with self._slots:
            worker = self._idle.pop()
            try:
                if worker is None:
                    worker = await self._start()
                yield worker
            except BaseException:
                if worker is not None:
                    worker.end()
                worker = None
                raise
            finally:
                self._idle.append(worker)

    async def _start(self) -> "_Worker":
        try:
            async with asyncio.timeout(WORKER_S):
                return await _Worker.start(self._setup)
        except (OSError, TimeoutError) as error:
            _log.warning("a worker that reads bodies did not start (%s)", type(error).__name__)
            raise EngineError("the process that reads bodies did not start; ask again") from None


class _Worker:
    def __init__(
        self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls, setup: Setup) -> "_Worker":
        ours, theirs = socket.socketpair()
        environment = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-c", "from m2forge.gateway.calls.body_worker import main; main()"]
        with theirs:
            process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                env=environment,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        worker = cls(process, *await asyncio.open_connection(sock=ours))
        try:
            await worker._send(pickle.dumps(setup, pickle.HIGHEST_PROTOCOL), is_frame=True)
        except BaseException:
            worker.end()
            raise
        return worker

    async def ask(self, path: str, body: bytes) -> bytes:
        """Return the worker's pickled response."""
        await self._send(pickle.dumps(Head(path, len(body))), is_frame=True)
        await self._send(body)
        (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return await self._reader.readexactly(size)

    async def _send(self, data: bytes, *, is_frame: bool = False) -> None:
        if is_frame:
            self._writer.write(LENGTH.pack(len(data)))
        for start in range(0, len(data), _PIECE):
            self._writer.write(memoryview(data)[start : start + _PIECE])
            await self._writer.drain()

    def end(self) -> None:
        self._writer.transport.abort()  # drops unsent data
        self._process.kill()
        # Reaped in a thread: the kernel may take a while to free the memory.
        threading.Thread(target=self._process.wait, daemon=True).start()
