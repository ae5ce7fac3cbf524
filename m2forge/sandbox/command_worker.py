"""Runs a command under its keeper: start, input, output, limits, and killing it with all that it started.

    keeper's sockets   control ──▶ what to run; closing it kills          status ◀── how it ended
    command's pipes    stdin ──▶                                           stdout, stderr ◀──

Data on `status` must be exactly the two messages that a keeper sends (keeper.py). Anything else was written by the
command, or by a process that it reached: the command is killed with the reason `tampered`.

Memory stays bounded under a flood of output or a slow reader: both streams of a command that is run go into captures; a
worker's standard output is read only as fast as its lines are received.
"""

import asyncio
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from m2forge.errors import DataError
from m2forge.protocols import Captured, Command, Outcome, OutcomeReason
from m2forge.sandbox import keeper
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
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(cls, file: IO[bytes], take: Callable[[bytes], None]) -> "Source":
        loop = asyncio.get_running_loop()
        _, source = await loop.connect_read_pipe(lambda: cls(take), file)
        return source

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.ReadTransport", transport)

    def data_received(self, data: bytes) -> None:
        self._take(data)

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


_KEEPER = (
    "import sys; folder, _, file = sys.argv.pop(1).rpartition('/'); sys.path.append(folder); "
    "__import__(file.removesuffix('.py')).main()"
)
"""Runs the module in the file that the first argument names; what remains are CONTROL and STATUS."""
_LOADER = ("LD_LIBRARY_PATH",)
"""Environment variables that the keeper's interpreter may need to start; no others, because a command can read them."""
STUCK_S = keeper.GIVE_UP_S + 5.0
"""A keeper that is this late was stopped by its command or is stuck, so it is killed."""
LAST_WORDS_S = 1.0
"""How long streams may stay open after all processes are dead: one may have passed them to an unrelated process."""
_ALL_BYTES = keeper.STARTED.size + keeper.REPORT.size
"""Total bytes that a keeper sends: one message of each kind."""
_Report = tuple[int, bool, bool, float, int]
"""See `keeper.REPORT`."""


@dataclass(slots=True)
class _Pipes:
    control: Drain
    status: Source
    stdin: Drain
    stdout: Source
    stderr: Source | None


class ProcessWorker:
    """See `Worker`. `is_fed`: whether the caller streams its input, as for a worker. Belongs to one event loop."""

    def __init__(self, command: Command, config: SandboxConfig, *, is_fed: bool) -> None:
        self._command, self._config, self._is_fed = command, config, is_fed
        self._timeout_s = min(config.timeout_s, command.timeout_s or config.timeout_s)
        self._stdout, self._stderr = Capture(config.max_output_bytes), Capture(config.max_output_bytes)
        self._lines = bytearray()
        self._num_searched = 0
        self._more = asyncio.Event()
        self._secret = os.urandom(keeper.SECRET_BYTES)
        self._messages = bytearray()
        """Bytes received on `status`, cut to one more than a keeper sends."""
        self._is_over = False
        self._reason: OutcomeReason | None = None
        """Why this side killed it; None if it did not."""
        self.ended: asyncio.Task[Outcome]
        """Done when none of the command's processes is left; set by `start`."""

    async def start(self, env: Mapping[str, str], folder: Path) -> None:
        """`env`: the command's complete environment."""
        self._started_s = time.time()
        order = self._order(env, folder)
        control_end, control = (end.detach() for end in socket.socketpair())
        status_end, status = (end.detach() for end in socket.socketpair())
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _KEEPER, keeper.__file__, str(control_end), str(status_end)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if self._command.merges_stderr else subprocess.PIPE,
                env={name: os.environ[name] for name in _LOADER if name in os.environ},
                pass_fds=(control_end, status_end),
                start_new_session=True,
                bufsize=0,
            )
        except BaseException:
            os.close(control)
            os.close(status)
            raise
        finally:
            os.close(control_end)
            os.close(status_end)
        try:
            self._pipes = await self._connect(control, status)
        except BaseException:
            self._process.kill()  # It has no order yet.
            self._process.wait()
            raise
        self._pipes.control.write(len(order).to_bytes(8, "little") + order)
        if not self._is_fed:
            self._pipes.stdin.write(self._command.stdin)
            self._pipes.stdin.close()
        loop = asyncio.get_running_loop()
        limit_s = self._timeout_s + self._config.grace_s + STUCK_S
        self._alarm = loop.call_later(limit_s, self._kill_keeper, OutcomeReason.TIMEOUT)
        self.ended = loop.create_task(self._finish())

    # -- Worker --------------------------------------------------------------------------------------------------------

    async def send(self, data: bytes) -> None:
        self._pipes.stdin.write(data)
        await self._pipes.stdin.flush()

    async def receive_line(self, timeout_s: float | None = None) -> bytes:
        async with asyncio.timeout(timeout_s):
            while (end := self._lines.find(b"\n", self._num_searched)) < 0:
                self._num_searched = len(self._lines)
                if self._num_searched > self._config.max_output_bytes:
                    raise DataError(
                        f"a worker's line exceeds {self._config.max_output_bytes} bytes; raise max_output_bytes"
                    )
                if self._pipes.stdout.ended.done():
                    end = len(self._lines) - 1
                    break
                self._pipes.stdout.resume()
                self._more.clear()
                await self._more.wait()
        line = bytes(self._lines[: end + 1])
        del self._lines[: end + 1]
        self._num_searched = 0
        return line

    async def wait(self) -> Outcome:
        return await asyncio.shield(self.ended)

    async def stop(self) -> Outcome:
        self.kill(OutcomeReason.KILLED)
        return await self.wait()

    def kill(self, reason: OutcomeReason) -> None:
        """Request the kill; `wait` returns once no process is left. A command that already ended keeps its reason."""
        if self._reason is None and not self._is_over:
            self._reason = reason
            self._alarm.cancel()
            self._alarm = asyncio.get_running_loop().call_later(STUCK_S, self._kill_keeper, reason)
        self._pipes.control.abort()

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    def _order(self, env: Mapping[str, str], folder: Path) -> bytes:
        config, command = self._config, self._command
        limits = {
            "RLIMIT_AS": config.max_memory_bytes,
            "RLIMIT_CPU": config.max_cpu_s,
            "RLIMIT_FSIZE": config.max_file_bytes,
            "RLIMIT_NPROC": config.max_processes,
            "RLIMIT_CORE": 0,
        }
        set_limits = {name: most for name, most in limits.items() if most is not None}
        return keeper.Order(
            self._secret, list(command.argv), dict(env), str(folder), set_limits, self._timeout_s, config.grace_s
        ).pack()

    async def _connect(self, control: int, status: int) -> _Pipes:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        return _Pipes(
            control=await Drain.connect(os.fdopen(control, "wb", buffering=0)),
            status=await Source.connect(os.fdopen(status, "rb", buffering=0), self._take_status),
            stdin=await Drain.connect(process.stdin),
            stdout=await Source.connect(process.stdout, self._take_lines if self._is_fed else self._take_stdout),
            stderr=None if process.stderr is None else await Source.connect(process.stderr, self._take_stderr),
        )

    async def _finish(self) -> Outcome:
        """Wait for the keeper's end, after which none of the command's processes is left."""
        pipes = self._pipes
        await pipes.status.ended
        finished_s = time.time()
        self._alarm.cancel()
        self._process.wait()  # The keeper closes its status socket by exiting.
        self._is_over = True
        if len(self._messages) < _ALL_BYTES and (command := self._read_command()) is not None:
            # The keeper was killed before it could report. The command died with it; this kills the command's group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(command, signal.SIGKILL)
        pipes.stdout.resume()
        streams = [source for source in (pipes.stdout, pipes.stderr) if source is not None]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                for source in streams:
                    await asyncio.shield(source.ended)
        for source in streams:
            source.close()
        pipes.stdin.abort()
        pipes.control.abort()
        self._more.set()
        return self._judge(finished_s)

    def _kill_keeper(self, reason: OutcomeReason) -> None:
        """Kill the keeper and all of its descendants, which it can then not kill itself."""
        self._reason = self._reason or reason
        for process in (*keeper.descendants(self._process.pid), self._process.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)

    def _judge(self, finished_s: float) -> Outcome:
        # Without a report the keeper was killed: by this side with a reason, or by another process.
        report: _Report = (signal.SIGKILL.value, False, self._reason is not None, 0.0, 0)
        wait_status, is_timeout, is_requested, cpu_s, max_memory_bytes = self._read_report() or report
        status = os.waitstatus_to_exitcode(wait_status)
        if is_timeout:
            reason = OutcomeReason.TIMEOUT
        elif is_requested:
            reason = self._reason or OutcomeReason.KILLED
        else:
            reason = OutcomeReason.SIGNALLED if status < 0 else OutcomeReason.EXITED
        stdout = Captured(bytes(self._lines), num_bytes=len(self._lines)) if self._is_fed else self._stdout.captured()
        return Outcome(
            reason=reason,
            status=status,
            stdout=stdout,
            stderr=self._stderr.captured(),
            started_s=self._started_s,
            finished_s=max(finished_s, self._started_s),
            cpu_s=cpu_s,
            max_memory_bytes=max_memory_bytes,
        )

    # -- incoming data -------------------------------------------------------------------------------------------------

    def _take_status(self, data: bytes) -> None:
        self._messages += data[: _ALL_BYTES + 1 - len(self._messages)]
        size = len(self._messages)
        is_wrong = (
            size > _ALL_BYTES
            or (size >= keeper.STARTED.size and self._read_command() is None)
            or (size >= _ALL_BYTES and self._read_report() is None)
        )
        if is_wrong:
            self._kill_keeper(OutcomeReason.TAMPERED)

    def _read_command(self) -> int | None:
        """The command's process id, also its group id; None unless the keeper has sent it."""
        if len(self._messages) < keeper.STARTED.size:
            return None
        secret, command = keeper.STARTED.unpack_from(self._messages)
        return command if secret == self._secret and 1 < command < 1 << 31 else None

    def _read_report(self) -> _Report | None:
        """The keeper's report; None unless the keeper sent it and nothing else was sent."""
        if len(self._messages) != _ALL_BYTES or self._read_command() is None:
            return None
        secret, *report = keeper.REPORT.unpack_from(self._messages, keeper.STARTED.size)
        wait_status, is_timeout, is_requested, cpu_s, max_memory_bytes = report
        is_sound = secret == self._secret and 0 <= cpu_s < math.inf and max_memory_bytes >= 0
        return (wait_status, is_timeout, is_requested, cpu_s, max_memory_bytes) if is_sound else None

    def _take_stdout(self, data: bytes) -> None:
        self._stdout.add(data)
        self._stop_if_flooded()

    def _take_stderr(self, data: bytes) -> None:
        self._stderr.add(data)
        self._stop_if_flooded()

    def _stop_if_flooded(self) -> None:
        most = max(self._stdout.num_bytes, self._stderr.num_bytes)
        if self._config.on_flood == "kill" and most > self._config.max_output_bytes:
            self.kill(OutcomeReason.FLOODED)

    def _take_lines(self, data: bytes) -> None:
        self._lines += data
        if len(self._lines) > self._config.max_output_bytes and not self._is_over:
            self._pipes.stdout.pause()
        self._more.set()
