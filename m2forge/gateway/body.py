"""Bodies of requests read without stopping the event loop: small ones at once, large ones in worker processes.

A body is large if it has many bytes, or if its JSON has many values: to parse, check and count it would take longer
than others may wait. Workers are started when the first large body comes, one body at a time each; an episode has one
body there at a time, so that one key cannot keep others' waiting. A body that takes a worker too long, or more memory
than it may have, is refused; a worker that dies is replaced, and its request is told to ask again.

What is read does not depend on where: both ways run `body_worker.read_body`.
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
from collections.abc import AsyncIterator

import numpy as np

from m2forge.errors import EngineError
from m2forge.gateway.body_worker import LENGTH, Failed, Head, Read, Refused, Setup, check_text, read_body
from m2forge.gateway.loop_share import LONG_BYTES, LoopShare

SMALL_BYTES = 128 << 10
SMALL_VALUES = 8192
"""Signs that begin or part values of JSON; a message of a conversation has about ten."""
WORKER_S = 30.0
"""A worker that has not read a body by then is ended."""
_PIECE = 256 << 10
_BRACKET_BIT = ord("[") ^ ord("{")
_KEPT_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "VIRTUAL_ENV")
"""Keys stand in the environment, and are none of a worker's business."""

_log = logging.getLogger(__name__)


def is_large(body: bytes) -> bool:
    if len(body) > SMALL_BYTES:
        return True
    if len(body) <= SMALL_VALUES:
        return False  # a value has a byte or more
    # Runs for every body, so it compares many bytes at a time: bytes.count stops at each sign that it finds.
    signs = np.frombuffer(body, np.uint8)
    num_parted = np.count_nonzero(signs == ord(",")) + np.count_nonzero(signs == ord(":"))
    # The two brackets differ in one bit.
    return bool(num_parted + np.count_nonzero((signs | _BRACKET_BIT) == ord("{")) > SMALL_VALUES)


class Bodies:
    def __init__(self, setup: Setup, num_workers: int, share: LoopShare) -> None:
        self._setup, self._share = setup, share
        self._idle: list[_Worker | None] = [None] * num_workers
        """None is one that is not started."""
        self._slots = asyncio.Semaphore(num_workers)

    async def read(self, path: str, body: bytes, turn: asyncio.Lock) -> Read:
        """Raises `Refusal` and `AskError`. `turn` is held while a worker reads: one for each episode."""
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
        """End the idle workers; one that reads a body ends when its channel is closed."""
        for worker in self._idle:
            if worker is not None:
                worker.end()
        self._idle = [None] * len(self._idle)
        # The loop closes their channels when it runs next.
        await asyncio.sleep(0)

    async def _read_apart(self, path: str, body: bytes) -> Read:
        async with self._worker() as worker:
            try:
                async with asyncio.timeout(WORKER_S):
                    data = await worker.ask(path, body)
            except TimeoutError:
                # A busy machine may be the reason, so it is no fault of the request.
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
        """A worker that nothing else uses. It is ended if anything is raised, since it may still be reading."""
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
        command = [sys.executable, "-c", "from m2forge.gateway.body_worker import main; main()"]
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
        """What it answers, pickled."""
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
        self._writer.transport.abort()  # what it was not sent yet is dropped
        self._process.kill()
        # The kernel may take a while to free its memory.
        threading.Thread(target=self._process.wait, daemon=True).start()
