"""The frames between this process and a sandbox's PID 1, and how its program is found.

c/sandbox.h describes the frames. A frame may carry descriptors: a command's standard streams go in, listening sockets
come out.
"""

import array
import asyncio
import functools
import socket
import struct
import subprocess
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path

from m2forge.compiled import compiled, find_compiler
from m2forge.errors import ConfigError

FOLDER = Path(__file__).with_name("c")
FLAGS = ("-O2", "-static", "-std=gnu11")
MAX_FRAME_BYTES = 16 << 20
_HEAD = struct.Struct("<IBI")


class Kind(IntEnum):
    SETUP = 1
    RUN = 2
    KILL = 3
    READY = 4
    FAILED = 5
    EXIT = 6


@functools.cache
def program() -> Path:
    """The compiled program that starts a sandbox and is its PID 1."""
    compiler = find_compiler()
    if compiler is None:
        raise ConfigError(
            'sandbox.backend: "namespace" needs a C compiler, and neither cc nor gcc is on the PATH; install gcc, or '
            'choose "process" for trusted programs'
        )
    try:
        return compiled(compiler, sorted(FOLDER.glob("*.[ch]")), "sandbox", FLAGS)
    except subprocess.CalledProcessError as error:
        raise ConfigError(
            f"sandbox.backend: the sandbox's program cannot be compiled: {error.stderr[-2000:]}"
        ) from error


def pack_text(text: str | bytes) -> bytes:
    data = text.encode(errors="surrogateescape") if isinstance(text, str) else text
    return struct.pack("<I", len(data)) + data


def pack_texts(texts: Sequence[str]) -> bytes:
    return struct.pack("<I", len(texts)) + b"".join(map(pack_text, texts))


class Channel:
    """Belongs to one event loop. `take` receives each frame, `on_end` is called once when the other side is gone."""

    def __init__(
        self,
        end: socket.socket,
        take: Callable[[Kind, int, bytes, list[int]], None],
        on_end: Callable[[], None],
    ) -> None:
        self._socket, self._take, self._on_end = end, take, on_end
        self._received, self._fds = bytearray(), list[int]()
        self._lock = asyncio.Lock()
        self._room: asyncio.Future[None] | None = None
        """Done when a frame that waits for room in the socket can go on, or never will."""
        self._loop = asyncio.get_running_loop()
        self.is_open = True
        end.setblocking(False)
        self._loop.add_reader(end.fileno(), self._read)

    async def send(self, kind: Kind, id: int, payload: bytes, fds: Sequence[int] = ()) -> None:
        """A frame to a sandbox that is gone is lost; its end is reported by `on_end`."""
        if len(payload) > MAX_FRAME_BYTES - 5:
            raise ConfigError(f"a command of {len(payload)} bytes; at most {MAX_FRAME_BYTES - 5} are allowed")
        # Half a frame would make the rest of the stream unreadable.
        await asyncio.shield(self._send(_HEAD.pack(len(payload) + 5, kind, id) + payload, fds))

    async def _send(self, frame: bytes, fds: Sequence[int]) -> None:
        async with self._lock:
            rest = memoryview(frame)
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            while rest and self.is_open:
                try:
                    num_sent = self._socket.sendmsg([rest], ancillary)
                except BlockingIOError:
                    self._room = self._loop.create_future()
                    self._loop.add_writer(self._socket.fileno(), self._wake)
                    await self._room
                except (BrokenPipeError, ConnectionResetError):
                    return
                else:
                    rest, ancillary = rest[num_sent:], []

    def _wake(self) -> None:
        self._loop.remove_writer(self._socket.fileno())
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def _read(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, 1 << 16, 32)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        self._fds += fds
        self._received += data
        while len(self._received) >= _HEAD.size:
            size, kind, id = _HEAD.unpack_from(self._received)
            if len(self._received) < size + 4:
                break
            payload = bytes(self._received[_HEAD.size : size + 4])
            del self._received[: size + 4]
            passed, self._fds = self._fds, []
            self._take(Kind(kind), id, payload, passed)
        if not data:
            self.close()
            self._on_end()

    def close(self) -> None:
        """The end of the stream ends the sandbox."""
        if self.is_open:
            self.is_open = False
            self._loop.remove_reader(self._socket.fileno())
            self._wake()
            self._socket.close()
