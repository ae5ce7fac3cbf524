"""Captures a stream in bounded memory: its beginning, its end, and its size."""

from m2forge.protocols import Captured


class Capture:
    def __init__(self, max_bytes: int) -> None:
        self._max_head, self._max_tail = (max_bytes + 1) // 2, max_bytes // 2
        self._head, self._tail = bytearray(), bytearray()
        self.num_bytes = 0

    def add(self, data: bytes) -> None:
        self.num_bytes += len(data)
        room = self._max_head - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room < len(data) else b""
        # Not at every chunk: small chunks would move the whole tail each time.
        if len(self._tail) > 2 * self._max_tail + 4096:
            self._cut()

    def captured(self) -> Captured:
        self._cut()
        return Captured(bytes(self._head), bytes(self._tail), self.num_bytes)

    def _cut(self) -> None:
        del self._tail[: max(len(self._tail) - self._max_tail, 0)]
