"""A command's standard streams in an event loop: input is written as the command reads it, output is captured or read.

`StreamWorker` is what the workers of all backends share: streams, and waiting for the end.

Memory stays bounded under a flood of output or a slow reader: both streams of a command that is run go into captures; a
worker's standard output is read only as fast as its lines are received.
"""

import asyncio
import fcntl
import sys
import termios
from collections.abc import Callable, Coroutine
from typing import IO, cast

from m2forge.errors import DataError
from m2forge.protocols import Captured, Outcome, OutcomeReason
from m2forge.sandbox.config import SandboxConfig


class Capture:
    """Captures a stream in bounded memory: its beginning, its end, and its size."""

    def __init__(self, max_bytes: int) -> None:
        self._max_head, self._max_tail = (max_bytes + 1) // 2, max_bytes // 2
        self._head, self._tail = bytearray(), bytearray()
        self.num_bytes = 0

    def add(self, data: bytes) -> None:
        self.num_bytes += len(data)
        room = self._max_head - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room < len(data) else b""
        # Not at every chunk: small chunks would move the tail each time.
        if len(self._tail) > 2 * self._max_tail + 4096:
            self._cut()

    def captured(self) -> Captured:
        self._cut()
        return Captured(bytes(self._head), bytes(self._tail), self.num_bytes)

    def _cut(self) -> None:
        del self._tail[: max(len(self._tail) - self._max_tail, 0)]


class Source(asyncio.Protocol):
    """A process's pipes in an event loop: its output goes to a callback, writes to its input wait for buffer space.

    Reads a pipe to its end and passes each chunk to `take`.
    """

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._transport: asyncio.ReadTransport | None = None
        self._file: IO[bytes] | None = None
        self.num_bytes = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(cls, file: IO[bytes], take: Callable[[bytes], None]) -> "Source":
        loop = asyncio.get_running_loop()
        _, source = await loop.connect_read_pipe(lambda: cls(take), file)
        source._file = file
        return source

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.ReadTransport", transport)

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self._take(data)

    def num_readable(self) -> int:
        """Number of bytes in the pipe that were not read yet."""
        if self._file is None or self._file.closed:
            return 0
        return int.from_bytes(fcntl.ioctl(self._file, termios.FIONREAD, bytes(4)), sys.byteorder)

    def discard(self) -> None:
        """Drop the data that follows."""
        self._take = lambda data: None

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def pause(self) -> None:
        if self._transport is not None and not self.ended.done():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self.ended.done():
            self._transport.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class Drain(asyncio.BaseProtocol):
    """Writes to a pipe; data is discarded once the reader has closed it."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._has_room = asyncio.Event()
        self._has_room.set()

    @classmethod
    async def connect(cls, file: IO[bytes]) -> "Drain":
        loop = asyncio.get_running_loop()
        _, drain = await loop.connect_write_pipe(cls, file)
        return drain

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._has_room.set()

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()

    def write(self, data: bytes) -> None:
        if self._transport is not None and data:
            self._transport.write(data)

    async def flush(self) -> None:
        """Wait until the buffer has room."""
        await self._has_room.wait()

    def close(self) -> None:
        """Close the pipe after all buffered data is written."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        transport = self._transport
        # Do not abort a closing transport with an empty buffer: asyncio would report its end twice.
        if transport is not None and (not transport.is_closing() or transport.get_write_buffer_size()):
            transport.abort()


class CommandStreams:
    """The streams of one command. `is_fed`: whether the caller streams its input and receives lines, as for a worker.
    `on_flood` is called when the output exceeds its limit, if the configuration ends such commands."""

    def __init__(self, config: SandboxConfig, *, is_fed: bool, on_flood: Callable[[], None]) -> None:
        self._config, self._is_fed, self._on_flood = config, is_fed, on_flood
        self._captures = Capture(config.max_output_bytes), Capture(config.max_output_bytes)
        self._lines = bytearray()
        self._num_searched = 0
        self._more = asyncio.Event()
        self._is_over = False
        self._stdin: Drain | None = None
        self._outputs: list[Source] = []

    async def connect(self, stdin: IO[bytes] | None, stdout: IO[bytes], stderr: IO[bytes] | None) -> None:
        """Without `stdin` the command has none; without `stderr` it is merged into `stdout`."""
        if stdin is not None:
            self._stdin = await Drain.connect(stdin)
        self._outputs.append(await Source.connect(stdout, self._take_lines if self._is_fed else self._take_stdout))
        if stderr is not None:
            self._outputs.append(await Source.connect(stderr, self._take_stderr))

    async def send(self, data: bytes) -> None:
        if self._stdin is not None:
            self._stdin.write(data)
            await self._stdin.flush()

    def send_all(self, data: bytes) -> None:
        """Write the command's whole input, as it is read."""
        if self._stdin is not None:
            self._stdin.write(data)
            self._stdin.close()

    async def receive_line(self, timeout_s: float | None = None) -> bytes:
        async with asyncio.timeout(timeout_s):
            while (end := self._lines.find(b"\n", self._num_searched)) < 0:
                self._num_searched = len(self._lines)
                if self._num_searched > self._config.max_output_bytes:
                    raise DataError(
                        f"a worker's line exceeds {self._config.max_output_bytes} bytes; raise max_output_bytes"
                    )
                if self._outputs[0].ended.done():
                    end = len(self._lines) - 1
                    break
                self._outputs[0].resume()
                self._more.clear()
                await self._more.wait()
        line = bytes(self._lines[: end + 1])
        del self._lines[: end + 1]
        self._num_searched = 0
        return line

    async def drain(self, timeout_s: float) -> None:
        """Read what the command has written until its streams end, for at most this long."""
        self._is_over = True
        self._outputs[0].resume()
        try:
            async with asyncio.timeout(timeout_s):
                for source in self._outputs:
                    await asyncio.shield(source.ended)
        except TimeoutError:
            pass

    async def drain_written(self) -> list[Source]:
        """Read what is in the pipes now. Returns the streams that other processes hold open: their data is dropped from
        now on, and they must be closed in the end."""
        self._is_over = True
        self._outputs[0].resume()
        for source in self._outputs:
            num_wanted = source.num_bytes + source.num_readable()
            while source.num_bytes < num_wanted and not source.ended.done():
                await asyncio.sleep(0)
        # A pipe that no process holds is at its end, but the event loop may not have seen it yet.
        await asyncio.sleep(0)
        for source in self._outputs:
            source.discard()
        return [source for source in self._outputs if not source.ended.done()]

    def close(self) -> None:
        """Close what is still open."""
        for source in self._outputs:
            source.close()
        self.end()

    def end(self) -> None:
        """Release the input and wake the receiver of a line."""
        if self._stdin is not None:
            self._stdin.abort()
        self._more.set()

    def captured(self) -> tuple[Captured, Captured]:
        """Standard output, for a worker the lines that were not received, and standard error."""
        stdout, stderr = (capture.captured() for capture in self._captures)
        return (Captured(bytes(self._lines), num_bytes=len(self._lines)) if self._is_fed else stdout), stderr

    def _take_stdout(self, data: bytes) -> None:
        self._take(self._captures[0], data)

    def _take_stderr(self, data: bytes) -> None:
        self._take(self._captures[1], data)

    def _take(self, capture: Capture, data: bytes) -> None:
        capture.add(data)
        if self._config.on_flood == "kill" and capture.num_bytes > self._config.max_output_bytes:
            self._on_flood()

    def _take_lines(self, data: bytes) -> None:
        self._lines += data
        if len(self._lines) > self._config.max_output_bytes and not self._is_over:
            self._outputs[0].pause()
        self._more.set()


class StreamWorker:
    """See `Worker`. `is_fed`: whether the caller streams its input, as for a worker. Belongs to one event loop."""

    ended: asyncio.Task[Outcome]
    """Done when none of the command's processes is left; set when it has started."""

    def __init__(self, config: SandboxConfig, *, is_fed: bool) -> None:
        self._config, self._is_fed = config, is_fed
        self._streams = CommandStreams(config, is_fed=is_fed, on_flood=lambda: self.kill(OutcomeReason.FLOODED))
        self._reason: OutcomeReason | None = None
        """Why this side killed it; None if it did not."""

    def kill(self, reason: OutcomeReason) -> None:
        """Request the kill; `wait` returns once no process is left. A command that already ended keeps its reason."""
        raise NotImplementedError

    async def complete_start(self, starting: Coroutine[object, object, None]) -> None:
        """Run what starts it. A half-started worker could not be stopped, so a cancelled call first completes it."""
        task = asyncio.ensure_future(starting)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await task
            await self.stop()
            raise

    async def send(self, data: bytes) -> None:
        await self._streams.send(data)

    async def receive_line(self, timeout_s: float | None = None) -> bytes:
        return await self._streams.receive_line(timeout_s)

    async def wait(self) -> Outcome:
        return await asyncio.shield(self.ended)

    async def wait_or_stop(self) -> Outcome:
        """Wait for its end; a cancelled call stops it first."""
        try:
            return await self.wait()
        except asyncio.CancelledError:
            await self.stop()
            raise

    async def stop(self) -> Outcome:
        self.kill(OutcomeReason.KILLED)
        return await self.wait()

    def _reason_for(self, status: int, *, is_timeout: bool, is_requested: bool) -> OutcomeReason:
        """Why it ended. `status`: negative for a signal; `is_requested`: whether this side killed it."""
        if is_timeout:
            return OutcomeReason.TIMEOUT
        if is_requested:
            return self._reason or OutcomeReason.KILLED
        return OutcomeReason.SIGNALLED if status < 0 else OutcomeReason.EXITED
