"""Several processes train one policy: rank 0 claims batches, deals their trees, commits and publishes; all ranks train.

    trainer process of the loop ── starts ──▶ rank 0 (its log: trainer.log), rank 1 (trainer-1.log), …

The ranks of a step hold different trees, and take the step that one process would take (train/parallel.py). If one rank
ends with an error, the others are killed, and the loop starts all of them again from the newest checkpoint.
"""

import contextlib
import heapq
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from m2forge.cluster.launcher import FATAL_STATUS
from m2forge.errors import ConfigError
from m2forge.train.config import MachineConfig

if TYPE_CHECKING:
    # The process that starts the ranks needs no torch, whose import takes seconds.
    from m2forge.train.parallel import Ranks

POLL_S = 0.05
T = TypeVar("T")


def num_ranks(config: MachineConfig) -> int:
    """The local world size: the number of ranks that the mesh has on this machine."""
    mesh = config.mesh
    if "auto" not in (mesh.replicate, mesh.shard):
        return math.prod(mesh.shape)
    from m2forge.train.machine import choose_device

    if choose_device(config).type != "cuda":
        raise ConfigError('train.machine.mesh: "auto" counts GPUs, and this run trains on a CPU; give a number')
    import torch

    return math.prod(mesh.of_ranks(torch.cuda.device_count()).shape)


def run_ranks(command: Sequence[str], number: int, log_folder: Path) -> int:
    """Run a module with its arguments in `number` ranks of this machine until all have ended, and return the exit
    status: 0, or that of the first rank that failed. Rank 0 writes to this process's output."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if sys.platform == "linux":
        # Otherwise they talk over the interface of the machine's name, where others can reach them.
        shared |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(_rank(command, shared, rank, log_folder)) for rank in range(number)]
        while None in (statuses := [process.poll() for process in processes]) and not any(statuses):
            time.sleep(POLL_S)
        failed = next((rank for rank, status in enumerate(statuses) if status), None)
    if failed is None:
        return 0
    status = processes[failed].returncode
    if failed and status == FATAL_STATUS:
        lines = log_path(log_folder, failed).read_text(encoding="utf-8", errors="replace").splitlines()
        print(lines[-1] if lines else f"rank {failed} ended", file=sys.stderr, flush=True)
    return status if status > 0 else 128 - status


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"trainer-{rank}.log"


@contextlib.contextmanager
def _rank(
    command: Sequence[str], shared: dict[str, str], rank: int, log_folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    log_folder.mkdir(parents=True, exist_ok=True)
    log = log_path(log_folder, rank).open("ab") if rank else None
    with log or contextlib.nullcontext():
        process = subprocess.Popen(
            (sys.executable, "-m", "m2forge.cluster.local", str(os.getpid()), *command),
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


# -- inside a rank -----------------------------------------------------------------------------------------------------


def deal(costs: Sequence[float], number: int) -> list[list[int]]:
    """Indices of `costs` for each of `number` ranks, with sums as equal as giving the largest first makes them."""
    loads = [(0.0, rank) for rank in range(number)]
    dealt: list[list[int]] = [[] for _ in range(number)]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, rank = heapq.heappop(loads)
        dealt[rank].append(index)
        heapq.heappush(loads, (load + costs[index], rank))
    return [sorted(indices) for indices in dealt]


def scatter(values: Sequence[T] | None, ranks: "Ranks") -> T:
    """This rank's of the values that rank 0 passes, one for each rank; the others pass None."""
    if ranks.num_ranks == 1:
        assert values is not None
        return values[0]
    import torch.distributed as dist

    received: list[T | None] = [None]
    dist.scatter_object_list(received, None if values is None else list(values), 0)
    (mine,) = received
    assert mine is not None
    return mine


def gather(value: T, ranks: "Ranks") -> list[T]:
    """The values of all ranks, on rank 0; the others receive their own alone."""
    if ranks.num_ranks == 1:
        return [value]
    import torch.distributed as dist

    received: list[T] | None = [value] * ranks.num_ranks if ranks.rank == 0 else None
    dist.gather_object(value, received, 0)
    return [value] if received is None else received


def exchange(value: T) -> list[T]:
    """The values of all ranks, on each."""
    import torch.distributed as dist

    received: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(received, value)
    return cast("list[T]", received)
