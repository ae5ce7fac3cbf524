"""The gateway beside the LiteLLM proxy: streams a second, added latency, long conversations and memory.

Both stand before the same upstream (gateway_upstream.py), which answers every request with 32 chunks, each sent by
itself: token ids to our gateway, a chat completion to LiteLLM. The proxy under test has one core for itself, upstream
and load generator share another; a row without a proxy shows how many streams these two can do. Clients hold
conversations of eight turns and send all of their history each time. Our gateway records everything in journals on
disk and checks keys; LiteLLM does neither. A busy gateway of ours sends what came meanwhile in one event, so that its
streams have fewer than LiteLLM's: the table says how many.

Added latency is how much later than it was due (the request's time and the upstream's pace) each word of each stream
came to the client, less the median of the same without a gateway. It is measured twice, streams coming at random times:
with the same upstream, at half of the streams a second that 64 clients get; and with one that sends a chunk of each
stream every 10 ms, at as many streams a second as keep the gateway's core half busy. Each chunk is an event of its own
then. Beyond that load chunks are put together, and words wait for others.

    python benchmarks/gateway.py [--json] [--quick] [--part streams|latency|turns|memory] [--clients N]
"""

import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from gateway_load import Load, Timing, arrive, exhaust, saturate
from gateway_loop import run
from gateway_server import OTHER_CORE, Server, has_litellm, install_litellm, litellm, our_gateway, upstream
from gateway_turns import EARLY, LATE, measure_turns
from gateway_work import NUM_CHUNKS, NUM_TURNS, WORDS, administer, conversations, make_answers, make_episodes
from gateway_work import make_tokenizer as make_model
from report import Bar, arguments, finish, print_table

from m2forge.text.format import make_format

PEER_RATIO = 20.0
PACE_MS = 10.0
MOST_STREAMS_PER_S = 2000
"""More than a gateway in Python can serve; bounds the episodes that are created beforehand."""
PROBE_STREAMS_PER_S = 60.0
"""Few enough for any gateway; used to find the number of clients that makes its core half busy."""
HALF_OF_CLIENTS = 64
"""Clients of the saturating load; half of its rate is measured."""
NUM_TALKING = 64
"""Conversations used in rotation where streams start at fixed times."""
NUM_EVENTS = NUM_CHUNKS + 1
"""Events of a stream that is proxied unchanged: its chunks and the end."""


_LATENCY_COLUMNS = ("", "streams/s", "its core", "words", "p50", "p90", "p99", "most")


class Work:
    """What all parts share: a model's tokenizer, the upstream's answers, a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, folder / "model"
        self.tokenizer = make_model(self.model)
        self.answers = make_answers(self.tokenizer)
        self._num_journals = 0

    def journal(self) -> Path:
        self._num_journals += 1
        return self.folder / f"journal-{self._num_journals}"


# -- streams -----------------------------------------------------------------------------------------------------------


def streams(work: Work, numbers: Sequence[int], seconds: float, peer_s: float) -> list[Bar]:
    """At each number of clients."""
    rows, bars = [], []
    with upstream(work.folder, work.answers) as behind:
        for number in numbers:
            loads = [("no gateway", *_saturate(behind, behind, number, seconds))]
            with our_gateway(work.model, work.journal(), behind) as ours:
                loads.append(("ours", *_saturate(ours, behind, number, seconds, is_ours=True)))
            rate = loads[-1][1].streams_per_s
            if has_litellm():
                with litellm(work.folder, behind) as peer:
                    loads.append(("LiteLLM", *_saturate(peer, behind, number, peer_s)))
                # Its streams are long: those that had begun count for what came of them.
                peer_load = loads[-1][1]
                peer_rate = peer_load.num_events / NUM_EVENTS / peer_load.seconds
                name = f"{number} clients: streams/s over LiteLLM's"
                bars.append(Bar.at_least(name, rate / peer_rate, PEER_RATIO))
            rows += [_row(number, name, load, *shares) for name, load, *shares in loads]
    columns = ("clients", "", "streams/s", "events a stream", "median ms", "core of the proxy", "the other core")
    print_table(f"Streams of {NUM_CHUNKS} chunks, as fast as they go", columns, rows)
    return bars


def _saturate(
    proxy: Server, behind: Server, number: int, seconds: float, *, is_ours: bool = False
) -> tuple[Load, float, float]:
    """The load, and how busy the proxy's core and the other one were."""
    num_streams = int(MOST_STREAMS_PER_S * (seconds + 2)) + NUM_TURNS * number
    keys = make_episodes(proxy.port, num_streams // NUM_TURNS)[1] if is_ours else deque(["none"] * num_streams)
    warm_s = 1.0 if is_ours or proxy is behind else seconds / 2
    before_s, started = (proxy.cpu_s, behind.cpu_s), os.times()
    load = run(saturate(proxy.port, [conversations(keys) for _ in range(number)], warm_s, seconds))
    ended = os.times()
    elapsed_s = ended.elapsed - started.elapsed
    mine_s = ended.user + ended.system - started.user - started.system
    proxy_share = 0.0 if proxy is behind else (proxy.cpu_s - before_s[0]) / elapsed_s
    return load, proxy_share, (behind.cpu_s - before_s[1] + mine_s) / elapsed_s


def _row(number: int, name: str, load: Load, proxy_share: float, other_share: float) -> tuple[str, ...]:
    rate = load.num_events / NUM_EVENTS / load.seconds if name == "LiteLLM" else load.streams_per_s
    median_s = statistics.median(timing.ended_s - timing.sent_s for timing in load.timings)
    busy = "" if name == "no gateway" else f"{proxy_share:.0%}"
    return (str(number), name, f"{rate:.0f}", f"{load.events_per_stream:.1f}", f"{median_s * 1e3:.1f}", busy,
            f"{other_share:.0%}")  # fmt: skip


# -- latency -----------------------------------------------------------------------------------------------------------


def latency(work: Work, seconds: float) -> list[Bar]:
    return [*_latency_of_half(work, seconds), *_latency_paced(work, seconds)]


def _latency_of_half(work: Work, seconds: float) -> list[Bar]:
    """At half of the streams a second that saturate it, from the same upstream."""
    with upstream(work.folder, work.answers) as behind:
        with our_gateway(work.model, work.journal(), behind) as ours:
            load, _, _ = _saturate(ours, behind, HALF_OF_CLIENTS, min(seconds, 6.0), is_ours=True)
        half = load.streams_per_s / 2
        base, _ = _paced(behind, deque(["none"] * 10**5), half, seconds / 2, 0.0)
        late, share = _paced_ours(work, behind, half, seconds, 0.0)
    rows = [_latency_row("no gateway", half, None, base), _latency_row("ours, at half of its rate", half, share, late)]
    print_table("Words, ms after the request; chunks as fast as they go", _LATENCY_COLUMNS, rows)
    return _latency_bars("half of the saturating rate", late, base)


def _latency_paced(work: Work, seconds: float) -> list[Bar]:
    with upstream(work.folder, work.answers, PACE_MS) as behind:
        base, _ = _paced(behind, deque(["none"] * 10**5), PROBE_STREAMS_PER_S, seconds / 2, PACE_MS)
        # The core's business goes with the rate as long as every chunk is sent by itself.
        _, share = _paced_ours(work, behind, PROBE_STREAMS_PER_S, seconds / 2, PACE_MS)
        half = PROBE_STREAMS_PER_S * 0.5 / share
        at_half, half_share = _paced_ours(work, behind, half, seconds, PACE_MS)
        beyond, most_share = _paced_ours(work, behind, 2 * half, seconds / 2, PACE_MS)
    rows = [
        _latency_row("no gateway", PROBE_STREAMS_PER_S, None, base),
        _latency_row("ours, its core half busy", half, half_share, at_half),
        _latency_row("ours, twice that", 2 * half, most_share, beyond),
    ]
    print_table(f"Words, ms after they were due; {PACE_MS:g} ms between the chunks of a stream", _LATENCY_COLUMNS, rows)
    return _latency_bars(f"a chunk every {PACE_MS:g} ms, core half busy", at_half, base)


def _latency_bars(name: str, late: Sequence[float], base: Sequence[float]) -> list[Bar]:
    p50, p99 = (float(np.quantile(late, part) - np.median(base)) * 1e3 for part in (0.5, 0.99))
    return [
        Bar.at_most(f"{name}: added latency, p50, ms", p50, 3.0),
        Bar.at_most(f"{name}: added latency, p99, ms", p99, 30.0),
    ]


def _paced_ours(
    work: Work, behind: Server, streams_per_s: float, seconds: float, pace_ms: float
) -> tuple[list[float], float]:
    with our_gateway(work.model, work.journal(), behind) as ours:
        _, keys = make_episodes(ours.port, int(streams_per_s * seconds) // NUM_TURNS + NUM_TALKING)
        return _paced(ours, keys, streams_per_s, seconds, pace_ms)


def _paced(
    server: Server, keys: "deque[str]", streams_per_s: float, seconds: float, pace_ms: float
) -> tuple[list[float], float]:
    """The delays of words at `streams_per_s`, and the utilisation of the server's core."""
    gaps_s = np.random.default_rng(0).exponential(1 / streams_per_s, int(streams_per_s * seconds))
    before_s, start_s = server.cpu_s, time.monotonic()
    # Ten times as many connections as there are streams at once on average, and some.
    num_clients = int((1 + 10 * NUM_CHUNKS * pace_ms / 1e3) * streams_per_s) + 64
    late = _late(run(_arrive(server, np.cumsum(gaps_s), keys, num_clients)), pace_ms)
    return late, (server.cpu_s - before_s) / (time.monotonic() - start_s)


def _latency_row(name: str, streams_per_s: float, share: float | None, late: Sequence[float]) -> tuple[str, ...]:
    figures = [f"{float(np.quantile(late, part)) * 1e3:.2f}" for part in (0.5, 0.9, 0.99, 1.0)]
    return (name, f"{streams_per_s:.0f}", "" if share is None else f"{share:.0%}", f"{len(late):,}", *figures)


async def _arrive(server: Server, starts_s: "np.ndarray", keys: "deque[str]", num_clients: int) -> list[Timing]:
    words = [word.encode() for word in WORDS]
    sources = [conversations(keys) for _ in range(NUM_TALKING)]
    requests = (next(source) for source in cycle(sources))
    return await arrive(server.port, starts_s.tolist(), requests, words, num_clients)


def _late(timings: Sequence[Timing], pace_ms: float) -> list[float]:
    """Seconds between when each word was due and when it came. The first chunk of a stream holds none."""
    late = []
    for timing in timings:
        if len(timing.arrived_s) != len(WORDS):
            raise SystemExit(f"{len(timing.arrived_s)} words of {len(WORDS)} came")
        due = enumerate(timing.arrived_s, 1)
        late += [arrived_s - timing.sent_s - place * pace_ms / 1e3 for place, arrived_s in due]
    return late


# -- turns and memory --------------------------------------------------------------------------------------------------


def long_turns(work: Work, num_conversations: int) -> list[Bar]:
    format = make_format("minimax_m2", work.tokenizer)
    with upstream(work.folder, work.answers) as behind:
        url = f"http://127.0.0.1:{behind.port}"
        turns = run(measure_turns(format, url, work.journal(), num_conversations))
    print_table(
        "One conversation: processor's time of a turn, median",
        ("turn", "prompt tokens", "reading, hashing and parsing the body, ms", "all else, ms"),
        [
            (
                str(turn),
                f"{turns.num_prompt[turn]:,}",
                *(f"{turns.median_s(times, turn) * 1e3:.2f}" for times in (turns.parse_s, turns.beyond_s)),
            )
            for turn in (EARLY, 50, 100, LATE)
        ],
    )
    return [
        Bar.at_most("turns that tokenised more than their new message", turns.num_wrong, 0),
        Bar.at_most(f"time of turn {LATE} beyond its body over turn {EARLY}'s", turns.ratio, 1.5),
    ]


def memory(work: Work, num_rounds: int, num_episodes: int) -> list[Bar]:
    """Episodes are made, used and closed, round after round."""
    rows, levels = [], []
    with upstream(work.folder, work.answers) as behind, our_gateway(work.model, work.journal(), behind) as ours:
        num_streams = 0
        for number in range(1, num_rounds + 1):
            ids, keys = make_episodes(ours.port, num_episodes)
            num_streams += run(exhaust(ours.port, [conversations(keys) for _ in range(64)]))
            administer(ours.port, (f"/episodes/{id}/close" for id in ids))
            levels.append(ours.memory_mib)
            if number % max(num_rounds // 5, 1) == 0:
                rows.append((f"{num_streams:,}", f"{number * num_episodes:,}", f"{levels[-1]:.1f}"))
    print_table("Memory of a gateway whose episodes are closed", ("streams", "episodes", "MiB"), rows)
    half = levels[len(levels) // 2 - 1]
    return [Bar.at_most("memory at the end over that at half of the run", levels[-1] / half, 1.02)]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--part", choices=["streams", "latency", "turns", "memory"], help="only this one")
    parser.add_argument("--clients", type=int, choices=[64, 256], help="streams of this many alone")
    options = parser.parse_args()
    quick, bars = options.quick, []
    if not quick and not has_litellm() and options.part in (None, "streams"):
        install_litellm()
    os.sched_setaffinity(0, {OTHER_CORE % (os.cpu_count() or 1)})
    with tempfile.TemporaryDirectory() as folder:
        work = Work(Path(folder))
        if options.part in (None, "streams"):
            numbers = [options.clients] if options.clients else [64] if quick else [64, 256]
            bars += streams(work, numbers, 2 if quick else 6, 6 if quick else 30)
        if options.part in (None, "latency"):
            bars += latency(work, 4 if quick else 15)
        if options.part in (None, "turns"):
            bars += long_turns(work, 2 if quick else 10)
        if options.part == "memory" or (options.part is None and not quick):
            bars += memory(work, 4 if quick else 20, 125)
    finish(bars, options.json)


if __name__ == "__main__":
    main()
