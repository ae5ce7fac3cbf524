"""Two processes, or more, that talk over gloo, for tests of training in parallel."""

import faulthandler
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from m2forge.train.parallel import ProcessRanks
from tests.conftest import LONG
from tests.forked import forked_context

TIMEOUT_S = 3600.0 if LONG else 500.0
"""Time limit of the whole; a rank that waits for another gives up earlier. The longest scenario computes for 20 s, and
takes over 120 s where others keep the cores busy."""

Scenario = Callable[[ProcessRanks], object]
"""A function of a module, so that a fresh process finds it."""


def run_ranks(scenario: Scenario, folder: Path, num_ranks: int = 2) -> list[object]:
    """What `scenario` returns on each rank. A rank that fails, or that does not end, fails the test."""
    context = forked_context()
    folder.mkdir(parents=True, exist_ok=True)
    processes = [context.Process(target=_serve, args=(scenario, folder, rank, num_ranks)) for rank in range(num_ranks)]
    deadline_s = time.monotonic() + TIMEOUT_S
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
        failures = [path.read_text() for path in sorted(folder.glob("*.error"))]
        codes = [process.exitcode for process in processes]
        if None in codes:
            stacks = [path.read_text() for path in sorted(folder.glob("*.stack"))]
            raise AssertionError(f"exit codes {codes} after {TIMEOUT_S:.0f} s\n" + "\n".join(failures + stacks))
        if failures or any(codes):
            raise AssertionError(f"exit codes {codes}\n" + "\n".join(failures))
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [torch.load(folder / f"{rank}.result", weights_only=False) for rank in range(num_ranks)]


def _serve(scenario: Scenario, folder: Path, rank: int, num_ranks: int) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder / 'meeting'}"
    timeout = timedelta(seconds=TIMEOUT_S / 2)
    stack = (folder / f"{rank}.stack").open("w")
    faulthandler.dump_traceback_later(0.9 * TIMEOUT_S, file=stack)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_ranks, timeout=timeout)
    try:
        torch.save(scenario(ProcessRanks(torch.device("cpu"))), folder / f"{rank}.result")
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise
    finally:
        dist.destroy_process_group()
