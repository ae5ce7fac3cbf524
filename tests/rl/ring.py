"""A run of `m2forge rl` as a user starts it: its processes found, and what was left of them when it is over."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from m2forge.config import write_resolved
from m2forge.records import JsonValue
from m2forge.rl.config import RLConfig

ROOT = Path(__file__).parent.parent.parent
AGENT = ROOT / "examples" / "task_agent.py"
_NOTING = Path(__file__).parent / "noting_agent.py"
GONE_S = 5.0
_MODULES = ("m2forge.rl.child_main", "tests.rl.breakable", "tests.rl.scripted_run")
"""What the processes of a run are started as."""


def agent_command(notes: Path) -> list[str]:
    """The agent of the examples; every job that it is given is a line of `notes`."""
    return [sys.executable, str(_NOTING), str(notes), str(AGENT)]


def read_notes(notes: Path) -> list[dict[str, JsonValue]]:
    """The jobs among what agents were sent; the rest is jobs cancelled."""
    lines = []
    for line in notes.read_text(encoding="utf-8").splitlines() if notes.exists() else ():
        with contextlib.suppress(ValueError):  # of an agent that was killed as it wrote
            lines.append(json.loads(line))
    return [line for line in lines if "api_key" in line]


def command_of(config: RLConfig, runs: Path, module: str = "m2forge") -> list[str]:
    """`module`: `tests.rl.breakable` for a run whose processes SIGUSR1 breaks."""
    write_resolved(config, runs / "config.toml")
    return [sys.executable, "-m", module, "rl", str(runs / "config.toml"), "--runs", str(runs)]


@contextlib.contextmanager
def started(command: list[str], log: Path, group: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """What it says is added to `log`: a pipe that nobody reads would fill. It is over when the block is. `group`: its
    process group; 0 for its own, as a shell gives it."""
    roots = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(roots)}
    with (
        log.open("ab") as file,
        subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=file, process_group=group) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def processes(loop: int) -> dict[str, int]:
    """The processes of a run by what they are."""
    found = {"loop": loop}
    for pid, words in running():
        module = next((module for module in _MODULES if module in words), None)
        if module is not None and str(loop) in words:
            found[words[words.index(module) + 1]] = pid
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


def processes_of(run_dir: Path) -> list[list[str]]:
    """Those that were told of the run's folder, or work in it, as agents do."""
    return [
        words
        for pid, words in running()
        if any(word.startswith(str(run_dir)) for word in words) or folder_of(pid).is_relative_to(run_dir)
    ]


def wait_until_gone(run_dir: Path) -> None:
    """The keeper of a sandbox kills its processes a moment after a process of the run has died."""
    until_s = time.monotonic() + GONE_S
    while left := processes_of(run_dir):
        assert time.monotonic() < until_s, f"a process outlived its loop: {left}"
        time.sleep(0.1)


def folder_of(pid: int) -> Path:
    try:
        return Path(f"/proc/{pid}/cwd").readlink()
    except OSError:
        return Path("/")


def running() -> list[tuple[int, list[str]]]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.append((int(folder.name), (folder / "cmdline").read_bytes().decode().split("\0")))
    return found
