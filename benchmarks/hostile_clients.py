"""Clients that attack: each sends hostile bodies one after another, as fast as they are answered.

    python benchmarks/hostile_clients.py PORT NUM_BYTES CONTEXT [NAME] < keys

One client for each line of standard input, which is a key. Until SIGTERM; then prints as one JSON object how many
requests of each kind were answered, by status.
"""

import asyncio
import itertools
import json
import signal
import sys
from collections import Counter

from gateway_loop import run
from gateway_work import request_of
from hostile_bodies import NONCE, make_bodies


async def attack(port: int, keys: list[str], num_bytes: int, context: int, only: str) -> dict[str, dict[str, int]]:
    bodies = {name: made for name, made in make_bodies(num_bytes, context).items() if only in name}
    counts: dict[str, Counter[str]] = {name: Counter() for name in bodies}
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    nonces = itertools.count()

    async def client(place: int, key: str) -> None:
        names = list(bodies)
        # Each begins elsewhere, so that all kinds come at all times.
        for name in itertools.islice(itertools.cycle(names), place * len(names) // len(keys), None):
            path, body = bodies[name]
            sent = body.replace(NONCE, b"%012d" % next(nonces))
            try:
                counts[name][await _send(port, request_of(sent, key, path))] += 1
            except OSError:
                counts[name]["broken off"] += 1

    print("ready", flush=True)
    tasks = [asyncio.create_task(client(place, key)) for place, key in enumerate(keys)]
    await stopped.wait()
    for task in tasks:
        task.cancel()
    return {name: dict(count) for name, count in counts.items()}


async def _send(port: int, request: bytes) -> str:
    """The status of one request, on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1))
        status = await reader.readexactly(12)
        await reader.read()
        return status[9:].decode()
    finally:
        writer.close()


if __name__ == "__main__":
    given = sys.stdin.read().split()
    only = sys.argv[4] if len(sys.argv) > 4 else ""
    print(json.dumps(run(attack(int(sys.argv[1]), given, int(sys.argv[2]), int(sys.argv[3]), only))), flush=True)
