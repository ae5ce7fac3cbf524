"""Launches roles as child processes on this machine; they die with the process that launched them.

    python -m m2forge.cluster.local PARENT MODULE ARGUMENTS…

runs a module as `python -m` would, in a process that the kernel kills when its parent ends, for whatever reason.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import platform
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from m2forge.cluster.launcher import FATAL_STATUS, SOCKET, Role
from m2forge.cluster.process_record import ProcessRecord
from m2forge.errors import EngineError
from m2forge.listener import address, listen

PR_SET_PDEATHSIG = 1
BACKLOG = 2048
MAX_DEATHS = 5
"""Consecutive deaths, each within `SHORT_S` of the start, that end the run: another restart would not help."""
SHORT_S = 10.0
STOP_S = 10.0

_log = logging.getLogger(__name__)


class LocalLauncher:
    """See `Launcher`."""

    def __init__(self, log_folder: Path, record_folder: Path | None = None, node: str | None = None) -> None:
        """`record_folder`: of `process_record`; None: nothing is recorded. `node`: what records call this machine;
        None: its name."""
        self._log_folder, self._record_folder, self._node = log_folder, record_folder, node or platform.node()
        self._listeners: list[socket.socket] = []

    async def launch(self, role: Role, is_done: Callable[[], bool] = lambda: False) -> "Child":
        listener = None if role.address is None else listen(*role.address, BACKLOG)
        if listener is not None:
            self._listeners.append(listener)
        child = Child(role, self._log_folder, listener, is_done)
        if self._record_folder is not None:
            child.record = ProcessRecord(self._record_folder, role.name, self._node)
            if child.url:
                child.record.place(child.url)
        return child

    async def close(self) -> None:
        for listener in self._listeners:
            listener.close()


class Child:
    """See `Launched`."""

    def __init__(
        self,
        role: Role,
        log_folder: Path,
        listener: socket.socket | None = None,
        is_done: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = role.name
        self.url = "" if listener is None else address(listener)
        self.keys = role.keys
        self.num_starts = 0
        self._pass_fds = () if listener is None else (listener.fileno(),)
        descriptor = "".join(map(str, self._pass_fds))
        self._command = tuple(descriptor if word == SOCKET else word for word in role.command)
        self._keys = "".join(f"{key}\n" for key in role.keys).encode()
        self._log_path = log_folder / f"{role.name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping, self._is_done = False, is_done
        self.record: ProcessRecord | None = None

    async def supervise(self) -> None:
        num_short = 0
        while not self._is_stopping:
            started_s = time.monotonic()
            if self.record is not None:
                self.record.start()
            status = await self._run()
            if self.record is not None:
                self.record.end(status, is_death=not self._is_over(status))
            if self._is_over(status):
                return
            if status == FATAL_STATUS:
                raise EngineError(f"the {self.name} process: {self._last_line()}")
            num_short = num_short + 1 if time.monotonic() - started_s < SHORT_S else 1
            if num_short >= MAX_DEATHS:
                raise EngineError(f"the {self.name} process ended {num_short} times in a row; see {self._log_path}")
            _log.warning("the %s process ended with status %d; restarting it", self.name, status)

    def _is_over(self, status: int) -> bool:
        return self._is_stopping or (status == 0 and self._is_done())

    async def _run(self) -> int:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self.num_starts += 1
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "m2forge.cluster.local", str(os.getpid()), *self._command),
                stdin=asyncio.subprocess.PIPE if self._keys else asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=self._pass_fds,
                # Ctrl-C goes to the loop, which then stops its children.
                start_new_session=True,
            )
        if self._process.stdin is not None:
            self._process.stdin.write(self._keys)
            self._process.stdin.close()
        return await self._process.wait()

    def _last_line(self) -> str:
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-1] if lines else f"status {FATAL_STATUS}"

    async def stop(self) -> None:
        self._is_stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # The parent died before prctl.


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
