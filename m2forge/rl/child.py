"""Child processes of a run: the loop starts them, restarts them when they die, and they die with the loop.

    python -m m2forge.rl.child PARENT MODULE ARGUMENTS…

runs a module as `python -m` would, in a process that the kernel kills when its parent ends, for whatever reason.

The loop owns the socket that a server listens on, so it outlives the server: a client that connects during a restart
waits instead of being refused, and an agent whose client library retries broken connections continues.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from m2forge.errors import EngineError, M2ForgeError

PR_SET_PDEATHSIG = 1
MAX_DEATHS = 5
"""Consecutive deaths, each within `SHORT_S` of the start, that end the run: another restart would not help."""
SHORT_S = 10.0
STOP_S = 10.0
FATAL_STATUS = 78
"""Exit status of a process that a restart would not help: the run ends with the last line that it printed."""

_log = logging.getLogger(__name__)


class Child:
    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_folder: Path,
        listener: socket.socket | None = None,
        is_done: Callable[[], bool] = lambda: False,
        keys: Sequence[str] = (),
    ) -> None:
        """`command`: module and arguments. `listener`: the socket it serves. `is_done`: whether its work is complete
        once it exits with 0; never true for a server. `keys`: the lines of its standard input, a pipe, because agents
        can read its arguments and environment."""
        self.name = name
        self.num_starts = 0
        self._command = tuple(command)
        self._keys = "".join(f"{key}\n" for key in keys).encode()
        self._pass_fds = () if listener is None else (listener.fileno(),)
        self._log_path = log_folder / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping, self._is_done = False, is_done

    async def supervise(self) -> None:
        """Run it, restarting it until it is stopped or exits with 0 and its work is complete. Every other exit counts
        as a death: a server that receives SIGTERM also exits with 0."""
        num_short = 0
        while not self._is_stopping:
            started_s = time.monotonic()
            status = await self._run()
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
                *(sys.executable, "-m", "m2forge.rl.child", str(os.getpid()), *self._command),
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


def end_with_error(error: M2ForgeError) -> NoReturn:
    """End this process and the run; the error becomes the last line of its log."""
    print(" ".join(str(error).split()), file=sys.stderr, flush=True)
    sys.exit(FATAL_STATUS)


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
