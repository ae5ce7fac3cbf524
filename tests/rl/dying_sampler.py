"""A run whose sampler is killed while it receives its first broadcast.

python -m tests.rl.dying_sampler rl CONFIG …            as `m2forge rl CONFIG …`
"""

import os
import signal
import sys
from pathlib import Path

from torch import Tensor

import m2forge.rl.child_main as own
from m2forge.observe.log import set_up_logging
from m2forge.weights import collective

MODULE = "tests.rl.dying_sampler"
BUCKET_BYTES = 10_000


def die_once(mark: Path) -> None:
    receive = collective.broadcast

    def receive_and_die(group: object, content: Tensor, timeout_s: float = collective.BUCKET_S) -> None:
        if mark.exists() or len(content) == collective.HEADER_BYTES:
            receive(group, content, timeout_s)
            return
        receive(group, content[:BUCKET_BYTES])
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(collective, "broadcast", receive_and_die)  # noqa: B010  (checked types allow no assignment to a function)


def main() -> int:
    kind, *arguments = sys.argv[1:]
    if kind == "rl":
        from tests.rl.other_children import run_loop

        return run_loop(MODULE)
    set_up_logging()
    setattr(collective, "BUCKET_BYTES", BUCKET_BYTES)  # noqa: B010  (it belongs to another module)
    if kind == "sampler":
        die_once(Path(arguments[0]) / "died")
    own.PROCESSES[kind](Path(arguments[0]), *arguments[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
