"""A run whose processes SIGUSR1 breaks as no other signal does.

    python -m tests.rl.breakable rl CONFIG …                as `m2forge rl CONFIG …`

The engine of the sampler fails at its next step; a trainer or a gateway exits with 0 as if its work were done.
"""

import os
import signal
import sys
from pathlib import Path

import m2forge.rl.child_main as own
from m2forge.observe.log import set_up_logging

MODULE = "tests.rl.breakable"


def break_engine() -> None:
    from m2forge.protocols import Chunk
    from m2forge.rollout.core import Core

    step, is_broken = Core.step, False

    def fail(number: int, frame: object) -> None:
        nonlocal is_broken
        is_broken = True

    def step_or_fail(core: Core) -> list[tuple[str, Chunk]]:
        if is_broken:
            raise ArithmeticError("broken by SIGUSR1")
        return step(core)

    setattr(Core, "step", step_or_fail)  # noqa: B010  (checked types allow no assignment to a method)
    signal.signal(signal.SIGUSR1, fail)


def main() -> int:
    kind, *arguments = sys.argv[1:]
    if kind == "rl":
        from tests.rl.other_children import run_loop

        return run_loop(MODULE)
    set_up_logging()
    if kind == "sampler":
        break_engine()
    else:
        signal.signal(signal.SIGUSR1, lambda number, frame: os._exit(0))
    own.PROCESSES[kind](Path(arguments[0]), *arguments[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
