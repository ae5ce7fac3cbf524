"""A worker process that reads large bodies for the gateway (`body.py`); its argument is a socket's file descriptor.

It receives a `Setup` once, then for each request a `Head` and the body. It sends back a `Read`, or why it refuses the
request. Frames are a little-endian uint64 length and a pickle; both ends are this package. The worker limits its own
memory, so that parsed JSON cannot exhaust the gateway's.
"""

import os
import pickle
import resource
import socket
import sys
import traceback
from pathlib import Path

from m2forge.gateway.calls.body import LENGTH, Failed, Head, Items, Read, Refused, Setup, check_text, read_body
from m2forge.gateway.dialects.types import BadRequestError, UnknownItemError
from m2forge.gateway.http.limits import HTTPError

NICENESS = 10
"""Lowers the worker's priority so that the event loop runs first on a busy machine."""
MEMORY_BYTES = 1 << 30
"""Minimum address space limit, beyond what the process uses at start."""
MEMORY_PER_BODY_BYTE = 16


def _read(setup: Setup, path: str, body: bytes, items: Items) -> Read | Refused | Failed:
    try:
        read = read_body(setup, path, body, items)
        if setup.sizes.needs_count(read.request, len(body)):
            check_text(setup, path, read.request)
        return read
    except HTTPError as error:
        return Refused(str(error), status=error.status)
    except UnknownItemError as error:
        return Refused(str(error), field=error.field, unknown_items=error.ids)
    except BadRequestError as error:
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
            result = _read(setup, head.path, _exactly(head.num_bytes), head.items)
            data = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
            del result
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
