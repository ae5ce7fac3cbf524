"""The server behind both gateways: an engine that does nothing but send prepared chunks, cheaply.

    POST /generate               lines of JSON, as `m2forge serve` answers: token ids with their log-probabilities
    POST /v1/chat/completions    server-sent events, as an OpenAI-compatible server answers
    GET  /health                 the state of an engine, as `m2forge serve` reports it

Both answers have the same text in the same number of chunks, and every chunk is sent by itself. Without a pace all
streams advance in turns, a chunk of each, as the steps of an engine do; with one, a stream's first chunk is sent at
once and the others N milliseconds apart. The stream of a client that disconnects ends.

    python benchmarks/gateway_upstream.py ANSWERS [--pace-ms N]        prints its port
"""

import argparse
import asyncio
import json
import re
from collections import deque
from pathlib import Path
from typing import cast

from gateway_loop import run

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n"
    b"x-request-id: upstream\r\n\r\n"
)
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
_STATE = b'{"version": {"lineage": "scripted", "step": 3}, "num_running": 0, "num_waiting": 0}'
HEALTH = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(_STATE), _STATE)
TYPES = {"/generate": b"application/x-ndjson", "/v1/chat/completions": b"text/event-stream; charset=utf-8"}
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


def framed(chunk: str) -> bytes:
    data = chunk.encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


class Engine:
    """Sends chunks of all streams."""

    def __init__(self, answers: dict[str, list[str]], pace_s: float) -> None:
        self.answers: dict[bytes, list[bytes]] = {}
        for path, chunks in answers.items():
            pieces = [framed(chunk) for chunk in chunks]
            pieces[0] = HEAD % TYPES[path] + pieces[0]
            pieces[-1] += b"0\r\n\r\n"
            self.answers[path.encode()] = pieces
        self._pace_s = pace_s
        self._turns: deque[Stream] = deque()
        self._is_stepping = False
        self._loop = asyncio.get_running_loop()

    def start(self, stream: "Stream") -> None:
        if self._pace_s:
            stream.started_s = self._loop.time()
            self._pace(stream)
            return
        self._turns.append(stream)
        if not self._is_stepping:
            self._is_stepping = True
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        for _ in range(len(self._turns)):
            stream = self._turns.popleft()
            if stream.advance():
                self._turns.append(stream)
        self._is_stepping = bool(self._turns)
        if self._turns:
            self._loop.call_soon(self._step)

    def _pace(self, stream: "Stream") -> None:
        if stream.advance():
            self._loop.call_at(stream.started_s + stream.num_sent * self._pace_s, self._pace, stream)


class Stream(asyncio.Protocol):
    """A connection, and the answer that it is being sent."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._read, self.num_sent, self.started_s = engine, b"", 0, 0.0
        self._chunks: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._read += data
        end = self._read.find(b"\r\n\r\n")
        if end < 0:
            return
        found = _LENGTH.search(self._read, 0, end + 2)
        size = end + 4 + (int(found.group(1)) if found else 0)
        if len(self._read) < size:
            return
        path, self._read = self._read.split(b" ", 2)[1], self._read[size:]
        if path not in self._engine.answers:
            self._transport.write(HEALTH if path == b"/health" else NOT_FOUND)
            return
        self._chunks, self.num_sent = self._engine.answers[path], 0
        self._engine.start(self)

    def advance(self) -> bool:
        """Send the next chunk; whether there is another."""
        if self._transport.is_closing():
            return False
        self._transport.write(self._chunks[self.num_sent])
        self.num_sent += 1
        return self.num_sent < len(self._chunks)


async def serve(answers: dict[str, list[str]], pace_s: float) -> None:
    loop = asyncio.get_running_loop()
    engine = Engine(answers, pace_s)
    server = await loop.create_server(lambda: Stream(engine), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--pace-ms", type=float, default=0.0)
    options = parser.parse_args()
    run(serve(json.loads(options.answers.read_text()), options.pace_ms / 1e3))


if __name__ == "__main__":
    main()
