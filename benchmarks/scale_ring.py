"""Part `ring` of scale.py: what `plan/simulation.py` says of an RL run's throughput, beside rings that run.

A ring has the product's pool, its window, leases and writer, in a SQLite file. Agents and sampler are scripted: an
attempt samples a known number of tokens, at most `attempt_rate` a second, and all attempts share `sampler_rate`. The
trainer claims, reads, trains for a scripted time, and commits; what its step took in the ring, reading and committing
included, is what the simulation is given. It is not given what the pool costs the attempts.

Three rings: one is bound by the trainer, one by the sampler, and one by neither alone. The first steps, which fill the
queue, are left out of both. Without `--quick`, runs of `m2forge rl` follow (scale_ring_run.py).
"""

import asyncio
import math
import random
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from report import Bar, print_table
from scale_pool_worker import rewarding
from scale_ring_run import real_rings

from m2forge.plan.simulation import Ring, simulate
from m2forge.pool.config import PoolConfig, WindowConfig
from m2forge.pool.pool import Pool, PoolWriter
from m2forge.pool.stored import Lease, Outcome
from m2forge.records import Call, Domain, FinishReason, PolicyVersion, Task

VOCAB_SIZE = 1_000
TICK_S = 0.01
"""How often the sampler hands out tokens."""
POLL_S = 0.02
SKIPPED = 5
"""Steps that fill the queue."""
BASE = Ring(
    batch_units=4,
    attempts_per_unit=4,
    queue=16,
    window=8,
    num_jobs=32,
    mean_tokens=200.0,
    spread=0.5,
    sampler_rate=4_000.0,
    attempt_rate=250.0,
    step_s=0.8,
)
RINGS = {
    "bound by the trainer": replace(BASE, step_s=1.6),
    "bound by the sampler": replace(BASE, step_s=0.3),
    "balanced": BASE,
}


class Sampler:
    """Shares its rate among the running attempts."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._left: dict[asyncio.Future[None], float] = {}
        self.num_sampled = 0.0

    async def sample(self, num_tokens: float) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left[done] = num_tokens
        await done

    async def run(self) -> None:
        before_s = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            passed_s, before_s = now_s - before_s, now_s
            # As in the simulation, what an attempt leaves of a tick goes to the others.
            while passed_s > 0 and self._left:
                rate = min(self._ring.attempt_rate, self._ring.sampler_rate / len(self._left))
                share_s = min(passed_s, min(self._left.values()) / rate)
                passed_s -= share_s
                self.num_sampled += share_s * rate * len(self._left)
                self._left = {done: left - share_s * rate for done, left in self._left.items()}
                for done in [done for done, left in self._left.items() if left <= 1e-9]:
                    del self._left[done]
                    done.set_result(None)


@dataclass
class Found:
    ends_s: list[float] = field(default_factory=list)
    """When each step ended."""
    sampled: list[float] = field(default_factory=list)
    """Tokens sampled by then."""
    steps_s: list[float] = field(default_factory=list)
    """Seconds of each step from its claim to its commit."""

    def rate(self) -> tuple[float, float]:
        """Steps and tokens a second, without the first steps."""
        seconds = self.ends_s[-1] - self.ends_s[SKIPPED - 1]
        return (len(self.ends_s) - SKIPPED) / seconds, (self.sampled[-1] - self.sampled[SKIPPED - 1]) / seconds


async def run_ring(pool: Pool, ring: Ring, num_steps: int) -> Found:
    sampler, found, draw = Sampler(ring), Found(), random.Random(1)
    variance = math.log(1 + ring.spread**2)
    mean, deviation = math.log(ring.mean_tokens) - variance / 2, math.sqrt(variance)
    num_running, judging = 0, asyncio.Lock()

    async def attempt(writer: PoolWriter, lease: Lease) -> None:
        nonlocal num_running
        num_tokens = max(1, round(draw.lognormvariate(mean, deviation)))
        await sampler.sample(num_tokens)
        num_running -= 1
        call = lease.writer(VOCAB_SIZE).write(make_call(num_tokens))
        if await writer.end(lease, (call,), Outcome()):
            await judge(writer)

    async def judge(writer: PoolWriter) -> None:
        # One at a time, as in the loop: others would reward the same units again.
        async with judging:
            for _, leases in await writer.run(pool.unjudged, 16):
                rewards = [rewarding(lease, float(n % 2), 1) for n, lease in enumerate(leases)]
                await writer.run(pool.reward_unit, rewards)

    async def feed(writer: PoolWriter) -> None:
        nonlocal num_running
        async with asyncio.TaskGroup() as attempts:
            while True:
                room = await writer.run(pool.room)
                if room:
                    await writer.run(pool.put, [(Task("task", Domain.AGENT, "Do it."), ring.attempts_per_unit)] * room)
                num_free = ring.num_jobs - num_running
                for lease in await writer.run(pool.lease, "ring", num_free) if num_free else []:
                    num_running += 1
                    attempts.create_task(attempt(writer, lease))
                await asyncio.sleep(POLL_S)

    async def train() -> None:
        for step in range(num_steps):
            version = PolicyVersion("ring", step)
            while (claimed := await asyncio.to_thread(pool.claim, ring.batch_units, version)) is None:
                await asyncio.sleep(POLL_S)
            began_s = time.monotonic()
            await asyncio.to_thread(pool.fetch, claimed)
            await asyncio.sleep(ring.step_s)
            await asyncio.to_thread(pool.commit, claimed, PolicyVersion("ring", step + 1))
            found.ends_s.append(time.monotonic())
            found.steps_s.append(time.monotonic() - began_s)
            found.sampled.append(sampler.num_sampled)

    async with PoolWriter(pool) as writer:
        working = {asyncio.create_task(work) for work in (sampler.run(), feed(writer), train())}
        ended, others = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for task in ended:
            task.result()
    return found


def make_call(num_tokens: int) -> Call:
    prompt, response = np.arange(1, 33, dtype=np.int32), np.full(num_tokens, 7, np.int32)
    logprobs, versions = np.full(num_tokens, -0.5, np.float32), np.zeros(num_tokens, np.int32)
    return Call(prompt, response, logprobs, versions, FinishReason.STOP, 0.0, 1.0)


def ring(quick: bool) -> list[Bar]:
    num_steps, rows, errors = 20 if quick else 60, [], []
    for name, known in RINGS.items():
        with tempfile.TemporaryDirectory(prefix="ring") as folder:
            window = WindowConfig(queue=known.queue, window=known.window, no_signal="train")
            with Pool(PoolConfig(url=f"sqlite:///{Path(folder) / 'pool.db'}", window=window), VOCAB_SIZE) as pool:
                found = asyncio.run(run_ring(pool, known, num_steps))
        measured = replace(known, step_s=sum(found.steps_s[SKIPPED:]) / (num_steps - SKIPPED))
        steps_per_s, tokens_per_s = found.rate()
        first, whole = simulate(measured, SKIPPED), simulate(measured, num_steps)
        seconds = whole.seconds - first.seconds
        expected_steps = (num_steps - SKIPPED) / seconds
        expected_tokens = (whole.num_tokens - first.num_tokens) / seconds
        pairs = ((steps_per_s, expected_steps), (tokens_per_s, expected_tokens))
        missed = [expected / real - 1 for real, expected in pairs]
        errors += [abs(error) for error in missed]
        row = [name, f"{known.step_s:.1f}", f"{measured.step_s:.2f}"]
        row += [f"{steps_per_s:.3f}", f"{expected_steps:.3f}", f"{missed[0]:+.1%}"]
        rows.append((*row, f"{tokens_per_s:,.0f}", f"{expected_tokens:,.0f}", f"{missed[1]:+.1%}"))
    columns = ("ring", "step s", "measured", "steps/s", "simulated", "error", "tokens/s", "simulated", "error")
    print_table(f"Rings of {num_steps} steps, the first {SKIPPED} left out", columns, rows)
    bars = [Bar.at_most("largest error of the simulated throughput", max(errors), 0.1)]
    return bars if quick else [*bars, *real_rings()]
