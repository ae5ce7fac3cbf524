"""A command of a sandbox that has a PID 1 of ours: its streams are pipes from here to its process."""

import asyncio
import contextlib
import os
import signal
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from m2forge.protocols import Command, Outcome, OutcomeReason
from m2forge.sandbox.archive import BrokenStreamError
from m2forge.sandbox.channel import Channel, Kind, pack_text, pack_texts
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.stream import Source, StreamWorker

EXECUTE, PACK, UNPACK, PACK_UPPER, BUILD = range(5)
"""What a RUN frame asks for: a program, or one of PID 1's own ways to read and write files."""
_EXIT = struct.Struct("<iBBQQ")
_NO_LIMIT = (1 << 64) - 1
MAX_FILES = 65_536
"""Open files of each process."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the kernel limits in each process of a command."""

    address_bytes: int | None
    cpu_s: int | None
    file_bytes: int | None
    num_processes: int | None

    def pack(self) -> bytes:
        values = (self.address_bytes, self.cpu_s, self.file_bytes, self.num_processes, MAX_FILES)
        return struct.pack("<5Q", *(_NO_LIMIT if value is None else value for value in values))


def run_payload(command: Command, mode: int, config: SandboxConfig, limits: Limits, env: Mapping[str, str]) -> bytes:
    timeout_s = min(config.timeout_s, command.timeout_s or config.timeout_s)
    times = struct.pack("<BQQ", mode, max(int(timeout_s * 1000), 1), int(config.grace_s * 1000))
    texts = pack_text(command.user or config.user) + pack_text(config.workspace) + pack_texts(command.argv)
    return times + limits.pack() + texts + pack_texts([f"{name}={value}" for name, value in env.items()])


class InitWorker(StreamWorker):
    """`takes_oom_kill`: whether the kernel has killed a process for want of memory since the last call."""

    def __init__(
        self,
        id: int,
        channel: Channel,
        config: SandboxConfig,
        *,
        is_fed: bool,
        takes_oom_kill: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(config, is_fed=is_fed)
        self._id, self._channel, self._takes_oom_kill = id, channel, takes_oom_kill
        self._exit: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._kills: set[asyncio.Task[None]] = set()
        self.is_started = False
        """Whether `ended` is set."""

    async def start(self, payload: bytes, command: Command, keep: Callable[[Source], None]) -> None:
        """`keep` receives the streams that processes hold open after the command has ended."""
        self._started_s = time.time()
        has_input = self._is_fed or bool(command.stdin)
        inner, outer = [], []
        try:
            for is_input in (True, False, False):
                if is_input and not has_input:
                    inner.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
                elif len(inner) == 2 and command.merges_stderr:
                    inner.append(os.dup(inner[1]))
                else:
                    ends = os.pipe2(os.O_CLOEXEC)
                    inner.append(ends[0 if is_input else 1])
                    outer.append(os.fdopen(ends[1 if is_input else 0], "wb" if is_input else "rb", buffering=0))
            await self._channel.send(Kind.RUN, self._id, payload, inner)
        except BaseException:
            for file in outer:
                file.close()
            raise
        finally:
            for descriptor in inner:
                os.close(descriptor)
        stdin = outer.pop(0) if has_input else None
        await self._streams.connect(stdin, outer[0], outer[1] if len(outer) > 1 else None)
        if not self._is_fed:
            self._streams.send_all(command.stdin)
        self.ended = asyncio.get_running_loop().create_task(self._finish(keep))
        self.is_started = True

    def kill(self, reason: OutcomeReason) -> None:
        if self._reason is None and not self._exit.done():
            self._reason = reason
            task = asyncio.get_running_loop().create_task(self._channel.send(Kind.KILL, self._id, b""))
            self._kills.add(task)
            task.add_done_callback(self._kills.discard)

    def take_exit(self, payload: bytes | None) -> None:
        """PID 1's report; None if the sandbox ended before."""
        if not self._exit.done():
            self._exit.set_result(payload)

    def lose(self, reason: OutcomeReason | None) -> None:
        """The sandbox ended, for that reason if it was closed here."""
        self._reason = self._reason or reason
        self.take_exit(None)

    async def _finish(self, keep: Callable[[Source], None]) -> Outcome:
        payload = await self._exit
        finished_s = time.time()
        for source in await self._streams.drain_written():
            keep(source)
        self._streams.end()
        stdout, stderr = self._streams.captured()
        outcome = Outcome(OutcomeReason.EXITED, 0, stdout, stderr, self._started_s, max(finished_s, self._started_s))
        if payload is None:
            return replace(outcome, reason=self._reason or OutcomeReason.SIGNALLED, status=-signal.SIGKILL.value)
        wait_status, is_timeout, is_requested, cpu_us, max_memory_bytes = _EXIT.unpack(payload)
        status = os.waitstatus_to_exitcode(wait_status)
        reason = self._reason_for(status, is_timeout=is_timeout, is_requested=is_requested)
        if reason is OutcomeReason.SIGNALLED and status == -signal.SIGKILL and self._takes_oom_kill():
            reason = OutcomeReason.MEMORY
        return replace(outcome, reason=reason, status=status, cpu_s=cpu_us / 1e6, max_memory_bytes=max_memory_bytes)


class Transfer:
    """A stream of files between a thread here and one of PID 1's own processes."""

    def __init__(self, id: int, channel: Channel) -> None:
        self._id, self._channel = id, channel
        self._exit: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    def take_exit(self, payload: bytes | None) -> None:
        if not self._exit.done():
            self._exit.set_result(payload)

    def lose(self, reason: OutcomeReason | None) -> None:
        self.take_exit(None)

    async def num_killed(self) -> int | None:
        """What PID 1 reports when it has killed all processes; None if the sandbox ended before."""
        report = await self._exit
        return None if report is None else int(_EXIT.unpack(report)[3])

    async def run(self, payload: bytes, *, is_input: bool, use: Callable[[int], None]) -> tuple[int, str]:
        """`use` reads or writes the stream's descriptor in a thread. Returns the exit status and what was said. A
        stream that breaks off here has its cause on the other side, so it is an error only if that side succeeded."""
        near, far = reversed(os.pipe2(os.O_CLOEXEC)) if is_input else os.pipe2(os.O_CLOEXEC)
        said, said_end = os.pipe2(os.O_CLOEXEC)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            fds = (far, null, said_end) if is_input else (null, far, said_end)
            await self._channel.send(Kind.RUN, self._id, payload, fds)
        except BaseException:
            os.close(near)
            os.close(said)
            raise
        finally:
            for descriptor in (far, null, said_end):
                os.close(descriptor)
        moving = asyncio.ensure_future(asyncio.to_thread(_use_and_close, use, near))
        try:
            await asyncio.wait([moving])
            report = await asyncio.shield(self._exit)
            text = os.read(said, 4096).decode(errors="replace").strip()
        except asyncio.CancelledError:
            # The thread ends with the stream, and the stream with the process on the other side.
            await self._channel.send(Kind.KILL, self._id, b"")
            await asyncio.wait([moving])
            await asyncio.wait([self._exit])
            moving.exception()
            raise
        finally:
            os.close(said)
        status = -signal.SIGKILL.value if report is None else os.waitstatus_to_exitcode(_EXIT.unpack(report)[0])
        problem = moving.exception()
        if problem is not None and (status == 0 or not isinstance(problem, BrokenPipeError | BrokenStreamError)):
            raise problem
        return status, text


def _use_and_close(use: Callable[[int], None], descriptor: int) -> None:
    try:
        use(descriptor)
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
