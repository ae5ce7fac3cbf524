"""Processes that end by a signal or a failure of their own: the loop starts them again and the run completes."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Set
from pathlib import Path

from m2forge.model.config_file import read_config
from m2forge.pool.pool import Pool
from m2forge.rl.layout import Layout
from m2forge.rl.loop import is_trained
from m2forge.rl.view import read_last_step
from tests.rl.ring import agent_command, command_of, processes, started, wait_until_gone
from tests.rl.scene import make_config, make_model
from tests.rl.test_faults import judge

TIMEOUT_S, POLL_S = 150.0, 0.05


TERMINATED = {"gateway": signal.SIGTERM, "sampler": signal.SIGTERM, "trainer": signal.SIGTERM}
"""A terminated gateway exits with 0."""
FAILED = {"sampler": signal.SIGUSR1, "trainer": signal.SIGUSR1}
"""The engine fails; the trainer exits with 0 before its last step."""


def test_ended_processes_are_restarted_and_the_run_completes(tmp_path: Path) -> None:
    agent = {
        "command": agent_command(tmp_path / "notes.jsonl"),
        "timeout_s": 60.0,
        "budget": {"max_calls": 2, "max_tokens": 32},
        "sandbox": {"inherits": ["PATH", "PYTHONPATH"], "timeout_s": 1000.0},
    }
    # A random policy solves nothing: groups without signal are trained as they are.
    pool = {"window": {"queue": 8, "no_signal": "train"}}
    model = make_model(tmp_path / "scene")
    config = make_config(model, num_steps=4, agent=agent, pool=pool, eval={"num_tasks": 2})
    run_dir, log = tmp_path / config.name, tmp_path / "loop.log"
    with started(command_of(config, tmp_path, "tests.rl.breakable"), log) as loop:
        struck: dict[str, int] = {}
        # Failures first: what SIGUSR1 does is set up while a process starts.
        for num_steps, signals in enumerate((FAILED, TERMINATED), start=1):
            pids = wait_for_steps(num_steps, run_dir, loop, signals.keys(), struck)
            for name, number in signals.items():
                os.kill(pids[name], number)
            struck = {name: pids[name] for name in signals}
        assert loop.wait(TIMEOUT_S) == 0, log.read_text()[-2000:]
    wait_until_gone(run_dir)
    ended = re.findall(r"the (\w+) process ended with status", log.read_text())
    assert sorted(ended) == sorted([*TERMINATED, *FAILED]), log.read_text()[-2000:]
    said = (run_dir / "log" / "sampler.log").read_text()
    assert "the rollout engine failed" in said
    assert "ArithmeticError: broken by SIGUSR1" in said
    assert is_trained(Layout(run_dir), config)
    with Pool(Layout(run_dir).pool(config.pool), read_config(model).vocab_size) as trained:
        judge(trained, config)


def wait_for_steps(
    num_steps: int, run_dir: Path, loop: subprocess.Popen[bytes], names: Set[str], gone: Mapping[str, int]
) -> dict[str, int]:
    """The processes of these names, none of them in `gone`, once the run has made this many steps."""
    metrics, until_s = run_dir / "metrics.jsonl", time.monotonic() + TIMEOUT_S
    while True:
        assert loop.poll() is None, "the run has ended"
        assert time.monotonic() < until_s, "the run makes no step"
        last, found = read_last_step(metrics), processes(loop.pid)
        if last is not None and last.step >= num_steps and names <= found.keys() and not found.items() & gone.items():
            return found
        time.sleep(POLL_S)
