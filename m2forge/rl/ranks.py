"""Several processes train one policy: rank 0 claims batches, deals their trees, commits and publishes; all ranks train.

    trainer process of the loop ── starts ──▶ rank 0 (its log: trainer.log), rank 1 (trainer-1.log), …

The ranks of a step hold different trees, and take the step that one process would take (train/parallel.py). If one rank
ends with an error, the others are killed, and the loop starts all of them again from the newest checkpoint.
"""

import contextlib
import fcntl
import heapq
import math
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, cast

from m2forge.cluster.launcher import FATAL_STATUS
from m2forge.errors import ConfigError
from m2forge.train.config import MachineConfig

if TYPE_CHECKING:
    # The process that starts the ranks needs no torch, whose import takes seconds.
    from m2forge.train.parallel import Ranks

POLL_S = 0.05
LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915
"""Linux's request for the address of an interface."""
T = TypeVar("T")


def num_ranks(config: MachineConfig, num_nodes: int = 1) -> int:
    """The local world size: the number of ranks that the mesh has on each of `num_nodes` machines."""
    mesh = config.mesh
    if "auto" not in (mesh.replicate, mesh.shard):
        return math.prod(mesh.shape) // num_nodes
    from m2forge.train.machine import choose_device

    if choose_device(config).type != "cuda":
        raise ConfigError('train.machine.mesh: "auto" counts GPUs, and this run trains on a CPU; give a number')
    import torch

    return math.prod(mesh.of_ranks(torch.cuda.device_count() * num_nodes).shape) // num_nodes


@dataclass(frozen=True, slots=True)
class Share:
    """The ranks of one machine among those of the mesh."""

    num_ranks: int
    """On this machine."""
    first: int = 0
    num_all: int | None = None
    """On all machines; None: there is no other."""
    address: str = LOOPBACK
    """This machine's address for the others."""
    master: tuple[str, int] | None = None
    """Where rank 0 listens; None: on any free port of `address`."""

    @property
    def environment(self) -> dict[str, str]:
        """What all of its ranks find in their environment."""
        host, port = self.master or (self.address, free_port(self.address))
        shared = {"WORLD_SIZE": str(self.num_all or self.num_ranks), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
        if (interface := interface_of(self.address)) is not None:
            # Otherwise they talk over the interface of the machine's name: none of the others', or one that is open to
            # more than them.
            shared |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        return shared


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def interface_of(address: str) -> str | None:
    """The name of the network interface with an IPv4 address, where the system tells it."""
    if sys.platform != "linux":
        return None
    wanted = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no such address
                if fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24] == wanted:
                    return name
    return None


def run_ranks(command: Sequence[str], number: int, log_folder: Path) -> int:
    """Run a module with its arguments in `number` ranks of this machine until all have ended, and return the exit
    status: 0, or that of the first rank that failed."""
    with MachineRanks(command, Share(number), log_folder) as ranks:
        while (status := ranks.poll()) is None:
            time.sleep(POLL_S)
    return status


class MachineRanks:
    """The ranks of this machine. Rank 0 writes to this process's output, the others to files of their own."""

    def __init__(self, command: Sequence[str], share: Share, log_folder: Path) -> None:
        self._command, self._share, self._log_folder = command, share, log_folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.last_line = ""
        """The last line of the rank that failed, if a restart would fail too."""

    def __enter__(self) -> Self:
        environment = os.environ | self._share.environment
        self._log_folder.mkdir(parents=True, exist_ok=True)
        for local in range(self._share.num_ranks):
            rank = self._share.first + local
            with log_path(self._log_folder, rank).open("ab") if rank else contextlib.nullcontext() as log:
                self._processes.append(
                    subprocess.Popen(
                        (sys.executable, "-m", "m2forge.cluster.local", str(os.getpid()), *self._command),
                        stdout=log,
                        stderr=log,
                        stdin=subprocess.DEVNULL,
                        env=environment | {"RANK": str(rank), "LOCAL_RANK": str(local)},
                    )
                )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def poll(self) -> int | None:
        """None while all run or have ended with 0; then 0, or the status of the first that failed."""
        statuses = [process.poll() for process in self._processes]
        local = next((local for local, status in enumerate(statuses) if status), None)
        if local is None:
            return None if None in statuses else 0
        status, rank = self._processes[local].returncode, self._share.first + local
        if rank and status == FATAL_STATUS:
            lines = log_path(self._log_folder, rank).read_text(encoding="utf-8", errors="replace").splitlines()
            self.last_line = lines[-1] if lines else f"rank {rank} ended"
            print(self.last_line, file=sys.stderr, flush=True)
        return status if status > 0 else 128 - status


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"trainer-{rank}.log"


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
