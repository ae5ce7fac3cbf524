"""Random processes of a run over task folders are killed while its programs work in namespaces: nothing is lost, and
nothing is left.

`test_own_tasks.py` holds the short version, in which every process is killed once."""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from m2forge.rl.layout import Layout
from m2forge.rl.loop import is_trained
from tests.rl.killed_run import check_alive, find, kill, kill_loop, sandboxes_of, trained_artifacts
from tests.rl.ring import command_of, started, wait_until_gone
from tests.rl.scene import make_model
from tests.rl.test_own_tasks import CODE, make_run, write_folders
from tests.sandbox.places import require

NUM_KILLS = NUM_FOLDERS = 50
NUM_STEPS = 120
"""So many that a fast machine does not end the run before the last kill."""
VICTIMS = ("loop", "gateway", "sampler", "trainer", "agent", "agent", "sandbox", "sandbox", "verifier")
LIMIT_S = 1800.0


@pytest.mark.long
def test_fifty_kills_lose_no_attempt_and_leave_no_sandbox(tmp_path: Path) -> None:
    require("namespace")
    (tmp_path / "my_code.py").write_text(CODE)
    write_folders(tmp_path / "folders", [f"word{number}" for number in range(NUM_FOLDERS)])
    fields = {
        "num_steps": NUM_STEPS,
        "eval": {"num_tasks": 0},
        "pool": {"window": {"queue": 4, "no_signal": "train"}, "retention": {"versions": NUM_STEPS}},
    }
    config = make_run(make_model(tmp_path / "scene"), tmp_path, "folders", **fields)
    run_dir, log, until_s = tmp_path / config.name, tmp_path / "loop.log", time.monotonic() + LIMIT_S
    victims = _victims(random.Random(0))
    is_over = False
    while not is_over:
        assert time.monotonic() < until_s, log.read_text()[-3000:]
        with started(command_of(config, tmp_path, "tests.rl.scripted_run"), log) as loop:
            for name, wait_s in victims:
                while not (pids := {loop.pid} if name == "loop" else find(name, loop.pid, run_dir)):
                    check_alive(loop, log, until_s)
                time.sleep(wait_s)
                if name == "loop":
                    kill_loop(loop)
                    break
                kill(pids)
            else:
                assert loop.wait(LIMIT_S) == 0, log.read_text()[-3000:]
                is_over = True
        wait_until_gone(run_dir)
        assert not sandboxes_of(loop.pid)
    assert is_trained(Layout(run_dir), config)
    verdicts = [json.loads(each["verdict"]) for each in trained_artifacts(config, run_dir)]
    rewards = {1.0: {"reward": 1.0}, 0.0: {"reward": 0.0}}
    assert all(verdict["evidence"]["rewards"] == rewards[verdict["perf"]] for verdict in verdicts)
    assert not list((run_dir / "workspaces").iterdir())


def _victims(rng: random.Random) -> Iterator[tuple[str, float]]:
    """What is killed, and how long it may go on before; shared by all loops of the run."""
    for _ in range(NUM_KILLS):
        yield rng.choice(VICTIMS), rng.uniform(0.0, 1.5)
