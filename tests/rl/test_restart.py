"""Processes that fail, are terminated, killed or stopped, on PostgreSQL: the loop restarts them, a loop that is killed
itself is resumed, from a folder with the keys of an earlier release, and nothing is lost or learnt twice.
(test_own_tasks.py kills those of a run on SQLite.)"""

import re
import signal
import stat
import subprocess
import time
from collections.abc import Mapping, Set
from pathlib import Path

import pytest

from m2forge.gateway.episodes.closed_journal import journal_ids
from m2forge.model.config_file import read_config
from m2forge.observe.metrics import read_last_step, read_metrics
from m2forge.pool.pool import Pool
from m2forge.rl.eval import read_attempts, read_results
from m2forge.rl.layout import Layout
from m2forge.rl.loop import is_trained, train_rl
from tests.pool.postgres import find_programs
from tests.pool.test_processes import check
from tests.rl.ring import agent_command, command_of, processes, started, wait_until_gone
from tests.rl.scene import make_config, make_model
from tests.rl.test_faults import NO_POSTGRES, Fault, Witness, database, judge, strike, tell

TIMEOUT_S, POLL_S = 500.0, 0.05


ROUNDS: tuple[dict[str, Fault], ...] = (
    {"sampler": Fault.FAIL, "trainer": Fault.FAIL},
    {"gateway": Fault.TERMINATE, "sampler": Fault.TERMINATE, "trainer": Fault.TERMINATE},
    {"gateway": Fault.KILL, "trainer": Fault.STOP},
)
"""One after each step; failures first, because what SIGUSR1 does is set up while a process starts. The trainer's exits
with 0 before its last step, and so does a gateway that is terminated."""
STOPPED_S = 2.0
NUM_TASKS = 4


def test_struck_processes_are_restarted_and_all_is_learnt_once(tmp_path: Path) -> None:
    if find_programs() is None:
        pytest.skip(NO_POSTGRES)
    with database("postgres") as url:
        run_and_strike(tmp_path, url)


def run_and_strike(tmp_path: Path, url: str) -> None:
    agent = {
        "command": agent_command(tmp_path / "notes.jsonl"),
        "timeout_s": 60.0,
        "budget": {"max_calls": 2, "max_tokens": 32},
        "sandbox": {"inherits": ["PATH", "PYTHONPATH"], "timeout_s": 1000.0},
    }
    # A random policy solves nothing: groups without signal are trained as they are.
    pool = {"url": url, "window": {"queue": 8, "no_signal": "train"}}
    model = make_model(tmp_path / "scene")
    config = make_config(model, num_steps=2 * len(ROUNDS), agent=agent, pool=pool, eval={"num_tasks": NUM_TASKS})
    run_dir, log = tmp_path / config.name, tmp_path / "loop.log"
    layout, command = Layout(run_dir), command_of(config, tmp_path, "tests.rl.breakable")
    with Pool(layout.pool(config.pool), read_config(model).vocab_size) as stored:
        witness = Witness(stored, tmp_path, config)
        with started(command, log) as loop:
            struck: dict[str, int] = {}
            for num_steps, faults in enumerate(ROUNDS, start=1):
                pids = wait_for_steps(num_steps, run_dir, loop, faults.keys(), struck)
                witness.look()
                witness.try_old_keys()
                for name, fault in faults.items():
                    assert strike(fault, pids[name], STOPPED_S)
                struck = {name: pids[name] for name, fault in faults.items() if fault is not Fault.STOP}
            wait_for_steps(len(ROUNDS) + 1, run_dir, loop, ROUNDS[-1].keys(), struck)
            loop.kill()
            assert loop.wait(TIMEOUT_S) == -signal.SIGKILL
        wait_until_gone(run_dir)
        witness.look()
        check(stored)
        resolved = write_former_keys(run_dir / "config.toml")
        with started(command, log) as loop:
            assert loop.wait(TIMEOUT_S) == 0, log.read_text()[-2000:]
        assert (run_dir / "config.toml").read_text(encoding="utf-8") == resolved
        wait_until_gone(run_dir)
        witness.look()
        judge(stored, config)
    tell(tmp_path, config)
    check_results(run_dir, config.num_steps)
    # A run that is complete does nothing more.
    assert train_rl(tmp_path / "config.toml", runs=tmp_path) == (run_dir / "model", read_results(layout.evaluations))
    ended = re.findall(r"the (\w+) process ended with status", log.read_text())
    expected = [name for faults in ROUNDS for name, fault in faults.items() if fault is not Fault.STOP]
    assert sorted(ended) == sorted(expected), log.read_text()[-2000:]
    said = (run_dir / "log" / "sampler.log").read_text()
    assert "the rollout engine failed" in said
    assert "ArithmeticError: broken by SIGUSR1" in said
    assert is_trained(layout, config)


def write_former_keys(path: Path) -> str:
    """Make a run's folder one of an earlier release; returns the configuration as it was."""
    current = former = path.read_text(encoding="utf-8")
    for name, before in (("[lr]", "[rate]"), ("[eval]", "[check]"), ("on_weight_update", "on_load")):
        assert name in former
        former = former.replace(name, before)
    path.write_text(former, encoding="utf-8")
    return current


def check_results(run_dir: Path, num_steps: int) -> None:
    """Agents acted, before and after, and the policy learnt at every step."""
    results = read_results(Layout(run_dir).evaluations)
    assert [found.step for found in results] == [0, num_steps]
    assert all(found.num_tasks == NUM_TASKS and found.num_broken == 0 for found in results)
    assert (run_dir / "model" / "tokenizer.json").is_file()
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert not journal_ids(run_dir / "journal"), "what is recorded elsewhere is let go"
    attempts = read_attempts(Layout(run_dir).eval_attempts)
    assert [found.step for found in attempts] == [0] * NUM_TASKS + [num_steps] * NUM_TASKS
    assert [found.task for found in attempts[:NUM_TASKS]] == [found.task for found in attempts[NUM_TASKS:]]
    assert all(found.tree().samples and not found.failure for found in attempts)
    steps = read_metrics(run_dir / "metrics.jsonl")
    assert [step.step for step in steps] == [*range(1, 1 + num_steps)]
    assert all(step.values["reward/agent"] == step.values["reward"] for step in steps)
    assert read_last_step(run_dir / "metrics.jsonl") == steps[-1]


def wait_for_steps(
    num_steps: int, run_dir: Path, loop: subprocess.Popen[bytes], names: Set[str], gone: Mapping[str, int]
) -> dict[str, int]:
    """The processes of these names, none of them in `gone`, once the run has made this many steps."""
    metrics, until_s = run_dir / "metrics.jsonl", time.monotonic() + TIMEOUT_S
    while True:
        assert loop.poll() is None, "the run has ended"
        assert time.monotonic() < until_s, "the run makes no step"
        last = read_last_step(metrics)
        if last is not None and last.step >= num_steps:
            found = processes(loop.pid)
            if names <= found.keys() and not found.items() & gone.items():
                return found
        time.sleep(POLL_S)
