"""The ranks of a trainer on several machines: a leader and its followers, each with the ranks of its machine.

    leader, with rank 0 ◀── one connection, as long as they train ── follower on every other machine
      1. all followers have connected: the leader sends them the address at which rank 0 listens
      2. leader and followers start their ranks
      3. a rank fails or a connection ends: leader and followers kill their ranks. The leader ends, and its launcher
         starts it again; the followers wait for that one
      4. all ranks have ended with 0: the leader says so, and the followers end with 0 too

The system ends the connections of a process that is killed. Keepalive ends those of a machine that is lost, and so does
a follower that connects a second time. Messages are JSON, one line each; a follower's first one holds the leader's key.
"""

import contextlib
import json
import secrets
import select
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from m2forge.cluster.launcher import FATAL_STATUS
from m2forge.errors import TrainingError
from m2forge.records import JsonValue
from m2forge.rl.ranks import MachineRanks, Share, free_port

LOST_STATUS = 1
"""Exit status of a leader that has lost a follower."""
HELLO_S = 5.0
CONNECT_S = 5.0
WAIT_S = 0.05
RETRY_S = 0.2
KEEPALIVE_S, NUM_KEEPALIVES = 5, 3
"""Time between two probes of an idle connection, and how many without a response end it."""
MAX_LINE_BYTES = 1 << 16


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
        while b"\n" not in self._received:
            if not select.select([self.connection], [], [], wait_s)[0]:
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


# -- leader ------------------------------------------------------------------------------------------------------------


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
    except OSError:
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
            message = peer.read(0)
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


# -- follower ----------------------------------------------------------------------------------------------------------


def follow(nodes: Nodes, index: int, url: Callable[[], str], key: str) -> None:
    """Run this machine's ranks for one leader after another, until all ranks have ended with 0. `url`: returns where
    the leader listens."""
    while True:
        with contextlib.suppress(OSError):
            parts = urlsplit(url())
            with socket.create_connection((str(parts.hostname), int(parts.port or 0)), CONNECT_S) as connection:
                connection.settimeout(None)
                if _follow(nodes, index, Peer(connection), key):
                    return
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
