"""The whole ring in its own processes: agents act, the trainer learns, weights go back; killed anywhere, it resumes."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sqlalchemy import select

from m2forge.config import write_resolved
from m2forge.forge.config import ForgeConfig
from m2forge.forge.kept import read_kept
from m2forge.forge.layout import Layout
from m2forge.forge.stage import run_forge
from m2forge.forge.view import read_last_step
from m2forge.model.folder import read_config
from m2forge.observe.metrics import read_metrics
from m2forge.pool.pool import Pool
from m2forge.pool.schema import unit_table
from m2forge.pool.state import UnitState
from tests.forge.scene import make_config, make_model

ROOT = Path(__file__).parent.parent.parent
AGENT = ROOT / "examples" / "task_agent.py"
NUM_KILLS = 50 if os.environ.get("M2FORGE_LONG") else 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("scene"))


def make_run(model: Path, num_steps: int) -> ForgeConfig:
    return make_config(
        model,
        num_steps=num_steps,
        agent={
            "command": [sys.executable, str(AGENT)],
            "timeout_s": 60.0,
            "budget": {"max_calls": 2, "max_tokens": 32},
            "sandbox": {"inherits": ["PATH", "PYTHONPATH"], "timeout_s": 1000.0},
        },
        # A random policy solves nothing: what it is rewarded for is the form alone, and groups are trained as they are.
        pool={"window": {"queue": 8, "no_signal": "train"}},
        check={"num_tasks": 4},
    )


def trained_steps(config: ForgeConfig, run_dir: Path) -> list[int]:
    """Steps of the units that are learnt, in their order."""
    query = select(unit_table.c.step).where(unit_table.c.state == UnitState.TRAINED).order_by(unit_table.c.step)
    vocab_size = read_config(Path(config.model)).vocab_size
    with Pool(Layout(run_dir).pool(config.pool), vocab_size) as pool, pool.database.read() as connection:
        return list(connection.execute(query).scalars())


def test_agents_act_and_the_policy_learns(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = make_run(model, num_steps=3)
    folder, checks = run_forge(config, tmp_path)
    assert [found.step for found in checks] == [0, 3]
    assert all(found.num_tasks == 4 and found.num_broken == 0 for found in checks)
    assert trained_steps(config, tmp_path / "run") == [1, 1, 2, 2, 3, 3]
    assert (folder / "tokenizer.json").is_file()
    assert not list((tmp_path / "run" / "journal").iterdir()), "what is recorded elsewhere is let go"
    kept = read_kept(Layout(tmp_path / "run").kept)
    assert [found.step for found in kept] == [0] * 4 + [3] * 4
    assert [found.task for found in kept[:4]] == [found.task for found in kept[4:]]
    assert all(found.tree().samples and not found.failure for found in kept)
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [step.step for step in steps] == [1, 2, 3]
    assert all(step.values["reward/agent"] == step.values["reward"] for step in steps)
    assert read_last_step(tmp_path / "run" / "metrics.jsonl") == steps[-1]
    # A run that is complete does nothing more.
    assert run_forge(config, tmp_path) == (folder, checks)


def test_ended_anywhere_the_run_completes_and_learns_everything_once(model: Path, tmp_path: Path) -> None:
    config, rng, num_left = make_run(model, num_steps=3 + NUM_KILLS), random.Random(0), NUM_KILLS
    write_resolved(config, tmp_path / "config.toml")
    command = [sys.executable, "-m", "m2forge", "rl", str(tmp_path / "config.toml"), "--runs", str(tmp_path)]
    terminate(command, tmp_path)
    while True:
        with start(command) as loop:
            while loop.poll() is None and num_left:
                wait_for_step(tmp_path / "run", loop)
                time.sleep(rng.uniform(0.0, 1.0))
                found = processes(loop.pid)
                name = rng.choice(sorted(found))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(found[name], signal.SIGKILL)
                num_left -= 1
                if name == "loop":
                    break
            _, said = loop.communicate()
            assert not processes_of(tmp_path), "a process outlived its loop"
        if loop.returncode == 0:
            break
        assert loop.returncode == -signal.SIGKILL, said.decode()
    assert trained_steps(config, tmp_path / "run") == [step for step in range(1, config.num_steps + 1) for _ in "ab"]


def start(command: list[str]) -> subprocess.Popen[bytes]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def terminate(command: list[str], folder: Path) -> None:
    """In the midst of attempts: it says one line and leaves nothing behind. Ctrl-C goes the same way."""
    with start(command) as loop:
        wait_for_step(folder / "run", loop)
        loop.terminate()
        _, said = loop.communicate(timeout=60)
    assert loop.returncode == 130, said.decode()
    assert not processes_of(folder), "a process outlived its loop"
    lines = [line for line in said.decode().splitlines() if not line.startswith("run ") and "INFO" not in line]
    assert lines == ["m2forge: interrupted"], said.decode()


def wait_for_step(run_dir: Path, loop: subprocess.Popen[bytes]) -> None:
    """Until the trainer makes another one: what is killed should have been at work."""
    path = run_dir / "metrics.jsonl"
    size = path.stat().st_size if path.exists() else 0
    while loop.poll() is None and (not path.exists() or path.stat().st_size == size):
        time.sleep(0.05)


def processes(loop: int) -> dict[str, int]:
    """The processes of a run by what they are."""
    found, words_of = {"loop": loop}, dict(running())
    for pid, words in words_of.items():
        if "m2forge.forge.process" in words and str(loop) in words:
            found[words[words.index("m2forge.forge.process") + 1]] = pid
        elif str(AGENT) in words and loop in ancestors(pid):
            found["agent"] = pid
    return found


def ancestors(pid: int) -> list[int]:
    """Another test's agent is none of ours."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        while pid > 1:
            # After the name, which may hold anything: state and parent.
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            found.append(pid)
    return found


def processes_of(folder: Path) -> list[list[str]]:
    time.sleep(0.5)
    return [words for _, words in running() if any(word.startswith(str(folder / "run")) for word in words)]


def running() -> list[tuple[int, list[str]]]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.append((int(folder.name), (folder / "cmdline").read_bytes().decode().split("\0")))
    return found
