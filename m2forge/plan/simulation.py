"""Trainer and sampler of an RL run, simulated over the pool's real window: throughput, lag, and the share of time that
each waits.

Events are ends of attempts and ends of training steps. The loop keeps the queue full; `num_jobs` attempts run at once,
in submission order. Each takes `own_s` without the sampler, then samples: all that do share the sampler's tokens per
second, each at most `attempt_rate`. A unit is finished when all its attempts are. The trainer takes a batch from the
window as soon as it can, and trains it for `step_s`.

    attempt: own_s + tokens / min(attempt_rate, sampler_rate / sampling)   lengths are drawn from a seeded distribution

The simulation has no clock and no randomness besides its seed: equal inputs give equal results.
"""

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass

from m2forge.pool.window import Unit, Window

BOTH_WAIT = 0.1
"""Share of the time that both wait from which the queue is to blame. Our choice."""


@dataclass(frozen=True)
class Ring:
    """The parameters of a simulated RL run."""

    batch_units: int
    attempts_per_unit: int
    queue: int
    window: int
    num_jobs: int
    """Concurrent attempts."""
    mean_tokens: float
    """Sampled tokens per attempt."""
    spread: float
    """Standard deviation of the sampled tokens, relative to their mean."""
    sampler_rate: float
    """Tokens per second of all samplers together."""
    attempt_rate: float
    """Most tokens per second of one attempt."""
    step_s: float
    """Seconds of a training step, publishing included."""
    own_s: float = 0.0
    """Seconds of an attempt beside its sampling: the agent's own, its verdict, storing it, leasing the next."""

    @property
    def batch_tokens(self) -> float:
        """Sampled tokens of a batch, on average."""
        return self.batch_units * self.attempts_per_unit * self.mean_tokens


@dataclass(frozen=True)
class Balance:
    """Results of a simulation."""

    seconds: float
    num_steps: int
    num_tokens: float
    """Sampled."""
    trainer_waits: float
    """Share of the time in which the trainer had no batch."""
    sampler_waits: float
    """Share of the time in which a job had no attempt to run, averaged over the jobs: the queue was full."""
    mean_lag: float
    """Units taken between a unit's submission and its own claim."""
    max_lag: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def verdict(self) -> str:
        if min(self.trainer_waits, self.sampler_waits) > BOTH_WAIT:
            return (
                f"the trainer waits {self.trainer_waits:.0%} of the time and the samplers {self.sampler_waits:.0%}: "
                "the queue is full, and its first units hold finished ones back; enlarge pool.window.queue or window"
            )
        if self.trainer_waits > self.sampler_waits:
            return f"the trainer waits {self.trainer_waits:.0%} of the time: add samplers or concurrent attempts"
        if self.sampler_waits > 0:
            return f"the samplers wait {self.sampler_waits:.0%} of the time: speed the trainer up, or add GPUs to it"
        return "neither waits"


class _Simulation:
    def __init__(self, ring: Ring, seed: int) -> None:
        self.ring, self._random = ring, random.Random(seed)
        self.window = Window(ring.window)
        self.now_s = self.waited_s = self.idle_s = 0.0
        self.num_sampled, self.num_steps = 0.0, 0
        self.lags: list[int] = []
        self._place = 0
        self._waiting: deque[int] = deque()
        """Attempts not yet started, as the position of their unit."""
        self._sampled_each = 0.0
        """Tokens sampled for an attempt that samples since the start: all that sample progress alike."""
        self._acting: deque[tuple[float, float, int]] = deque()
        """(when it starts to sample, its tokens, position of its unit) of the attempts in their own seconds."""
        self._sampling: list[tuple[float, int]] = []
        """(`_sampled_each` at its end, position of its unit) of the attempts that sample, a heap."""
        self._left: dict[int, int] = {}
        """Unfinished attempts of a unit."""
        self._trained_at_s: float | None = None

    def run(self, num_steps: int) -> Balance:
        while self.num_steps < num_steps:
            self._fill()
            if self._trained_at_s is None and (batch := self.window.take(self.ring.batch_units)):
                self.lags += [self.window.num_taken - 1 - unit.num_taken_before for unit in batch]
                self._trained_at_s = self.now_s + self.ring.step_s
                continue
            self._advance()
        lag = sum(self.lags) / len(self.lags)
        total_s = self.now_s
        idle = self.idle_s / (total_s * self.ring.num_jobs)
        waits = self.waited_s / total_s
        return Balance(total_s, self.num_steps, self.num_sampled, waits, idle, lag, max(self.lags))

    def _fill(self) -> None:
        while len(self.window) < self.ring.queue:
            self.window.submit(Unit(self._place, group=str(self._place)))
            self._waiting.extend([self._place] * self.ring.attempts_per_unit)
            self._left[self._place] = self.ring.attempts_per_unit
            self._place += 1
        while self._waiting and self._num_running < self.ring.num_jobs:
            self._acting.append((self.now_s + self.ring.own_s, self._draw(), self._waiting.popleft()))
        while self._acting and self._acting[0][0] <= self.now_s:
            _, num_tokens, position = self._acting.popleft()
            heapq.heappush(self._sampling, (self._sampled_each + num_tokens, position))

    @property
    def _num_running(self) -> int:
        return len(self._acting) + len(self._sampling)

    def _draw(self) -> float:
        """A log-normal number of tokens."""
        variance = math.log(1 + self.ring.spread**2)
        mean = math.log(self.ring.mean_tokens) - variance / 2
        return max(1.0, self._random.lognormvariate(mean, math.sqrt(variance)))

    def _advance(self) -> None:
        """Move to the next event: an attempt starts to sample or ends, or a step ends."""
        ring = self.ring
        rate = min(ring.attempt_rate, ring.sampler_rate / max(1, len(self._sampling)))
        next_end = self._sampling[0][0] if self._sampling else math.inf
        attempt_s = (next_end - self._sampled_each) / rate
        step_s = math.inf if self._trained_at_s is None else self._trained_at_s - self.now_s
        acting_s = self._acting[0][0] - self.now_s if self._acting else math.inf
        passed_s = min(attempt_s, step_s, acting_s)
        assert passed_s < math.inf, "an empty queue and an idle trainer cannot go on"
        self.now_s += passed_s
        self.idle_s += passed_s * (ring.num_jobs - self._num_running)
        self.num_sampled += passed_s * rate * len(self._sampling)
        if self._trained_at_s is None:
            self.waited_s += passed_s
        self._sampled_each = next_end if attempt_s <= passed_s else self._sampled_each + passed_s * rate
        if step_s <= passed_s:
            self._trained_at_s = None
            self.num_steps += 1
        self._finish()

    def _finish(self) -> None:
        while self._sampling and self._sampling[0][0] <= self._sampled_each:
            _, position = heapq.heappop(self._sampling)
            self._left[position] -= 1
            if not self._left[position]:
                del self._left[position]
                self.window.finish(position)


def simulate(ring: Ring, num_steps: int = 100, seed: int = 0) -> Balance:
    if ring.queue < ring.batch_units:
        raise ValueError(f"a queue of {ring.queue} units never holds a batch of {ring.batch_units}")
    return _Simulation(ring, seed).run(num_steps)
