"""A run of programs per attempt whose every process is killed once it has made a step, and which is then resumed."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import select

from m2forge.model.config_file import read_config
from m2forge.observe.metrics import read_last_step
from m2forge.pool.lifecycle import UnitState
from m2forge.pool.pool import Pool
from m2forge.pool.tables import episode_table, unit_table
from m2forge.rl.config import RLConfig
from m2forge.rl.layout import Layout
from m2forge.rl.loop import is_trained
from tests.rl.ring import ancestors, command_of, folder_of, processes, running, started, wait_until_gone

POLL_S = 0.05
SANDBOX_GONE_S = 2.0
PROGRAM = "shell_agent.py"
"""What runs in the sandboxes of attempts."""


def run_with_kills(config: RLConfig, runs: Path, limit_s: float, *, alone: Sequence[str] = ()) -> None:
    """Kill -9 the processes of `alone` one after another and let the loop restart each; after the first step kill
    agents, gateway, sampler and trainer together, and then the loop; resume until the run is done. Sandboxes end with
    the loop."""
    log, run_dir = runs / "loop.log", runs / config.name
    command = command_of(config, runs, "tests.rl.scripted_run")
    until_s = time.monotonic() + limit_s
    with started(command, log) as loop:
        for name in alone:
            # The trainer trains while no attempt is in flight.
            while not (killed := find(name, loop.pid, run_dir)) or (
                name != "trainer" and not find("agent", loop.pid, run_dir)
            ):
                check_alive(loop, log, until_s)
            kill(killed)
            while not (now := find(name, loop.pid, run_dir)) or killed & now:
                check_alive(loop, log, until_s)
        while read_last_step(run_dir / "metrics.jsonl") is None or not find("agent", loop.pid, run_dir):
            check_alive(loop, log, until_s)
        found = processes(loop.pid)
        kill({*find("agent", loop.pid, run_dir), found["gateway"], found["sampler"], found["trainer"]})
        time.sleep(1.0)
        kill_loop(loop)
    wait_until_gone(run_dir)
    with started(command, log) as loop:
        assert loop.wait(limit_s) == 0, log.read_text()[-3000:]
    wait_until_gone(run_dir)
    assert is_trained(Layout(run_dir), config)
    assert not list((run_dir / "workspaces").iterdir()), "a workspace is left"


def check_alive(loop: subprocess.Popen[bytes], log: Path, until_s: float) -> None:
    assert loop.poll() is None, log.read_text()[-3000:]
    assert time.monotonic() < until_s, log.read_text()[-3000:]
    time.sleep(POLL_S)


def find(name: str, loop: int, run_dir: Path) -> set[int]:
    """The process of this name; for `agent` those of the attempts in flight, for `sandbox` the supervisors of theirs,
    for `verifier` the workers that run families' code."""
    if name == "agent":
        commands = dict(running())
        inside = {pid for pid in sandboxes_of(loop) if any(PROGRAM in word for word in commands.get(pid, []))}
        return set(agents_of(run_dir)) | inside
    if name == "sandbox":
        return {pid for pid in sandboxes_of(loop) if loop in ancestors(pid)[:1]}
    if name == "verifier":
        return {pid for pid, words in running() if "m2forge.tasks.worker" in words and loop in ancestors(pid)}
    return {pid for each, pid in processes(loop).items() if each == name}


def sandboxes_of(loop: int) -> set[int]:
    """All processes of a run's sandboxes, their supervisors included."""
    commands = dict(running())
    found = set()
    for pid in commands:
        chain = [pid, *ancestors(pid)]
        if loop in chain[1:]:
            inner = [commands.get(each, []) for each in chain[: chain.index(loop)]]
            if any("/sandbox" in words[0] and words[1:2] == ["start"] for words in inner if words):
                found.add(pid)
    return found


def kill_loop(loop: subprocess.Popen[bytes]) -> None:
    """Kill the loop; no sandbox is left after two seconds."""
    inside = sandboxes_of(loop.pid)
    loop.kill()
    loop.wait()
    until_s = time.monotonic() + SANDBOX_GONE_S
    while left := [pid for pid, _ in running() if pid in inside and not is_zombie(pid)]:
        assert time.monotonic() < until_s, f"processes of sandboxes outlived their loop: {left}"
        time.sleep(0.02)


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def kill(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def agents_of(run_dir: Path) -> list[int]:
    """The processes of attempts in flight."""
    return [pid for pid, _ in running() if folder_of(pid).is_relative_to(run_dir / "workspaces")]


def trained_artifacts(config: RLConfig, run_dir: Path) -> list[dict[str, str]]:
    """The artifacts of all trained attempts, after it was checked that every unit was trained once."""
    vocab_size = read_config(Path(config.model)).vocab_size
    with Pool(Layout(run_dir).pool(config.pool), vocab_size) as pool, pool.database.read() as connection:
        units = connection.execute(select(unit_table.c.id, unit_table.c.step, unit_table.c.state)).all()
        trained = {row.id: row.step for row in units if row.state == UnitState.TRAINED}
        episodes = connection.execute(
            select(episode_table.c.unit, episode_table.c.num_calls, episode_table.c.artifacts)
        ).all()
    steps = [step for step in range(1, config.num_steps + 1) for _ in range(config.curriculum.batch_groups)]
    assert sorted(trained.values()) == steps
    mine = [row for row in episodes if row.unit in trained]
    assert len(mine) == config.group_size * len(trained)
    assert all(row.num_calls for row in mine)
    artifacts: list[dict[str, str]] = [json.loads(row.artifacts) for row in mine]
    assert all(json.loads(each["verdict"])["reason"] == "judged" for each in artifacts)
    return artifacts
