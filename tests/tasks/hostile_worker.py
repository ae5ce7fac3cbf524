"""A worker of tasks that also knows the family `hostile`, whose verifier does what the answer says.

python -m tests.tasks.hostile_worker TIMEOUT_S DRAW_TIMEOUT_S
"""

import fcntl
import os
import signal
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from m2forge.records import JsonValue, Submission, Task
from m2forge.tasks import catalog, worker
from m2forge.tasks.agent import Chain
from m2forge.tasks.family import Verdict, make_task
from m2forge.text.message import Tool

NAME = "hostile"
LOADS = {4: "raise", 5: "grow", 6: "loop"}
"""What loading a task does, by its difficulty."""
STARVED_CPU = min(os.sched_getaffinity(0))
"""Where the answer `starve` works, whenever no other process wants that processor."""


@dataclass(frozen=True, slots=True)
class Hostile(Chain):
    name: str = NAME

    def draw(self, difficulty: int, seed: int) -> Task:
        while difficulty == 2:
            pass
        return make_task(self, difficulty, f"Task {seed}.", {"load": LOADS.get(difficulty, "fine")})

    def prepare(self, task: Task) -> None:
        _do(str(task.metadata["load"]))

    def tools(self, task: Task) -> tuple[Tool, ...]:
        while task.difficulty == 3:
            pass
        return ()

    def call(self, task: Task, name: str, arguments: JsonValue) -> str:
        return str(self.verify(task, Submission(name)).perf)

    def verify(self, task: Task, submission: Submission) -> Verdict:
        what, _, once = submission.answer.partition(" ")
        marker = Path(submission.answer if once else "never")
        if not once or not marker.exists():
            marker.touch() if once else None
            _do(what)
        return Verdict(1.0, {"pid": os.getpid()})


def _do(what: str) -> None:
    held = []
    match what:
        case "loop":
            while True:
                pass
        case "power":
            print(9 ** (9**9))  # one operation, which no signal handler of Python interrupts
        case "sleep":
            time.sleep(60)
        case "grow":
            while True:
                held.append(bytearray(1 << 20))
        case "raise":
            raise KeyError("what the policy wrote")
        case "exit":
            sys.exit(0)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "print":
            print('{"n": 0, "outcome": "ok", "value": {"perf": 1.0, "evidence": {}}}', flush=True)
            os.write(1, b"noise\n")
        case "starve":
            os.sched_setaffinity(0, {STARVED_CPU})
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            until_s = time.process_time() + 0.35
            while time.process_time() < until_s:
                pass
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "drip":
            while True:
                _write_replies(b"x")
                time.sleep(0.001)
        case "flood":
            while True:
                _write_replies(b"x" * 65536)
        case "forge":
            _write_replies(b'{"outcome": "infra"}\n')
            time.sleep(60)
        case "evidence":
            raise RecursionError("x" * 100_000)


def _write_replies(data: bytes) -> None:
    """Into the pipe that the executor's replies go through: the last one that it was given."""
    pipes = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]  # noqa: PTH208
    written = [place for place in pipes if _is_written_pipe(place)]
    os.write(max(written), data)


def _is_written_pipe(place: int) -> bool:
    try:
        return (
            stat.S_ISFIFO(os.fstat(place).st_mode) and fcntl.fcntl(place, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
        )
    except OSError:
        return False


if __name__ == "__main__":
    catalog.EMBEDDED = (*catalog.EMBEDDED, Hostile())
    worker.main()
