"""A worker of tasks that also knows the family `hostile`, whose verifier does what the answer says.

python -m tests.tasks.hostile_worker TIMEOUT_S DRAW_TIMEOUT_S
"""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from m2forge.records import JsonValue, Task
from m2forge.tasks import catalog, worker
from m2forge.tasks.agent import Chain
from m2forge.tasks.family import Verdict, make_task
from m2forge.text.message import Tool

NAME = "hostile"


@dataclass(frozen=True, slots=True)
class Hostile(Chain):
    name: str = NAME

    def draw(self, difficulty: int, seed: int) -> Task:
        while difficulty == 2:
            pass
        return make_task(self, difficulty, f"Task {seed}.", {})

    def tools(self, task: Task) -> tuple[Tool, ...]:
        while task.difficulty == 3:
            pass
        return ()

    def call(self, task: Task, name: str, arguments: JsonValue) -> str:
        return str(self.verify(task, name).perf)

    def verify(self, task: Task, answer: str) -> Verdict:
        what, _, once = answer.partition(" ")
        marker = Path(once or "never")
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
        case "evidence":
            raise RecursionError("x" * 100_000)


if __name__ == "__main__":
    catalog.EMBEDDED = (*catalog.EMBEDDED, Hostile())
    worker.main()
