"""Windowed FIFO beside strict FIFO and greedy, simulated: how busy the trainer is, how far it departs from the order.

N units are queued and under way at all times; each takes as long as its difficulty and chance say, and at most T, eight
times the median. The trainer takes a batch as soon as the window gives one, and works on it for batch / rate seconds;
what it took is replaced at once. Rates are given as rate × T over N: at 1 the trainer needs as long for a queue as the
longest unit takes.

    busy    share of the time in which the trainer works, from the first submission on
    drift   max over k of √k·|mean difficulty of the first k trained − of the first k submitted| / σ
    lag     the most units taken between a unit's submission and its own taking

The window is `pool/window.py`, the one that the pool decides by; the three differ in W alone. A run is 40 queues long,
its start included, when nothing is finished yet. That length, how closely durations follow difficulty and how heavy
Pareto's tail is are our choices; the last table shows what the bars would say for others.

    python benchmarks/window.py [--json] [--quick]
"""

import heapq
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from report import Bar, arguments, finish, print_table

from m2forge.pool.window import Unit, Window

NUM_QUEUED, WINDOW, BATCH = 256, 77, 32
LIMIT = 8.0
"""T over the median duration."""
CORRELATION = 0.7
"""Correlation of difficulty with the normal score of the duration."""
PARETO_INDEX = 1.5
NUM_SEEDS, NUM_TRAINED = 8, 40 * NUM_QUEUED
BAR_RATE = 1.25
RATES = (1.0, 1.25, 1.5, 3.0)
POLICIES = {"strict FIFO": 1, "windowed": WINDOW, "greedy": NUM_QUEUED}

FloatRow = npt.NDArray[np.float64]


def lognormal(scores: FloatRow) -> FloatRow:
    """σ 1, median 1."""
    return np.exp(scores)


def pareto(scores: FloatRow, index: float = PARETO_INDEX) -> FloatRow:
    """By the normal scores' quantiles, over the median."""
    upper = np.array([math.erfc(score / math.sqrt(2)) / 2 for score in scores])
    durations: FloatRow = (2 * upper) ** (-1 / index)
    return durations


Durations = Callable[[FloatRow], FloatRow]
KINDS: dict[str, Durations] = {"log-normal": lognormal, "Pareto": pareto}


@dataclass(frozen=True)
class Units:
    difficulty: FloatRow
    duration: FloatRow

    @classmethod
    def draw(cls, durations: Durations, num_units: int, seed: int, correlation: float = CORRELATION) -> "Units":
        draw = np.random.default_rng(seed)
        difficulty, noise = draw.standard_normal((2, num_units))
        scores = correlation * difficulty + math.sqrt(1 - correlation**2) * noise
        return cls(difficulty, np.minimum(durations(scores), LIMIT))


@dataclass(frozen=True)
class Run:
    busy: float
    drift: float
    lag: int


def simulate(units: Units, size: int, rate: float, num_trained: int) -> Run:
    """`rate`: units a second."""
    window = Window(size)
    under_way: list[tuple[float, int]] = []
    order: list[int] = []
    now = free_at = 0.0
    largest_lag = 0

    def submit(place: int) -> None:
        window.submit(Unit(place, f"g{place}"))
        heapq.heappush(under_way, (now + float(units.duration[place]), place))

    for place in range(NUM_QUEUED):
        submit(place)
    while len(order) < num_trained:
        while under_way and under_way[0][0] <= now:
            window.finish(heapq.heappop(under_way)[1])
        taken = window.take(BATCH) if now >= free_at else []
        if taken:
            order += [unit.position for unit in taken]
            largest_lag = max(largest_lag, *(window.lag(unit) for unit in taken))
            free_at = now + BATCH / rate
            for place in range(NUM_QUEUED + len(order) - BATCH, NUM_QUEUED + len(order)):
                submit(place)
        # To the end of the batch, or, for a trainer that waits, to the next unit that finishes.
        now = free_at if now < free_at else under_way[0][0]
    return Run(len(order) / rate / free_at, drift(units.difficulty, order), largest_lag)


def drift(difficulty: FloatRow, order: list[int]) -> float:
    ahead = np.cumsum(difficulty[order] - difficulty[: len(order)])
    return float(np.max(np.abs(ahead) / np.sqrt(np.arange(1, len(order) + 1))) / difficulty.std())


@dataclass(frozen=True)
class Figures:
    """Return means over the seeds, and the largest lag, of each policy."""

    busy: dict[str, float]
    drift: dict[str, float]
    lag: dict[str, int]

    def over(self, name: str, other: str) -> tuple[float, float]:
        """(busy, drift) of one policy over those of another; a drift of nothing over nothing is none."""
        drift = self.drift[name] / self.drift[other] if self.drift[other] else math.nan
        return self.busy[name] / self.busy[other], drift


def measure(
    durations: Durations, over: float, num_trained: int, num_seeds: int, correlation: float = CORRELATION
) -> Figures:
    """`over`: rate × T over N."""
    runs: dict[str, list[Run]] = {name: [] for name in POLICIES}
    for seed in range(num_seeds):
        units = Units.draw(durations, num_trained + 2 * NUM_QUEUED, seed, correlation)
        for name, size in POLICIES.items():
            runs[name].append(simulate(units, size, over * NUM_QUEUED / LIMIT, num_trained))
    return Figures(
        {name: statistics.mean(run.busy for run in some) for name, some in runs.items()},
        {name: statistics.mean(run.drift for run in some) for name, some in runs.items()},
        {name: max(run.lag for run in some) for name, some in runs.items()},
    )


def compare(kind: str, rates: tuple[float, ...]) -> list[Bar]:
    rows, bars = [], []
    for over in rates:
        figures = measure(KINDS[kind], over, NUM_TRAINED, NUM_SEEDS)
        for name, size in POLICIES.items():
            busy, drift = figures.over(name, "greedy")
            row = [f"{over:g}N", name, f"{figures.busy[name]:.1%}", f"{busy:.1%}"]
            row += [f"{figures.over(name, 'strict FIFO')[0]:.2f}x", f"{figures.drift[name]:.2f}", f"{drift:.2f}x"]
            rows.append([*row, str(figures.lag[name]), str(NUM_QUEUED + size - 2 + BATCH)])
        if over == BAR_RATE:
            bars += bars_of(kind, figures)
    print_table(
        f"{kind} durations, N={NUM_QUEUED}, W={WINDOW}, batch {BATCH}, {NUM_SEEDS} seeds of {NUM_TRAINED:,} units",
        ("rate × T", "policy", "busy", "of greedy", "over FIFO", "drift", "of greedy", "lag", "bound"),
        rows,
    )
    return bars


def show_choices() -> None:
    """The windowed policy's ratios where one choice of ours is another."""
    chosen: list[tuple[str, Figures]] = []
    for num_queues in (10, 20, 80):
        num_trained = num_queues * NUM_QUEUED
        chosen.append((f"log-normal, {num_queues} queues long", measure(lognormal, BAR_RATE, num_trained, NUM_SEEDS)))
    for correlation in (0.2, 0.5, 1.0):
        figures = measure(lognormal, BAR_RATE, NUM_TRAINED, NUM_SEEDS, correlation)
        chosen.append((f"log-normal, correlation {correlation}", figures))
    for index in (1.1, 2.0, 3.0):
        tail = partial(pareto, index=index)
        chosen.append((f"Pareto, index {index}", measure(tail, BAR_RATE, NUM_TRAINED, NUM_SEEDS)))
    rows = []
    for name, figures in chosen:
        busy, drift = figures.over("windowed", "greedy")
        rows.append((name, f"{busy:.1%}", f"{figures.over('windowed', 'strict FIFO')[0]:.2f}x", f"{drift:.2f}x"))
    print_table(
        f"Windowed, {BAR_RATE}N, where another choice is made than {NUM_TRAINED // NUM_QUEUED} queues, "
        f"correlation {CORRELATION} or index {PARETO_INDEX}",
        ("", "busy of greedy", "busy over FIFO", "drift of greedy"),
        rows,
    )


def bars_of(kind: str, figures: Figures) -> list[Bar]:
    busy, drift = figures.over("windowed", "greedy")
    return [
        Bar.at_least(f"{kind}: busy over greedy", busy, 0.95),
        Bar.at_least(f"{kind}: busy over strict FIFO", figures.over("windowed", "strict FIFO")[0], 1.15),
        Bar.at_most(f"{kind}: drift over greedy", drift, 0.65),
        Bar.at_most(f"{kind}: drift of strict FIFO", figures.drift["strict FIFO"], 0.0),
        Bar.at_most(f"{kind}: largest lag, units", figures.lag["windowed"], NUM_QUEUED + WINDOW - 2 + BATCH),
    ]


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    bars: list[Bar] = []
    for kind in KINDS:
        bars += compare(kind, (BAR_RATE,) if options.quick else RATES)
    if not options.quick:
        show_choices()
    finish(bars, options.json)


if __name__ == "__main__":
    main()
