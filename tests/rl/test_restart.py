"""Processes that end by a signal or a failure of their own: the loop starts them again and the run completes."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Set
from pathlib import Path

import pytest

from m2forge.model.config_file import read_config
from m2forge.pool.pool import Pool
from m2forge.rl.layout import Layout
from m2forge.rl.loop import is_trained
from m2forge.rl.view import read_last_step
from tests.rl.ring import agent_command, command_of, processes, started
from tests.rl.scene import make_config, make_model
from tests.rl.test_faults import judge, wait_until_gone

TIMEOUT_S, POLL_S = 150.0, 0.05


@pytest.mark.parametrize(
    "signals",
    [
        # Terminated, a gateway exits with 0.
        {"gateway": signal.SIGTERM, "sampler": signal.SIGTERM, "trainer": signal.SIGTERM},
        # The engine fails; the trainer exits with 0 before its last step.
        {"sampler": signal.SIGUSR1, "trainer": signal.SIGUSR1},
    ],
    ids=["terminated", "failed"],
)
def test_ended_processes_are_restarted_and_the_run_completes(
    tmp_path: Path, signals: dict[str, signal.Signals]
) -> None:
    agent = {
        "command": agent_command(tmp_path / "notes.jsonl"),
        "timeout_s": 60.0,
        "budget": {"max_calls": 2, "max_tokens": 32},
        "sandbox": {"inherits": ["PATH", "PYTHONPATH"], "timeout_s": 1000.0},
    }
    # A random policy solves nothing: groups without signal are trained as they are.
    pool = {"window": {"queue": 8, "no_signal": "train"}}
    model = make_model(tmp_path / "scene")
    config = make_config(model, num_steps=3, agent=agent, pool=pool, eval={"num_tasks": 2})
    run_dir, log = tmp_path / config.name, tmp_path / "loop.log"
    with started(command_of(config, tmp_path, "tests.rl.breakable"), log) as loop:
        pids = wait_for_first_step(run_dir, loop, signals.keys())
        for name, number in signals.items():
            os.kill(pids[name], number)
        assert loop.wait(TIMEOUT_S) == 0, log.read_text()[-2000:]
    wait_until_gone(run_dir)
    ended = re.findall(r"the (\w+) process ended with status", log.read_text())
    assert sorted(ended) == sorted(signals), log.read_text()[-2000:]
    if signals["sampler"] == signal.SIGUSR1:
        said = (run_dir / "log" / "sampler.log").read_text()
        assert "the rollout engine failed" in said
        assert "ArithmeticError: broken by SIGUSR1" in said
    assert is_trained(Layout(run_dir), config)
    with Pool(Layout(run_dir).pool(config.pool), read_config(model).vocab_size) as trained:
        judge(trained, config)


def wait_for_first_step(run_dir: Path, loop: subprocess.Popen[bytes], names: Set[str]) -> dict[str, int]:
    """The processes of these names, once the run has made a step."""
    until_s = time.monotonic() + TIMEOUT_S
    while read_last_step(run_dir / "metrics.jsonl") is None or not names <= (found := processes(loop.pid)).keys():
        assert loop.poll() is None, "the run has ended"
        assert time.monotonic() < until_s, "the run makes no step"
        time.sleep(POLL_S)
    return found
