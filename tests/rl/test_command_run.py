"""`m2forge rl` with a program per attempt: two steps, with every process killed in between."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from sqlalchemy import select

from m2forge.config import build
from m2forge.errors import ConfigError
from m2forge.model.config_file import read_config
from m2forge.pool.pool import Pool
from m2forge.pool.state import UnitState
from m2forge.pool.tables import episode_table, unit_table
from m2forge.rl.config import RLConfig
from m2forge.rl.layout import Layout
from m2forge.rl.loop import is_trained, run_rl
from m2forge.rl.view import read_last_step
from tests.rl.ring import command_of, folder_of, processes, running, started, wait_until_gone
from tests.rl.scene import make_config, make_model

PROGRAM = Path(__file__).parent / "shell_agent.py"
TIMEOUT_S, POLL_S = 150.0, 0.05


def make_run(model: Path) -> RLConfig:
    return make_config(
        model,
        num_steps=2,
        agent={
            "kind": "command",
            "command": [sys.executable, str(PROGRAM), "{model}", "Write the word ready to answer.txt"],
            "answer": {"file": "answer.txt"},
            "timeout_s": 60.0,
            "max_concurrent": 3,
        },
        # All answers are wrong: groups without signal are trained as they are.
        pool={"window": {"queue": 4, "no_signal": "train"}},
        eval={"num_tasks": 2},
    )


def agents_of(run_dir: Path) -> list[int]:
    """The programs of attempts in flight."""
    return [pid for pid, words in running() if str(PROGRAM) in words and folder_of(pid).is_relative_to(run_dir)]


@pytest.mark.slow
def test_killed_processes_and_programs_lose_no_attempt(tmp_path: Path) -> None:
    model = make_model(tmp_path / "scene")
    config, log, run_dir = make_run(model), tmp_path / "loop.log", tmp_path / "run"
    command = command_of(config, tmp_path, "tests.rl.scripted_run")
    until_s = time.monotonic() + TIMEOUT_S
    with started(command, log) as loop:
        while read_last_step(run_dir / "metrics.jsonl") is None or not agents_of(run_dir):
            assert loop.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until_s, log.read_text()[-3000:]
            time.sleep(POLL_S)
        found = processes(loop.pid)
        for pid in (*agents_of(run_dir), found["gateway"], found["sampler"], found["trainer"]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(1.0)
        loop.kill()
    wait_until_gone(run_dir)
    with started(command, log) as loop:
        assert loop.wait(TIMEOUT_S) == 0, log.read_text()[-3000:]
    wait_until_gone(run_dir)
    assert is_trained(Layout(run_dir), config)
    assert not list((run_dir / "workspaces").iterdir()), "a workspace is left"
    check_attempts(config, run_dir)


def check_attempts(config: RLConfig, run_dir: Path) -> None:
    """Every trained unit was trained once; every attempt has its calls, its file and its verdict."""
    vocab_size = read_config(Path(config.model)).vocab_size
    with Pool(Layout(run_dir).pool(config.pool), vocab_size) as pool, pool.database.read() as connection:
        units = connection.execute(select(unit_table.c.id, unit_table.c.step, unit_table.c.state)).all()
        trained = {row.id: row.step for row in units if row.state == UnitState.TRAINED}
        episodes = connection.execute(
            select(episode_table.c.unit, episode_table.c.failure, episode_table.c.artifacts)
        ).all()
    assert sorted(trained.values()) == [1, 1, 2, 2]
    artifacts = [json.loads(row.artifacts) for row in episodes if row.unit in trained]
    assert len(artifacts) == 2 * len(trained)
    assert {each["answer"] for each in artifacts} == {"ready", "another"}
    assert all(json.loads(each["verdict"])["reason"] == "judged" for each in artifacts)


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"kind": "command", "command": ["no-such-agent", "{instruction}"]}, "'no-such-agent' is not in PATH"),
        ({"command": ["no-such-agent"]}, "'no-such-agent' is not in PATH"),
        ({"kind": "command", "command": ["./agent.sh"]}, "'./agent.sh' is not an executable file"),
    ],
)
def test_a_command_that_is_not_there_writes_nothing(tmp_path: Path, agent: dict[str, object], message: str) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError) as caught:
        run_rl(make_config(tmp_path / "model", agent=agent), tmp_path / "runs")
    assert message in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_an_agent_without_a_kind_is_a_worker(tmp_path: Path) -> None:
    config = make_config(tmp_path, agent={"command": ["true"]})
    assert (config.agent.kind, config.agent.num_jobs) == ("worker", 16)
    with pytest.raises(ConfigError, match=r"agent: Input tag 'robot'.*'worker', 'command'"):
        make_config(tmp_path, agent={"kind": "robot", "command": ["true"]})
    with pytest.raises(ConfigError, match=r"agent\.num_workers: unknown key"):
        make_config(tmp_path, agent={"kind": "command", "command": ["true"], "num_workers": 2})
    with pytest.raises(ConfigError, match=r"no placeholder {instuction}; did you mean 'instruction'"):
        make_config(tmp_path, agent={"kind": "command", "command": ["x", "{instuction}"]})
    assert build(RLConfig, {**config.model_dump(mode="json", exclude_none=True)}) == config
