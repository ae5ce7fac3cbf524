"""Runs of `m2forge rl` for part `ring` of scale.py, and what `plan/simulation.py` says of them.

The runs are real: loop, gateway, native sampler, trainer, pool (SQLite), worker processes of examples/task_agent.py,
and a random network of one layer. They have the same tasks, so that prompts of 600 tokens are prefilled and trained;
the length of the answers and the number of groups in 16 attempts decide who waits. On two cores trainer, sampler,
gateway, agents and loop compete for both, which no simulation knows. So the figures that it is given are measured in
the run itself, after the first steps, which fill the queue:

    configuration    attempts of a group, groups of a batch, queue, window, concurrent attempts
    mean_tokens      mean of an attempt's sampled tokens; spread: their deviation over it
    attempt_rate     sampled tokens over the seconds of their requests, by the gateway's clock
    sampler_rate     sampled tokens over the seconds in which the sampler had work
    own_s            seconds of an attempt from its lease to its record in the pool, less those of its requests; and
                     the first quartile of the seconds between the end of an attempt and the lease of the next, which
                     is what leasing takes where there is something to lease
    step_s           seconds of a step but for those that the trainer waited for its batch, with those of the claim that
                     brought it

It is not given how long trainer or slots waited, how many attempts ran at a time, nor any number of steps, attempts or
tokens over the seconds of the run. A ring whose slots are never free is then simple: its throughput follows from the
seconds of its attempts. What is tested is how steps, attempts, queue and window take turns.
"""

import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_model import Shown, make_random
from forge_watch import ROOT, run
from report import Bar, print_table
from sqlalchemy import select

from m2forge.config import TomlValue, build, load_resolved, write_resolved
from m2forge.model.config_file import read_config
from m2forge.observe.busy import busy_s, read_busy
from m2forge.observe.metrics import FILE_NAME, read_metrics
from m2forge.plan.simulation import Ring, simulate
from m2forge.pool.lifecycle import Origin
from m2forge.pool.pool import Pool
from m2forge.pool.stored import attempt_name, read_units
from m2forge.pool.tables import episode_table
from m2forge.rl.config import RLConfig
from m2forge.rl.layout import Layout
from m2forge.train.run_dir import CONFIG_FILE

NAME = "run"
FAMILY = Shown("chain", (1, 3), (1, 2), 2)
NUM_STEPS = 40
SKIPPED = 8
"""Steps that fill the queue."""
SIMULATED = 400
"""Steps of a simulation, which knows no noise but that of its lengths."""
LIMIT_S = 600.0
BATCH_ATTEMPTS = 16


@dataclass(frozen=True)
class Shape:
    group_size: int
    """Attempts of a group share their prompt, so that larger groups take less training."""
    answer_tokens: int
    """At most; a random network ends some answers before."""
    num_jobs: int


RUNS = {
    "bound by the sampler": Shape(4, 128, 16),
    "balanced": Shape(4, 8, 16),
    "bound by the trainer": Shape(2, 4, 24),
}


def real_rings() -> list[Bar]:
    rows, bars = [], []
    for name, shape in RUNS.items():
        with tempfile.TemporaryDirectory(prefix="ring") as folder:
            measured = run_ring(Path(folder), shape)
        first, whole = simulate(measured.ring, SKIPPED), simulate(measured.ring, SIMULATED)
        seconds = whole.seconds - first.seconds
        steps_per_s = (SIMULATED - SKIPPED) / seconds
        tokens_per_s = (whole.num_tokens - first.num_tokens) / seconds
        errors = steps_per_s / measured.steps_per_s - 1, tokens_per_s / measured.tokens_per_s - 1
        for what, error in zip(("steps/s", "tokens/s"), errors, strict=True):
            bars.append(Bar.at_most(f"error of the simulated {what}, m2forge rl {name}", abs(error), 0.1))
        ring = measured.ring
        rows.append(
            (
                name,
                f"{ring.step_s:.2f}",
                f"{ring.own_s:.2f}",
                f"{ring.mean_tokens:.0f}",
                f"{ring.attempt_rate:.0f}",
                f"{ring.sampler_rate:.0f}",
                f"{measured.trainer_waits:.0%} {whole.trainer_waits:.0%}",
                f"{measured.steps_per_s:.3f} {steps_per_s:.3f} {errors[0]:+.1%}",
                f"{measured.tokens_per_s:,.0f} {tokens_per_s:,.0f} {errors[1]:+.1%}",
            )
        )
    given = ("m2forge rl", "step s", "own s", "tokens", "tokens/s of one", "of all")
    columns = (*given, "trainer waits, simulated", "steps/s, simulated, error", "tokens/s, simulated, error")
    print_table(f"Runs of {NUM_STEPS} steps, the first {SKIPPED} left out", columns, rows)
    return bars


@dataclass(frozen=True)
class Measured:
    ring: Ring
    steps_per_s: float
    tokens_per_s: float
    """Sampled."""
    trainer_waits: float
    """Share of the time, without claims."""


def run_ring(folder: Path, shape: Shape) -> Measured:
    config = build(RLConfig, settings(make_random(folder, (FAMILY,)), shape), origin="benchmark")
    write_resolved(config, folder / CONFIG_FILE)
    run(folder / CONFIG_FILE, folder, NAME, (), LIMIT_S, lambda _: True)
    return measure(folder / NAME)


def settings(model: Path, shape: Shape) -> dict[str, TomlValue]:
    batch_groups = BATCH_ATTEMPTS // shape.group_size
    domain: TomlValue = {
        "ratio": 1.0,
        "context": 1024,
        "families": [{"source": FAMILY.family, "difficulty": [*FAMILY.levels]}],
    }
    rollout: TomlValue = {"num_blocks": 512, "step_tokens": 512, "max_running": 32, "max_context": 1024}
    return {
        "name": NAME,
        "model": str(model),
        "num_steps": NUM_STEPS,
        "group_size": shape.group_size,
        "curriculum": {
            "batch_groups": batch_groups,
            "stages": [{"name": "only", "domains": {"agent": domain}}],
        },
        "agent": {
            "command": [sys.executable, str(ROOT / "examples" / "task_agent.py")],
            "jobs_per_worker": shape.num_jobs,
            "timeout_s": 120.0,
            "budget": {"max_calls": 1, "max_tokens": shape.answer_tokens},
            "sandbox": {"backend": "process"},
        },
        # A random policy solves nothing, and groups are trained as they are.
        "pool": {"window": {"queue": 4 * batch_groups, "window": 2 * batch_groups, "no_signal": "train"}},
        "train": {"checkpoint": {"every_steps": NUM_STEPS, "keep": 0}, "machine": {"num_threads": 1, "device": "cpu"}},
        "engine": {"num_threads": 1, "device": "cpu", "dtype": "float32", "rollout": rollout},
    }


def measure(run_dir: Path) -> Measured:
    config, layout = load_resolved(RLConfig, run_dir / CONFIG_FILE), Layout(run_dir)
    steps = read_metrics(run_dir / FILE_NAME)[SKIPPED - 1 :]
    if len(steps) < 2:
        raise SystemExit(f"the run took fewer than {SKIPPED + 1} steps in {LIMIT_S:g} s; see {layout.log}")
    from_s, to_s, num_steps = steps[0].time_s, steps[-1].time_s, len(steps) - 1
    waits = [step.values["waited_s"] for step in steps[1:]]
    pool = Pool(layout.pool(config.pool), read_config(Path(config.model)).vocab_size)
    with pool, pool.database.read() as connection:
        ended = episode_table.c.finished_s.between(from_s, to_s)
        episodes = connection.execute(select(episode_table).where(ended)).all()
        units = read_units(connection, sorted({episode.unit for episode in episodes}), pool.vocab_size)
    # Other attempts of a group may have ended outside of the time.
    names = {attempt_name(episode.name, episode.attempt, Origin.LOOP) for episode in episodes}
    attempts = [stored.episode().calls for unit in units for stored in unit.episodes if stored.name in names]
    lengths = [float(sum(call.response_ids.size for call in calls)) for calls in attempts]
    asking_s = sum(call.finished_s - call.started_s for calls in attempts for call in calls)
    own_s = (sum(episode.finished_s - episode.started_s for episode in episodes) - asking_s) / len(episodes)
    # The busy log has the monotonic clock.
    ago_s = time.time() - time.monotonic()
    working_s = busy_s(read_busy(run_dir / "busy", "engine"), from_s - ago_s, to_s - ago_s)
    mean = statistics.mean(lengths)
    ring = Ring(
        batch_units=config.batch_units,
        attempts_per_unit=config.group_size,
        queue=config.pool.window.queue,
        window=config.pool.window.size,
        num_jobs=config.agent.num_jobs,
        mean_tokens=mean,
        spread=statistics.pstdev(lengths) / mean,
        sampler_rate=sum(lengths) / working_s,
        attempt_rate=sum(lengths) / asking_s,
        step_s=(to_s - from_s - sum(waits)) / num_steps,
        own_s=own_s + leasing_s([(episode.started_s, episode.finished_s) for episode in episodes]),
    )
    whole_s = to_s - from_s
    return Measured(ring, num_steps / whole_s, sum(lengths) / whole_s, sum(waits) / whole_s)


def leasing_s(attempts: Sequence[tuple[float, float]]) -> float:
    """What a free slot waits for its next attempt where one is queued. `attempts`: (lease, end) of each."""
    free, gaps = deque(sorted(end_s for _, end_s in attempts)), list[float]()
    for start_s in sorted(start_s for start_s, _ in attempts):
        # The slots of attempts that ran before the first of these have no end here.
        if free[0] <= start_s:
            gaps.append(start_s - free.popleft())
    return statistics.quantiles(gaps)[0]
