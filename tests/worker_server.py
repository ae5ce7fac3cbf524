"""Workers of pytest-xdist, forked from one process that has collected all tests: it imports them in 20 s of CPU.

    python -m tests.worker_server LISTENER    collects, then forks a worker for every client, until its parent ends
    python tests/worker_server.py ADDRESS     a client: execnet starts it as a worker's Python

The client hands its standard streams to the worker, over which execnet talks to it, and lives as long as the worker.
A worker collects again, but finds every module imported, and so do the processes that its tests fork (tests/forked.py).
The server runs no test and starts no thread (but one of
pyarrow's allocator, which allows it), so that a worker begins without locks of another process.
"""

import array
import contextlib
import gc
import importlib
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from unittest import mock

STREAMS = (0, 1, 2)
BOOTSTRAP = "import sys; exec(eval(sys.stdin.readline()))"
"""What execnet gives a Python to run."""
PARALLEL = "TOKENIZERS_PARALLELISM"
"""The variable that keeps tokenizers from starting threads."""


def start(address: Path) -> Callable[[], None]:
    """Start a server and return what ends it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()  # clients that connect while the server collects wait
        command = [sys.executable, "-m", "tests.worker_server", str(listener.fileno())]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(listener.fileno(),))

    def end() -> None:
        server.communicate()

    return end


def client_command(address: Path) -> str:
    """A client, as the Python that execnet starts; the arguments that execnet adds are ignored."""
    return f"{sys.executable} -I -S {__file__} {address}"


def collect() -> None:
    """What fails here fails again, and is reported, when a worker collects."""
    import pytest
    import torch

    from tests import forked

    torch.set_num_threads(1)  # threads of its own would be missing in the workers
    before = os.environ.get(PARALLEL)
    os.environ[PARALLEL] = "false"
    with Path(os.devnull).open("w") as silent, contextlib.redirect_stdout(silent):
        pytest.main(["--collect-only", "-qqq", "-p", "no:cacheprovider"])
        for module in forked.PRELOADED:
            importlib.import_module(module)
    os.environ.pop(PARALLEL)
    if before is not None:
        os.environ[PARALLEL] = before
    gc.freeze()


def serve(descriptor: int) -> None:
    """Return in every worker, its streams in place; end when the standard input is closed."""
    workers = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's concern
    with socket.socket(fileno=descriptor) as listener:
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if (worker := os.fork()) == 0:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                _take_streams(connection)
                return
            workers.append(worker)
            connection.close()
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
    sys.exit(0)


def _take_streams(connection: socket.socket) -> None:
    """The connection stays open until this process ends."""
    size = array.array("i").itemsize * len(STREAMS)
    _, ((_, _, data), *_), _, _ = connection.recvmsg(1, socket.CMSG_SPACE(size))
    for stream, given in zip(STREAMS, array.array("i", data), strict=True):
        os.dup2(given, stream)
        os.close(given)
    connection.detach()
    sys.stdin = open(0)  # noqa: SIM115  (a stream of the process)


def start_fork_server() -> None:
    """Fork the server that multiprocessing would start: a fresh one would import what this process has imported."""

    def fork(path: str, command: Sequence[str], kept: Sequence[int]) -> int:
        if server := os.fork():
            return server
        setattr(forkserver._forkserver, "_lock", threading.Lock())  # noqa: B010  (this process holds the one before)
        os.dup2(os.open(os.devnull, os.O_RDONLY), STREAMS[0])
        os.dup2(STREAMS[2], STREAMS[1])  # execnet reads what a worker writes to its standard output
        for before, after in itertools.pairwise([STREAMS[2], *sorted(kept), os.sysconf("SC_OPEN_MAX")]):
            os.closerange(before + 1, after)
        try:
            exec(command[-1])
        finally:
            os._exit(0)

    resource_tracker.ensure_running()  # a small process of its own
    with mock.patch.object(util, "spawnv_passfds", fork):
        forkserver.ensure_running()


def be_client(address: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        connection.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", STREAMS))])
        for stream in STREAMS[:2]:
            os.close(stream)  # or execnet would not see that the worker has ended
        connection.recv(1)


if __name__ == "__main__" and sys.flags.isolated:
    be_client(sys.argv[1])
elif __name__ == "__main__":
    collect()
    serve(int(sys.argv[1]))
    start_fork_server()
    # As in a process that execnet has started: one that this process spawns imports nothing for its main module.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(BOOTSTRAP, vars(main))
