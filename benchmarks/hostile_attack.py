"""The gateway attacked by ten clients with a key each, beside a well-behaved one: who else waits, and for how long.

The attackers send bodies of 1 to 5 MB (hostile_bodies.py) of every kind that is expensive to read, in every dialect,
and bodies as large as are accepted. Meanwhile another client asks for `/health` 50 times a second, and a well-behaved
one streams completions of 32 chunks, one every 10 ms, from a scripted engine. Gateway, its workers, engine and all
clients share two cores. Both clients are measured on a quiet gateway first.

    python benchmarks/hostile.py --part attack [--json] [--quick]
"""

import asyncio
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from gateway_load import Load, saturate
from gateway_loop import run
from gateway_server import ROOT, Server, gateway_command, upstream
from gateway_work import conversations, make_answers, make_episodes, make_tokenizer
from report import Bar, print_table

NUM_ATTACKERS, NUM_STREAMS = 10, 4
CONTEXT = 32768
PACE_MS = 10.0
HEALTH_EVERY_S = 0.02
HEALTH_P99_MS = 50.0
STREAM_SHARE = 0.8
"""Least share of the streams that the well-behaved client gets from a quiet gateway."""


@contextmanager
def _gateway(model: Path, journal: Path, behind: Server) -> Iterator[Server]:
    command = gateway_command(model, journal, behind, CONTEXT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise SystemExit("the gateway did not start")
        yield Server(process, int(line.rpartition(":")[2]))
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def _attackers(gateway: Server, num_bytes: int, told: dict[str, dict[str, int]]) -> Iterator[None]:
    script = str(ROOT / "benchmarks" / "hostile_clients.py")
    process = subprocess.Popen(
        [sys.executable, script, str(gateway.port), str(num_bytes), str(CONTEXT)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n".join(make_episodes(gateway.port, NUM_ATTACKERS)[1]))
    process.stdin.close()
    if process.stdout.readline().strip() != "ready":
        raise SystemExit("the attackers did not start")
    try:
        yield
    finally:
        process.terminate()
        for name, counts in json.loads(process.stdout.read() or "{}").items():
            for status, count in counts.items():
                told.setdefault(name, {})[status] = told.get(name, {}).get(status, 0) + count
        process.wait(60)


async def _measure(gateway: Server, seconds: float) -> tuple[Load, list[float]]:
    """What the well-behaved client got, and the seconds that `/health` took."""
    _, keys = await asyncio.to_thread(
        make_episodes, gateway.port, int(20 * NUM_STREAMS * (seconds + 2)) // 8 + NUM_STREAMS
    )
    stop_s = time.monotonic() + seconds + 1
    latencies = asyncio.create_task(asyncio.to_thread(_ask_health, gateway.port, stop_s))
    load = await saturate(gateway.port, [conversations(keys) for _ in range(NUM_STREAMS)], 1.0, seconds)
    return load, await latencies


def _ask_health(port: int, stop_s: float) -> list[float]:
    """Each request has a time at which it is due, so that a stall counts for all that it keeps waiting."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    latencies, due_s = [], time.monotonic()
    while due_s < stop_s:
        time.sleep(max(0.0, due_s - time.monotonic()))
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        if response.status != 200:
            raise SystemExit(f"/health: {response.status}")
        latencies.append(time.monotonic() - due_s)
        due_s += HEALTH_EVERY_S
    connection.close()
    return latencies


def measure(is_quick: bool) -> list[Bar]:
    seconds, sizes = (10.0, (1 << 20, 5 << 20)) if is_quick else (40.0, (1 << 20, 2 << 20, 5 << 20))
    told: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = make_tokenizer(folder / "model")
        with (
            upstream(folder, make_answers(tokenizer), PACE_MS) as behind,
            _gateway(folder / "model", folder / "journal", behind) as gateway,
        ):
            quiet, quiet_s = run(_measure(gateway, seconds / 2))
            measured = []
            for num_bytes in sizes:
                with _attackers(gateway, num_bytes, told):
                    measured.append((num_bytes, *run(_measure(gateway, seconds))))
    rows = [_row("quiet", quiet, quiet_s)]
    rows += [_row(f"attacked, {num_bytes >> 20} MiB", load, latencies) for num_bytes, load, latencies in measured]
    print_table(
        f"{NUM_ATTACKERS} attackers, {NUM_STREAMS} streams at a time",
        ("", "streams/s", "median s", "/health asked", "p50 ms", "p99 ms", "most ms"), rows,
    )  # fmt: skip
    print_table(
        "What the attackers were answered",
        ("bodies", "statuses"),
        [
            (name, ", ".join(f"{status}: {count}" for status, count in sorted(counts.items())))
            for name, counts in told.items()
        ],
    )
    share = min(load.streams_per_s for _, load, _ in measured) / quiet.streams_per_s
    p99_ms = max(float(np.quantile(latencies, 0.99)) * 1e3 for _, _, latencies in measured)
    return [
        Bar.at_most("/health of another client during the attack, p99, ms", p99_ms, HEALTH_P99_MS),
        Bar.at_least("streams/s of a well-behaved client over those from a quiet gateway", share, STREAM_SHARE),
    ]


def _row(name: str, load: Load, latencies: Sequence[float]) -> tuple[str, ...]:
    figures = [f"{float(np.quantile(latencies, part)) * 1e3:.1f}" for part in (0.5, 0.99, 1.0)]
    median_s = float(np.median([timing.ended_s - timing.sent_s for timing in load.timings])) if load.timings else 0.0
    return name, f"{load.streams_per_s:.1f}", f"{median_s:.2f}", str(len(latencies)), *figures
