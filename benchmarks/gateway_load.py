"""Clients of a gateway, many in one process and cheap: prepared requests out, times of what comes back in.

Nothing is parsed: an answer ends with the last chunk of HTTP, and a piece of it has come when its word is there.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

END = b"0\r\n\r\n"


@dataclass(slots=True)
class Timing:
    """One stream."""

    sent_s: float
    ended_s: float = 0.0
    num_bytes: int = 0
    num_events: int = 0
    arrived_s: list[float] = field(default_factory=list)
    """When each of the words came, if they were looked for."""


class Meter:
    """Events of all streams together."""

    def __init__(self) -> None:
        self.num_events = 0


class Client(asyncio.Protocol):
    """One connection, which is used again and again."""

    def __init__(self, words: Sequence[bytes], meter: Meter) -> None:
        self._words, self._meter = words, meter
        self._on_end: Callable[[Client, Timing], None] | None = None
        self._timing = Timing(0.0)
        self._tail, self._is_first = b"", True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def send(self, request: bytes, on_end: "Callable[[Client, Timing], None]") -> None:
        self._on_end, self._tail, self._is_first = on_end, b"", True
        self._timing = Timing(time.monotonic())
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        timing = self._timing
        if self._is_first:
            self._is_first = False
            if not data.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"expected 200, received {data[:600]!r}")
        timing.num_bytes += len(data)
        num_events = data.count(b"\n\n")
        timing.num_events += num_events
        self._meter.num_events += num_events
        if self._words:
            self._note_words(data)
        elif len(data) < len(END):
            data = self._tail + data
        self._tail = data[-64:]
        if data.endswith(END):
            timing.ended_s = time.monotonic()
            assert self._on_end is not None
            self._on_end(self, timing)

    def connection_lost(self, error: Exception | None) -> None:
        if self._on_end is not None and not self._timing.ended_s:
            raise SystemExit(f"a connection broke off: {error}")

    def close(self) -> None:
        self._on_end = None
        self._transport.close()

    def _note_words(self, data: bytes) -> None:
        now_s, arrived_s, whole = time.monotonic(), self._timing.arrived_s, self._tail + data
        while len(arrived_s) < len(self._words) and self._words[len(arrived_s)] in whole:
            arrived_s.append(now_s)


@dataclass(frozen=True, slots=True)
class Load:
    """Measurements of one run in which every client has one stream open."""

    seconds: float
    timings: list[Timing]
    """Timings of the streams that ended within `seconds`."""
    num_events: int
    """Events received within `seconds`, including those of other streams."""

    @property
    def streams_per_s(self) -> float:
        return len(self.timings) / self.seconds

    @property
    def events_per_stream(self) -> float:
        return sum(timing.num_events for timing in self.timings) / max(len(self.timings), 1)


async def connect(port: int, num_clients: int, words: Sequence[bytes], meter: Meter) -> list[Client]:
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(lambda: Client(words, meter), "127.0.0.1", port) for _ in range(num_clients)]
    return [client for _, client in made]


async def saturate(port: int, requests: Sequence[Iterator[bytes]], warm_s: float, seconds: float) -> Load:
    """As many streams at once as there are clients, each with requests of its own, measured after `warm_s`."""
    meter = Meter()
    clients = await connect(port, len(requests), (), meter)
    loop = asyncio.get_running_loop()
    timings: list[Timing] = []
    now_s = loop.time()
    start_s = time.monotonic() + warm_s
    stop_s = start_s + seconds
    counts: list[int] = []
    loop.call_at(now_s + warm_s, lambda: counts.append(meter.num_events))
    loop.call_at(now_s + warm_s + seconds, lambda: counts.append(meter.num_events))
    left, done = len(clients), loop.create_future()

    def ask(client: Client, source: Iterator[bytes]) -> None:
        client.send(next(source), lambda client, timing: on_end(client, timing, source))

    def on_end(client: Client, timing: Timing, source: Iterator[bytes]) -> None:
        nonlocal left
        if start_s <= timing.ended_s < stop_s:
            timings.append(timing)
        if timing.ended_s < stop_s:
            ask(client, source)
            return
        client.close()
        left -= 1
        if not left and not done.done():
            done.set_result(None)

    for client, source in zip(clients, requests, strict=True):
        ask(client, source)
    await done
    return Load(seconds, timings, counts[1] - counts[0])


async def exhaust(port: int, requests: Sequence[Iterator[bytes]]) -> int:
    """All requests of each client; how many there were."""
    clients = await connect(port, len(requests), (), Meter())
    num_streams, left, done = 0, len(clients), asyncio.get_running_loop().create_future()

    def ask(client: Client, source: Iterator[bytes]) -> None:
        nonlocal left, num_streams
        request = next(source, None)
        if request is not None:
            num_streams += 1
            client.send(request, lambda client, timing: ask(client, source))
            return
        client.close()
        left -= 1
        if not left:
            done.set_result(None)

    for client, source in zip(clients, requests, strict=True):
        ask(client, source)
    await done
    return num_streams


async def arrive(
    port: int, starts_s: Sequence[float], requests: Iterator[bytes], words: Sequence[bytes], num_clients: int
) -> list[Timing]:
    """One stream at each of these times, however long the others take."""
    idle = deque(await connect(port, num_clients, words, Meter()))
    clients = list(idle)
    loop = asyncio.get_running_loop()
    timings: list[Timing] = []
    begin_s, done = loop.time() + 0.05, loop.create_future()

    def on_end(client: Client, timing: Timing) -> None:
        timings.append(timing)
        idle.append(client)
        if len(timings) == len(starts_s):
            done.set_result(None)

    def start() -> None:
        if not idle:
            raise SystemExit("more streams at once than there are connections: it does not keep up")
        idle.popleft().send(next(requests), on_end)

    for start_s in starts_s:
        loop.call_at(begin_s + start_s, start)
    await done
    for client in clients:
        client.close()
    return timings
