"""Attempts per second of the run of forge.py: the loop runs them all, and agent hosts with gateways of their own do.

Both runs train the same model on the same tasks with the same limits, without evaluations. Counted from the end of the
first step to that of the last: attempts that ended with a reward, the time in which the GPU ran a kernel, and the
processor time of each kind of process.
"""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from forge_split import device_split, print_device_split, print_trainer_split
from forge_watch import ROOT, Watched, run
from report import Bar, print_table
from sqlalchemy import func, select

from m2forge.config import load_resolved
from m2forge.model.config_file import read_config
from m2forge.observe.busy import read_busy
from m2forge.pool.pool import Pool
from m2forge.pool.tables import episode_table
from m2forge.rl.config import RLConfig
from m2forge.rl.layout import Layout
from m2forge.train.run_dir import CONFIG_FILE

NAME = "smollm2-gym"
CONFIG = ROOT / "configs" / "rl" / f"{NAME}.toml"
LAYOUTS = {
    "the loop runs attempts": ("cluster.agent_hosts=0",),
    "agent hosts run attempts": (
        "cluster.samplers=2",
        "cluster.agent_hosts=4",
        "cluster.gateways=4",
        "agent.num_workers=3",
        "agent.jobs_per_worker=48",
    ),
}
NO_EVAL = ("eval.num_tasks=0", "eval.every_steps=0", "num_steps=100000", "train.checkpoint.every_steps=100000")
MIN_RATIO, MIN_KERNELS = 3.0, 0.35


def rates(folder: Path, sets: Sequence[str], limit_s: float) -> list[Bar]:
    found = []
    for title, layout in LAYOUTS.items():
        shutil.rmtree(folder / NAME, ignore_errors=True)
        watched = run(CONFIG, folder, NAME, [*layout, *sets, *NO_EVAL], limit_s, lambda _: True)
        print(f"\n-- {title}: {' '.join(layout)}", flush=True)
        found.append(report_rate(watched))
    before, after = found[0], found[-1]
    ratio, kernels = after[0] / before[0], after[1]
    bars = [Bar.at_least("attempts/s with agent hosts over those of the loop", ratio, MIN_RATIO)]
    return bars if kernels is None else [*bars, Bar.at_least("share of time with a kernel", kernels, MIN_KERNELS)]


def report_rate(watched: Watched) -> tuple[float, float | None]:
    """Attempts per second, and the share of the time in which a kernel ran."""
    config, layout = load_resolved(RLConfig, watched.run_dir / CONFIG_FILE), Layout(watched.run_dir)
    steps = read_busy(watched.run_dir / "busy", "trainer")
    if len(steps) < 2:
        raise SystemExit(f"the run took {len(steps)} steps; see {layout.log}, or give it more time by --limit-s")
    from_s, to_s = steps[0][1], steps[-1][1]
    print_trainer_split(watched.run_dir)
    if (split := device_split(watched)) is not None:
        print_device_split(split)
    wall_s = time.time() - time.monotonic()
    is_within = episode_table.c.finished_s.between(from_s + wall_s, to_s + wall_s)
    query = select(func.count(), func.sum(episode_table.c.num_calls))
    query = query.where(episode_table.c.reward_total.is_not(None), is_within)
    pool = Pool(layout.pool(config.pool), read_config(Path(config.model)).vocab_size)
    with pool, pool.database.read() as connection:
        num_attempts, num_calls = connection.execute(query).one()
    whole_s = to_s - from_s
    rows = [(role, f"{cores:.2f}") for role, cores in cores_by_role(watched, from_s, to_s).items()]
    print_table("Processor cores in use", ("process", "cores"), rows)
    rate = num_attempts / whole_s
    print(
        f"{num_attempts} attempts with {num_calls} calls in {whole_s:.0f} s: {rate:.1f} attempts/s, {len(steps)} steps"
    )
    return rate, None if split is None else split.kernels


def cores_by_role(watched: Watched, from_s: float, to_s: float) -> dict[str, float]:
    within = [(at_s, seconds) for at_s, seconds in watched.processors if from_s <= at_s <= to_s]
    if len(within) < 2:
        return {}
    (first_s, first), (last_s, last) = within[0], within[-1]
    return {role: (seconds - first.get(role, 0.0)) / (last_s - first_s) for role, seconds in last.items()}
