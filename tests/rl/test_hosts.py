"""Agent hosts run the attempts of `m2forge rl`: one is killed, then the loop; nothing is lost, trained twice or falsely
rewarded, and attempts in flight outlive the loop."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Row, select

from m2forge.cluster.process_record import RoleHistory, read_histories
from m2forge.gateway.episodes.closed_journal import journal_ids
from m2forge.model.config_file import read_config
from m2forge.pool.lifecycle import EpisodeState
from m2forge.pool.pool import Pool
from m2forge.pool.tables import episode_table, unit_table
from m2forge.records import VerdictReason
from m2forge.rl.config import RLConfig
from m2forge.rl.eval import read_results
from m2forge.rl.layout import Layout
from tests.pool.test_processes import check
from tests.rl.ring import command_of, running, started, wait_until_gone
from tests.rl.scene import make_config, make_model
from tests.rl.test_faults import judge

AGENT = Path(__file__).parent / "held_agent.py"
VERIFIER = """
from m2forge import Verdict

def verify(task, submission):
    return Verdict(float(submission.answer.strip() == task.instruction.split()[-1]))
"""
WORDS = ("north", "south", "east", "west", "up", "down", "left", "right")
LIMIT_S, POLL_S = 300.0, 0.05
HOSTS = ("host-0", "host-1")
MODULES = ("m2forge.rl.child_main", "tests.rl.hosts_run")
"""What the processes of a run with hosts are started as."""


@dataclass
class Scene:
    config: RLConfig
    layout: Layout
    pool: Pool
    held: Path
    """While it exists, attempts wait between their two calls."""
    command: list[str]
    log: Path

    def wait(self, what: str, is_so: Callable[[], bool]) -> None:
        until_s = time.monotonic() + LIMIT_S
        while not is_so():
            said = self.log.read_text()[-2000:] if self.log.exists() else ""
            assert time.monotonic() < until_s, f"{what}: {said}"
            time.sleep(POLL_S)

    def rows(self) -> list[Row[Any]]:
        with self.pool.database.read() as connection:
            return list(connection.execute(select(episode_table).order_by(episode_table.c.id)))

    def in_flight(self) -> dict[str, str]:
        """Attempts whose agent has asked the policy, and the host of each."""
        opened = {name for journal in self.layout.journals(self.config.cluster) for name in journal_ids(journal)}
        return {name: worker for name, worker in self.pool.running().items() if name in opened}

    def history(self, role: str) -> RoleHistory:
        return next(found for found in read_histories(self.layout.processes) if found.name == role)


def make_scene(folder: Path, num_steps: int = 3, **cluster: object) -> Scene:
    model = make_model(folder / "scene")
    (folder / "my_code.py").write_text(VERIFIER)
    lines = [
        {
            "id": word,
            # That of an evaluation, which the loop runs, is not held.
            "instruction": f"Answer {'at once ' if word == WORDS[-1] else ''}with the word {word}",
            "split": "held_out" if word == WORDS[-1] else "train",
            "verifier": {"python": "my_code.py:verify"},
        }
        for word in WORDS
    ]
    (folder / "tasks.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    held = folder / "held"
    domain = {"ratio": 1.0, "context": 2048, "families": [{"source": str(folder / "tasks.jsonl")}]}
    config = make_config(
        model,
        num_steps=num_steps,
        agent={
            "kind": "command",
            "command": [sys.executable, str(AGENT), "{instruction}", str(held)],
            "max_concurrent": 3,
            "timeout_s": 600.0,
            "sandbox": {"inherits": ["PATH", "PYTHONPATH"], "timeout_s": 600.0},
        },
        curriculum={"batch_groups": 2, "stages": [{"name": "only", "domains": {"agent": domain}}]},
        pool={"window": {"queue": 4, "no_signal": "train"}},
        train={"checkpoint": {"keep": 0}},
        eval={"num_tasks": 1},
        verify={"num_workers": 1},
        cluster={"agent_hosts": len(HOSTS), "outlive_s": LIMIT_S, **cluster},
    )
    layout = Layout(folder / config.name)
    layout.run_dir.mkdir(mode=0o700)
    command = command_of(config, folder, "tests.rl.hosts_run")
    pool = Pool(layout.pool(config.pool), read_config(model).vocab_size)
    return Scene(config, layout, pool, held, command, folder / "loop.log")


def pids_of(run_dir: Path) -> dict[str, int]:
    """The processes of the run by role; the keeper too."""
    found = {}
    for pid, words in running():
        if str(run_dir) not in words:
            continue
        if "m2forge.cluster.keeper" in words:
            found["keeper"] = pid
        elif module := next((module for module in MODULES if module in words), None):
            kind, _, *arguments = filter(None, words[words.index(module) + 1 :])
            # Its socket, its name, both or neither.
            found[arguments[-1] if arguments and not arguments[-1].isdigit() else kind] = pid
    return found


def test_attempts_on_hosts_outlive_a_killed_host_and_the_loop(tmp_path: Path) -> None:
    scene = make_scene(tmp_path)
    scene.held.touch()
    with scene.pool:
        with started(scene.command, scene.log) as loop:
            wait_for_attempts(scene, loop)
            kill_host(scene)
            wait_for_attempts(scene, loop)
            before, pids = scene.in_flight(), pids_of(scene.layout.run_dir)
            loop.kill()
            loop.wait()
        ended = end_without_loop(scene, before)
        assert pids.items() - pids_of(scene.layout.run_dir).items() <= {("trainer", pids["trainer"])}, (
            "a process died with the loop"
        )
        with started(scene.command, scene.log) as loop:
            assert loop.wait(LIMIT_S) == 0, scene.log.read_text()[-3000:]
        wait_until_gone(scene.layout.run_dir)
        judge(scene.pool, scene.config)
        check(scene.pool)
        check_rewards(scene, ended)
    assert scene.history("host-0").num_starts == 2
    assert [status for _, status in scene.history("host-0").deaths] == [-signal.SIGKILL]
    assert all(scene.history(role).num_starts == 1 for role in ("host-1", "gateway", "sampler"))
    assert scene.history("trainer").num_starts == 2
    assert [result.step for result in read_results(scene.layout.evaluations)] == [0, scene.config.num_steps]
    assert not journal_ids(scene.layout.journal), "what is recorded elsewhere is deleted"
    assert not (scene.layout.run_dir / "keeper.sock").exists()


def wait_for_attempts(scene: Scene, loop: subprocess.Popen[bytes]) -> None:
    """Wait until both hosts have attempts in flight."""

    def is_so() -> bool:
        assert loop.poll() is None, f"the run has ended: {scene.log.read_text()[-2000:]}"
        return {*scene.in_flight().values()} == {*HOSTS}

    scene.wait("attempts on both hosts", is_so)


def kill_host(scene: Scene) -> None:
    """Its attempts restart, under other keys; those of the other host go on."""
    before = scene.in_flight()
    lost = {name for name, worker in before.items() if worker == "host-0"}
    os.kill(pids_of(scene.layout.run_dir)["host-0"], signal.SIGKILL)
    scene.wait("the attempts of a killed host restart", lambda: not lost & scene.pool.running().keys())
    scene.wait("the old keys are refused", lambda: not lost & set(journal_ids(scene.layout.journal)))
    others = before.keys() - lost
    assert others <= scene.pool.running().keys(), "attempts of the other host were lost"


def end_without_loop(scene: Scene, before: dict[str, str]) -> set[str]:
    """The attempts in flight end and are stored while there is no loop; returns their names."""

    def stored() -> set[str]:
        ended = [row for row in scene.rows() if row.state == EpisodeState.FINISHED]
        return {f"{row.name}-{row.attempt}" for row in ended}

    scene.held.unlink()
    scene.wait("attempts end without a loop", lambda: before.keys() <= stored())
    assert all(row.reward is None for row in scene.rows() if f"{row.name}-{row.attempt}" in before)
    return stored()


def check_rewards(scene: Scene, ended: set[str]) -> None:
    """Every trained attempt made both calls, was verified, and has the reward of its answer; those that ended without a
    loop were not repeated."""
    with scene.pool.database.read() as connection:
        units = connection.execute(select(unit_table.c.id, unit_table.c.task)).all()
    tasks = {row.id: row.task for row in units}
    trained = [row for row in scene.rows() if row.state == EpisodeState.TRAINED]
    assert ended <= {f"{row.name}-{row.attempt}" for row in trained}
    for row in trained:
        artifacts = json.loads(row.artifacts)
        verdict, word = json.loads(artifacts["verdict"]), json.loads(tasks[row.unit])["instruction"].split()[-1]
        assert (row.num_calls, row.failure, verdict["reason"]) == (2, None, VerdictReason.JUDGED)
        assert json.loads(row.reward)["perf"] == float(artifacts["answer"].strip() == word)
    assert {json.loads(row.reward)["perf"] for row in trained} == {0.0, 1.0}


@pytest.mark.parametrize("num_hosts", [-1, 1.5])
def test_a_number_of_hosts_that_is_none_is_refused(tmp_path: Path, num_hosts: float) -> None:
    with pytest.raises(ValueError, match=r"cluster\.agent_hosts"):
        make_config(tmp_path, cluster={"agent_hosts": num_hosts})
