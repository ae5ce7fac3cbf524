"""Runs a command under its reaper: start, input, output, limits, and killing it with all that it started.

    reaper's sockets   control ──▶ what to run; closing it kills          status ◀── how it ended
    command's pipes    stdin ──▶                                           stdout, stderr ◀──

Data on `status` must be exactly the two messages that a reaper sends (reaper.py). Anything else was written by the
command, or by a process that it reached: the command is killed with the reason `tampered`.
"""

import asyncio
import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from m2forge.protocols import Command, Outcome, OutcomeReason
from m2forge.sandbox import reaper
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.stream import Drain, Source, StreamWorker

_REAPER = (
    "import sys; folder, _, file = sys.argv.pop(1).rpartition('/'); sys.path.append(folder); "
    "__import__(file.removesuffix('.py')).main()"
)
"""Runs the module in the file that the first argument names; what remains are CONTROL and STATUS."""
_LOADER = ("LD_LIBRARY_PATH",)
"""Environment variables that the reaper's interpreter may need to start; no others, because a command can read them."""
STUCK_S = reaper.GIVE_UP_S + 5.0
"""A reaper that is this late was stopped by its command or is stuck, so it is killed."""
LAST_WORDS_S = 1.0
"""How long streams may stay open after all processes are dead: one may have passed them to an unrelated process."""
_ALL_BYTES = reaper.STARTED.size + reaper.REPORT.size
"""Total bytes that a reaper sends: one message of each kind."""
_Report = tuple[int, bool, bool, float, int]
"""See `reaper.REPORT`."""


class ProcessWorker(StreamWorker):
    def __init__(self, command: Command, config: SandboxConfig, *, is_fed: bool) -> None:
        super().__init__(config, is_fed=is_fed)
        self._command = command
        self._timeout_s = min(config.timeout_s, command.timeout_s or config.timeout_s)
        self._secret = os.urandom(reaper.SECRET_BYTES)
        self._messages = bytearray()
        """Bytes received on `status`, cut to one more than a reaper sends."""
        self._is_over = False
        self._killed: list[int] = []
        """A pidfd for each process that this side killed itself."""

    async def start(self, env: Mapping[str, str], folder: Path) -> None:
        """`env`: the command's complete environment."""
        self._started_s = time.time()
        order = self._order(env, folder)
        control_end, control = (end.detach() for end in socket.socketpair())
        status_end, status = (end.detach() for end in socket.socketpair())
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _REAPER, reaper.__file__, str(control_end), str(status_end)],
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
            await self._connect(control, status)
        except BaseException:
            self._process.kill()  # It has no order yet.
            self._process.wait()
            raise
        self._control.write(len(order).to_bytes(8, "little") + order)
        if not self._is_fed:
            self._streams.send_all(self._command.stdin)
        loop = asyncio.get_running_loop()
        limit_s = self._timeout_s + self._config.grace_s + STUCK_S
        self._alarm = loop.call_later(limit_s, self._kill_reaper, OutcomeReason.TIMEOUT)
        self.ended = loop.create_task(self._finish())

    def kill(self, reason: OutcomeReason) -> None:
        if self._reason is None and not self._is_over:
            self._reason = reason
            self._alarm.cancel()
            self._alarm = asyncio.get_running_loop().call_later(STUCK_S, self._kill_reaper, reason)
        self._control.abort()

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
        return reaper.Order(
            self._secret, list(command.argv), dict(env), str(folder), set_limits, self._timeout_s, config.grace_s
        ).pack()

    async def _connect(self, control: int, status: int) -> None:
        process = self._process
        assert process.stdout is not None
        self._control = await Drain.connect(os.fdopen(control, "wb", buffering=0))
        self._status = await Source.connect(os.fdopen(status, "rb", buffering=0), self._take_status)
        await self._streams.connect(process.stdin, process.stdout, process.stderr)

    async def _finish(self) -> Outcome:
        """Wait for the reaper's end, after which none of the command's processes is left."""
        await self._status.ended
        finished_s = time.time()
        self._alarm.cancel()
        self._process.wait()  # The reaper closes its status socket by exiting.
        self._is_over = True
        if len(self._messages) < _ALL_BYTES and (command := self._read_command()) is not None:
            # The reaper was killed before it could report. The command died with it; this kills the command's group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(command, signal.SIGKILL)
        await self._await_deaths()
        await self._streams.drain(LAST_WORDS_S)
        self._streams.close()
        self._control.abort()
        return self._judge(finished_s)

    def _kill_reaper(self, reason: OutcomeReason) -> None:
        """Kill the reaper and all of its descendants, which it can then not kill itself."""
        self._reason = self._reason or reason
        for process in (*reaper.descendants(self._process.pid), self._process.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                self._killed.append(os.pidfd_open(process))
                os.kill(process, signal.SIGKILL)

    async def _await_deaths(self) -> None:
        """Wait until the processes that this side killed are dead, which takes a moment after the signal."""
        end_s = time.monotonic() + reaper.GIVE_UP_S
        for process in self._killed:
            death = select.poll()
            death.register(process, select.POLLIN)
            while not death.poll(0) and time.monotonic() < end_s:
                await asyncio.sleep(0.005)
            os.close(process)
        self._killed.clear()

    def _judge(self, finished_s: float) -> Outcome:
        # Without a report the reaper was killed: by this side with a reason, or by another process.
        report: _Report = (signal.SIGKILL.value, False, self._reason is not None, 0.0, 0)
        wait_status, is_timeout, is_requested, cpu_s, max_memory_bytes = self._read_report() or report
        status = os.waitstatus_to_exitcode(wait_status)
        reason = self._reason_for(status, is_timeout=is_timeout, is_requested=is_requested)
        stdout, stderr = self._streams.captured()
        return Outcome(
            reason=reason,
            status=status,
            stdout=stdout,
            stderr=stderr,
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
            or (size >= reaper.STARTED.size and self._read_command() is None)
            or (size >= _ALL_BYTES and self._read_report() is None)
        )
        if is_wrong:
            self._kill_reaper(OutcomeReason.TAMPERED)

    def _read_command(self) -> int | None:
        """The command's process id, also its group id; None unless the reaper has sent it."""
        if len(self._messages) < reaper.STARTED.size:
            return None
        secret, command = reaper.STARTED.unpack_from(self._messages)
        return command if secret == self._secret and 1 < command < 1 << 31 else None

    def _read_report(self) -> _Report | None:
        """The reaper's report; None unless the reaper sent it and nothing else was sent."""
        if len(self._messages) != _ALL_BYTES or self._read_command() is None:
            return None
        secret, *report = reaper.REPORT.unpack_from(self._messages, reaper.STARTED.size)
        wait_status, is_timeout, is_requested, cpu_s, max_memory_bytes = report
        is_sound = secret == self._secret and 0 <= cpu_s < math.inf and max_memory_bytes >= 0
        return (wait_status, is_timeout, is_requested, cpu_s, max_memory_bytes) if is_sound else None
