"""A worker process that reads large bodies for the gateway; its argument is a socket's file descriptor.

It receives a `Setup` once, then for each request a `Head` (path and size) and the body. It sends back an `Ask` with the
body's digest, or the reason for refusing the request. Frames are a little-endian uint64 length and a pickle; both ends
are this package. The worker limits its own memory, so that parsed JSON cannot exhaust the gateway's.
"""

import os
import pickle
import resource
import socket
import struct
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from m2forge.gateway.dialects import digest_of, read_ask, too_long
from m2forge.gateway.exchange import Ask, AskError
from m2forge.gateway.limits import Refusal
from m2forge.gateway.prompt_size import PromptSizes, PromptTooLongError

NICENESS = 10
"""Lowers the worker's priority so that the event loop runs first on a busy machine."""
LENGTH = struct.Struct("<Q")
MEMORY_BYTES = 1 << 30
"""Minimum address space limit, beyond what the process uses at start."""
MEMORY_PER_BODY_BYTE = 16


@dataclass(frozen=True, slots=True)
class Setup:
    sizes: PromptSizes
    max_depth: int
    max_body_bytes: int


@dataclass(frozen=True, slots=True)
class Head:
    """Precedes each body."""

    path: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Read:
    ask: Ask
    digest: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Picklable form of `Refusal` and `AskError`, whose constructors take more than a message."""

    message: str
    status: int | None = None
    field: str | None = None
    code: str | None = None

    def error(self) -> Refusal | AskError:
        return (
            AskError(self.message, self.field, self.code) if self.status is None else Refusal(self.status, self.message)
        )


@dataclass(frozen=True, slots=True)
class Failed:
    """A failure of the gateway, without the error message, which may contain prompt text."""

    kind: str
    frames: str


def read_body(setup: Setup, path: str, body: bytes) -> Read:
    """Raises `Refusal` and `AskError`. Does not check the length of the text."""
    ask = read_ask(path, body, setup.max_depth)
    try:
        setup.sizes.check_counts(ask)
    except PromptTooLongError as error:
        raise too_long(path, error.num_tokens, setup.sizes.context) from None
    return Read(ask, digest_of(path, body))


def check_text(setup: Setup, path: str, ask: Ask) -> None:
    """Raises the vendor's error if the text is longer than the context."""
    try:
        setup.sizes.check_text(ask)
    except PromptTooLongError as error:
        raise too_long(path, error.num_tokens, setup.sizes.context) from None


def _answer(setup: Setup, path: str, body: bytes) -> Read | Refused | Failed:
    try:
        read = read_body(setup, path, body)
        if setup.sizes.needs_count(read.ask, len(body)):
            check_text(setup, path, read.ask)
        return read
    except Refusal as error:
        return Refused(str(error), status=error.status)
    except AskError as error:
        return Refused(str(error), field=error.field, code=error.code)
    except MemoryError:
        return Refused("the body takes more memory than a request may; send less", status=413)
    except Exception as error:  # noqa: BLE001  (the worker continues; the gateway logs it)
        return Failed(type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        stream = channel.makefile("rwb")

        def receive() -> object:
            (size,) = LENGTH.unpack(_exactly(LENGTH.size))
            return pickle.loads(_exactly(size))

        def _exactly(size: int) -> bytes:
            data = stream.read(size)
            if len(data) < size:
                raise SystemExit(0)  # the gateway has exited
            return data

        setup = receive()
        assert isinstance(setup, Setup)
        os.nice(NICENESS)
        _limit_memory(max(MEMORY_BYTES, MEMORY_PER_BODY_BYTE * setup.max_body_bytes))
        while True:
            head = receive()
            assert isinstance(head, Head)
            answer = _answer(setup, head.path, _exactly(head.num_bytes))
            data = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
            del answer
            try:
                stream.write(LENGTH.pack(len(data)))
                stream.write(data)
                stream.flush()
            except OSError:
                raise SystemExit(0) from None  # the gateway has exited


def _limit_memory(num_bytes: int) -> None:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return  # not Linux
    used = int(statm.read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = used + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
