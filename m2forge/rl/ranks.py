"""Several processes train one policy: rank 0 claims batches, deals their trees, commits and publishes; all ranks train.

    trainer process of the loop ── starts ──▶ rank 0 (its log: trainer.log), rank 1 (trainer-1.log), …

The ranks of a step hold different trees, and take the step that one process would take (train/parallel.py). If one rank
ends with an error, the others are killed, and the loop starts all of them again from the newest checkpoint.

On several machines a leader and its followers have the ranks of one machine each:

    leader, with rank 0 ◀── one connection, as long as they train ── follower on every other machine
      1. all followers have connected: the leader sends them the address at which rank 0 listens
      2. leader and followers start their ranks
      3. a rank fails or a connection ends: leader and followers kill their ranks. The leader ends, and its launcher
         starts it again; the followers wait for that one
      4. all ranks have ended with 0: the leader says so, and the followers end too

The system ends the connections of a process that is killed. Keepalive ends those of a machine that is lost, and so does
a follower that connects a second time. Messages are JSON, one line each; a follower's first one holds the leader's key.
"""

import contextlib
import fcntl
import heapq
import json
import logging
import math
import os
import secrets
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar
from urllib.parse import urlsplit

from m2forge.cluster.launcher import FATAL_STATUS
from m2forge.errors import ConfigError, TrainingError
from m2forge.records import JsonValue
from m2forge.train.config import MachineConfig

if TYPE_CHECKING:
    # The process that starts the ranks needs no torch, whose import takes seconds.
    from m2forge.train.parallel import Ranks

POLL_S = 0.05
LOST_STATUS = 1
"""Exit status of a leader that has lost a follower."""
HELLO_S = 5.0
CONNECT_S = 5.0
WAIT_S = 0.05
RETRY_S = 0.2
KEEPALIVE_S, NUM_KEEPALIVES = 5, 3
"""Time between two probes of an idle connection, and how many without a response end it."""
MAX_LINE_BYTES = 1 << 16
LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915
"""Linux's request for the address of an interface."""
T = TypeVar("T")
_log = logging.getLogger(__name__)


def num_ranks(config: MachineConfig, num_nodes: int = 1, num_gpus: int | None = None) -> int:
    """The local world size: the number of ranks that the mesh has on each of `num_nodes` machines. `num_gpus`: GPUs of
    each that the run trains on; None: those that this process sees."""
    mesh = config.mesh
    if "auto" not in (mesh.replicate, mesh.shard):
        return math.prod(mesh.shape) // num_nodes
    if num_gpus is None:
        import torch

        from m2forge.train.machine import choose_device

        num_gpus = torch.cuda.device_count() if choose_device(config).type == "cuda" else 0
    if not num_gpus:
        raise ConfigError('train.machine.mesh: "auto" counts GPUs, and this run trains on a CPU; give a number')
    return math.prod(mesh.of_ranks(num_gpus * num_nodes).shape) // num_nodes


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
    try:
        wanted = socket.inet_aton(address)
    except OSError:  # an IPv6 address
        return None
    if sys.platform != "linux":
        return None
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
        if rank and status == FATAL_STATUS and not self.last_line:
            lines = log_path(self._log_folder, rank).read_text(encoding="utf-8", errors="replace").splitlines()
            self.last_line = lines[-1] if lines else f"rank {rank} ended"
            print(self.last_line, file=sys.stderr, flush=True)
        return status if status > 0 else 128 - status


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"trainer-{rank}.log"


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines of a trainer, and what each of them runs."""

    num_nodes: int
    num_ranks: int
    """On each machine."""
    command: Sequence[str]
    log_folder: Path

    def share(self, index: int, address: str, master: tuple[str, int]) -> Share:
        return Share(self.num_ranks, index * self.num_ranks, self.num_nodes * self.num_ranks, address, master)

    def ranks(self, index: int, address: str, master: tuple[str, int]) -> MachineRanks:
        return MachineRanks(self.command, self.share(index, address, master), self.log_folder)


class Peer:
    """A connection between leader and follower."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                connection.setsockopt(socket.IPPROTO_TCP, option, KEEPALIVE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_KEEPALIVES)
        self.connection = connection
        self._received = b""

    def send(self, message: Mapping[str, JsonValue]) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self, wait_s: float | None) -> dict[str, JsonValue] | None:
        """The next message, or None if none arrives within `wait_s`; raises OSError if the connection has ended."""
        until_s = None if wait_s is None else time.monotonic() + wait_s
        while b"\n" not in self._received:
            left_s = None if until_s is None else max(until_s - time.monotonic(), 0.0)
            if not select.select([self.connection], [], [], left_s)[0]:
                return None
            received = self.connection.recv(4096)
            if not received or len(self._received) > MAX_LINE_BYTES:
                raise ConnectionResetError("the connection has ended")
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError as error:
            raise ConnectionResetError(f"not a message: {line[:80]!r}") from error
        if not isinstance(message, dict):
            raise ConnectionResetError(f"not a message: {line[:80]!r}")
        return message


# -- several machines: the leader --------------------------------------------------------------------------------------


def lead(nodes: Nodes, listener: socket.socket, key: str) -> int:
    """Run this machine's ranks, rank 0 among them, and have the followers run theirs. Returns the exit status: 0 once
    all ranks have ended with 0, else that of one that failed, or `LOST_STATUS`."""
    followers: dict[int, Peer] = {}
    try:
        while len(followers) < nodes.num_nodes - 1:
            if (met := _meet(nodes, listener, key, None)) is not None:
                index, peer = met
                if index in followers:
                    followers.pop(index).connection.close()
                followers[index] = peer
        host = str(listener.getsockname()[0])
        master = host, free_port(host)
        for peer in followers.values():
            peer.send({"host": master[0], "port": master[1]})
        with nodes.ranks(0, host, master) as ranks:
            return _watch(nodes, listener, key, followers, ranks)
    except OSError as error:
        _log.warning("the ranks of all nodes end, and start again from the newest checkpoint: %s", error)
        return LOST_STATUS
    finally:
        for peer in followers.values():
            peer.connection.close()


def _watch(nodes: Nodes, listener: socket.socket, key: str, followers: Mapping[int, Peer], ranks: MachineRanks) -> int:
    """Wait until all ranks have ended with 0, or one has failed; raises OSError if a follower is lost."""
    left = set(followers)
    while True:
        status = ranks.poll()
        if status:
            return status
        for index, peer in followers.items():
            try:
                message = peer.read(0)
            except OSError as error:
                raise ConnectionResetError(f"node {index} of the trainer is lost: {error}") from error
            if message is None:
                continue
            if message.get("status") != 0:
                if message.get("line"):
                    print(message["line"], file=sys.stderr, flush=True)
                return int(str(message.get("status")))
            left.discard(index)
        if status == 0 and not left:
            for peer in followers.values():
                peer.send({"status": 0})
            return 0
        if (met := _meet(nodes, listener, key, WAIT_S)) is not None:
            met[1].connection.close()
            raise ConnectionResetError(f"the trainer's node {met[0]} has started again")


def _meet(nodes: Nodes, listener: socket.socket, key: str, wait_s: float | None) -> tuple[int, Peer] | None:
    """The next follower that connects, within `wait_s`. Connections without the key are closed."""
    if not select.select([listener], [], [], wait_s)[0]:
        return None
    connection, _ = listener.accept()
    peer = Peer(connection)
    try:
        hello = peer.read(HELLO_S) or {}
    except OSError:
        hello = {}
    if not secrets.compare_digest(str(hello.get("key", "")).encode(), key.encode()):
        connection.close()
        return None
    index, num_ranks = int(str(hello["index"])), int(str(hello["num_ranks"]))
    if num_ranks != nodes.num_ranks:
        connection.close()
        raise TrainingError(
            f'train.machine.mesh: "auto" counts {nodes.num_ranks} GPUs on the first node of the trainer and '
            f"{num_ranks} on node {index}; give numbers, or nodes that have as many"
        )
    return index, peer


# -- several machines: a follower --------------------------------------------------------------------------------------


def follow(nodes: Nodes, index: int, url: Callable[[], str], key: str) -> None:
    """Run this machine's ranks for one leader after another, until all ranks have ended with 0. `url`: returns where
    the leader listens."""
    logged = ""
    while True:
        try:
            parts = urlsplit(url())
            with socket.create_connection((str(parts.hostname), int(parts.port or 0)), CONNECT_S) as connection:
                connection.settimeout(None)
                if _follow(nodes, index, Peer(connection), key):
                    return
        except OSError as error:
            if str(error) != logged:
                logged = str(error)
                _log.warning("node %d of the trainer waits for its first node: %s", index, logged)
        time.sleep(RETRY_S)


def _follow(nodes: Nodes, index: int, leader: Peer, key: str) -> bool:
    """Whether all ranks have ended with 0; raises OSError if the leader has ended."""
    leader.send({"key": key, "index": index, "num_ranks": nodes.num_ranks})
    message = leader.read(None)
    assert message is not None
    master = str(message["host"]), int(str(message["port"]))
    is_reported = False
    with nodes.ranks(index, str(leader.connection.getsockname()[0]), master) as ranks:
        while (message := leader.read(WAIT_S)) is None:
            status = ranks.poll()
            if status is not None and not is_reported:
                leader.send({"status": status, "line": ranks.last_line if status == FATAL_STATUS else ""})
                is_reported = True
    return message.get("status") == 0


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
