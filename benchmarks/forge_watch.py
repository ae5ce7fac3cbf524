"""Starts `m2forge rl` and watches from outside: when each evaluation ended, how busy the GPU was."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from m2forge.observe.busy import FOLDER_VARIABLE
from m2forge.rl.eval import EvalResult, read_results
from m2forge.rl.layout import Layout

ROOT = Path(__file__).parent.parent
POLL_S = 0.1
UTILISATION_MS = 200
PROCESSOR_S = 2.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MODULE = "m2forge.rl.child_main"
END_S = 30.0
"""How long a run may take to end after a stop signal."""


@dataclass
class Watched:
    run_dir: Path
    started_s: float
    """Seconds on the monotonic clock, as all times here."""
    evaluations: list[tuple[float, EvalResult]] = field(default_factory=list)
    """With the time at which each was done."""
    utilisation: list[tuple[float, float]] = field(default_factory=list)
    """Shares of the last moments in which the GPU ran a kernel, as nvidia-smi tells them; none without a GPU."""
    processors: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """Processor seconds so far of the run's living processes, by what they are."""


def run(
    config: Path, runs: Path, name: str, sets: Sequence[str], limit_s: float, accepts: Callable[[EvalResult], bool]
) -> Watched:
    """Run the stage as a user would; stop it after `limit_s`, or at once where `accepts` refuses the first result."""
    run_dir = runs / name
    command = [sys.executable, "-m", "m2forge", "rl", str(config), "--runs", str(runs)]
    command += [word for item in sets for word in ("--set", item)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {FOLDER_VARIABLE: str(run_dir / "busy"), "PYTHONPATH": os.pathsep.join(paths)}
    watched, stopped_s, sampled_s = Watched(run_dir, time.monotonic()), None, 0.0
    with _utilisation(watched), subprocess.Popen(command, env=env, cwd=ROOT) as process:
        while process.poll() is None:
            time.sleep(POLL_S)
            _note_checks(watched)
            if time.monotonic() - sampled_s > PROCESSOR_S:
                sampled_s = time.monotonic()
                watched.processors.append((sampled_s, processor_s(process.pid)))
            is_refused = bool(watched.evaluations) and not accepts(watched.evaluations[0][1])
            if stopped_s is None and (is_refused or time.monotonic() - watched.started_s > limit_s):
                stopped_s = time.monotonic()
                process.send_signal(signal.SIGINT)
            if stopped_s is not None and time.monotonic() - stopped_s > END_S:
                process.kill()
    _note_checks(watched)
    if process.returncode and stopped_s is None:
        raise SystemExit(f"the run ended with status {process.returncode}; see {run_dir / 'log'}")
    return watched


def _note_checks(watched: Watched) -> None:
    found = read_results(Layout(watched.run_dir).evaluations)
    watched.evaluations += [(time.monotonic(), result) for result in found[len(watched.evaluations) :]]


def processor_s(root: int) -> dict[str, float]:
    """Processor seconds of a process and its descendants, by role: that of the run's processes, `agent` for others."""
    stats: dict[int, tuple[int, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            stats[int(path.parent.name)] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    found: dict[str, float] = {}
    for pid, (_, seconds) in stats.items():
        ancestor = pid
        while ancestor not in (root, 0, 1):
            ancestor = stats[ancestor][0] if ancestor in stats else 0
        if ancestor == root:
            role = "loop" if pid == root else _role(pid)
            found[role] = found.get(role, 0.0) + seconds
    return found


def _role(pid: int) -> str:
    with suppress(OSError, ValueError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return words[words.index(MODULE) + 1]
    return "agents and verifiers"


@contextmanager
def _utilisation(watched: Watched) -> Iterator[None]:
    program = shutil.which("nvidia-smi")
    if program is None:
        yield
        return
    query = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", f"--loop-ms={UTILISATION_MS}"]
    with subprocess.Popen([program, *query], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = process.stdout

        def read() -> None:
            for line in lines:
                if line.strip().isdecimal():
                    watched.utilisation.append((time.monotonic(), int(line) / 100))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            yield
        finally:
            process.terminate()
            reader.join()
