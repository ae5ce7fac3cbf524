"""Policy versions by broadcast: the files of a version go from the trainer's ranks to the memory of the samplers.

    rank r: its files of a version ──▶ sampler 1 ──▶ sampler 2 ──▶ … the same bytes in each

Rank 0 offers each version, through a TCPStore of its own, before anything of it is written. The samplers that accept in
time form process groups with each rank, which last until a sampler joins, leaves or dies. Each rank then sends every
file as soon as it is written, some at a time, while those after it are written; each sampler passes it on, and stages
it while the next one comes:

    rank        writes    a   b   c   d
                sends         a   b   c   d
    sampler     stages            a   b   c   d      version complete ──▶ digests compared ──▶ swap

A sampler that has to load this version, which is complete in its folder by then, uses what it has staged if all files
came and have the digests of the version's manifest. A broadcast that fails, that a sampler misses, or whose version is
never complete, costs only time: the sampler reads a version from its folder. Others (samplers that start, `export`, the
run page) read files only.

The broadcast runs over gloo, from files just written, which are in host memory, to host memory, because versions are
staged there anyway. Rank 0 listens at an address that the samplers can reach, loopback if all are on one machine; every
other process takes the address of its own from which it reaches rank 0. Address, port and a random token are in a file
that only the run's user can read.

The TCPStore has no access control. A sampler registers with a code that the token makes (HMAC), and groups are formed
with these samplers alone, but a process that reaches the ports could take the place of one and receive the weights, or
hold broadcasts up. It cannot change what a sampler loads: that must have the digests in the manifest.
"""

import hashlib
import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed
from torch import Tensor

from m2forge.files import write_atomic
from m2forge.listener import listen
from m2forge.model.host_memory import empty_host
from m2forge.model.staging import Arrival
from m2forge.model.transformer import Transformer
from m2forge.records import PolicyVersion

dist: Any = torch.distributed
"""Its type stubs lack stores and most of gloo's groups."""
Store: TypeAlias = Any
Group: TypeAlias = Any
LOCAL = "127.0.0.1"
ACCEPT_S = 10.0
"""Seconds that rank 0 waits for a sampler to accept an offer; one that does not is excluded until it registers
again."""
STORE_S = 60.0
"""Timeout of waiting for a key of the store: longer than an offer is open."""
CONNECT_S = 30.0
PROBE_S = 5.0
"""Timeout of connecting to rank 0, before a store does, which would retry for long and log every retry."""
BUCKET_S = 60.0
"""Timeout of one bucket: a sampler that hangs fails the broadcast after this."""
READ_S = 1.0
"""Timeout of one wait for a key of an offer, after which a sampler checks for newer offers."""
FILE_S = 600.0
"""Timeout of waiting for the next file, which its rank may still have to compute and write."""
BUCKET_BYTES = 1 << 22
NUM_IN_FLIGHT = 4
"""Buckets that a process has handed over and that the next one may lack."""
HEADER_BYTES = 256
NUM_STREAMS = 2
"""Files of one rank that are sent at the same time, each in a process group of its own, for which gloo has a thread."""
NUM_BUFFERS = 3
"""Files of one stream in a sampler's memory: one that comes, and others that are being staged."""
STOP_S = 5.0
POLL_S = 0.02
RETRY_S = 0.5
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Meeting:
    """The rendezvous of ranks and samplers, at rank 0."""

    host: str
    port: int
    token: str

    @classmethod
    def open(cls, host: str) -> "tuple[Meeting, Store]":
        """Listens at this address only; a TCPStore by itself would at all of the machine's."""
        listener = listen(host, 0)
        port = int(listener.getsockname()[1])
        return cls(host, port, secrets.token_hex(16)), _store(host, port, listener.detach())

    @classmethod
    def read(cls, path: Path) -> "Meeting":
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(str(content["host"]), int(content["port"]), str(content["token"]))

    def write(self, path: Path) -> None:
        write_atomic(path, json.dumps(asdict(self)), mode=0o600)

    def connect(self) -> tuple[Store, str]:
        """The store, and the address of this process from which rank 0 is reached. Raises an OSError if it is not."""
        with socket.create_connection((self.host, self.port), PROBE_S) as probe:
            own = str(probe.getsockname()[0])
        return _store(self.host, self.port), own

    def code_of(self, sampler: str) -> str:
        """Shows that a sampler knows the token."""
        return hmac.new(self.token.encode(), sampler.encode(), hashlib.sha256).hexdigest()


def _store(host: str, port: int, listener: int | None = None) -> Store:
    timeout = timedelta(seconds=STORE_S)
    if listener is None:
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener)


def join_group(store: Store, name: str, rank: int, size: int, host: str = LOCAL) -> Group:
    """`host`: the address of this process at which the group's others reach it."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=CONNECT_S)
    options._threads = 1
    return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options)


def broadcast(group: Group, content: Tensor, timeout_s: float = BUCKET_S) -> None:
    """Send bytes from the group's first process into the same memory of the others. Each passes a bucket on to the next
    one while it receives those after it, so that no process sends a byte twice, however many there are."""
    rank, timeout, buckets = group.rank(), timedelta(seconds=timeout_s), content.split(BUCKET_BYTES)
    sent, received = deque[Any](), deque(group.recv([bucket], rank - 1, 0) for bucket in buckets if rank)
    for bucket in buckets:
        if rank:
            received.popleft().wait(timeout)
        if rank + 1 < group.size():
            sent.append(group.send([bucket], rank + 1, 0))
            if len(sent) > NUM_IN_FLIGHT:
                sent.popleft().wait(timeout)
    for work in sent:
        work.wait(timeout)


def send_header(group: Group, header: tuple[str, int] | None) -> None:
    """Announce a file by its name and size, or with None that none follows."""
    content = json.dumps(header).encode().ljust(HEADER_BYTES)
    broadcast(group, torch.frombuffer(bytearray(content), dtype=torch.uint8))


def receive_header(group: Group) -> tuple[str, int] | None:
    content = torch.empty(HEADER_BYTES, dtype=torch.uint8)
    broadcast(group, content, FILE_S)
    header: tuple[str, int] | None = json.loads(content.numpy().tobytes())
    return header


class Sender:
    """One rank of the trainer; all ranks call its methods together."""

    def __init__(
        self,
        address: Path,
        rank: int = 0,
        exchange: Callable[[Any], list[Any]] = lambda value: [value],
        host: str = LOCAL,
    ) -> None:
        """`address`: the file in which samplers find rank 0. `exchange`: returns what each rank passed. `host`: the
        address of rank 0's machine at which samplers and ranks reach it."""
        self._address, self._rank = address, rank
        self._store: Store
        if rank == 0:
            self._meeting, self._store = Meeting.open(host)
            self._num_ranks = len(exchange(self._meeting))
            self._host = host
            self._meeting.write(address)
        else:
            self._meeting = exchange(None)[0]
            self._store, self._host = self._meeting.connect()
        self._number = self._num_members = 0
        self._known: list[str] = []
        """Samplers that have registered and accepted since."""
        self._groups: tuple[int, list[Group]] | None = None
        """One for each stream, and their number, that of the offer for which they were formed."""
        self._grouped: list[str] = []
        """The samplers in them."""

    def send(self, version: PolicyVersion, files: Iterator[Path]) -> None:
        """Broadcast this rank's files of a version, each when `files` yields it."""
        self._number += 1
        try:
            self._set(self._answer(_name_of(self._rank)), self._groups and self._groups[0])
            if self._rank == 0:
                self._offer(version)
            found = json.loads(self._store.get(f"group/{self._number}"))
            if not (num_samplers := len(found["samplers"])):
                return
            started_s = time.monotonic()
            groups, shared_files = self._join(found["number"], 1 + num_samplers), _Shared(files)
            with ThreadPoolExecutor(NUM_STREAMS) as pool:
                list(pool.map(lambda group: _send(group, shared_files), groups))
        except RuntimeError as error:
            self._groups = None
            message = "the broadcast of version %d failed: samplers that lack it read its files (%s)"
            _log.warning(message, version.step, _first_line(error))
        else:
            message = "broadcast version %d to %d samplers in %.2f s"
            _log.info(message, version.step, num_samplers, time.monotonic() - started_s)

    def close(self) -> None:
        self._groups = None
        if self._rank == 0:
            self._address.unlink(missing_ok=True)

    def _join(self, number: int, size: int) -> list[Group]:
        """The groups of this number, which are formed unless this rank still has them."""
        if self._groups is None or self._groups[0] != number:
            self._groups = None
            self._groups = number, _join_all(self._store, _names_of(number, [self._rank]), 0, size, self._host)
        return self._groups[1]

    def _offer(self, version: PolicyVersion) -> None:
        """Offer a version, and tell ranks and samplers the number of the group that takes it, and which samplers are in
        it."""
        self._set(f"offer/{self._number}", {"version": version.to_dict(), "num_ranks": self._num_ranks})
        self._store.add("number", 1)
        self._known += self._newcomers()
        until_s, waited_for = time.monotonic() + ACCEPT_S, self._known
        while waited_for and time.monotonic() < until_s:
            waited_for = [name for name in waited_for if not self._store.check([self._answer(name)])]
            time.sleep(POLL_S if waited_for else 0)
        if waited_for:
            message = "%d samplers no longer take part in broadcasts: they have exited or do not respond"
            _log.warning(message, len(waited_for))
        self._known = [name for name in self._known if name not in waited_for]
        ranks = [_name_of(rank) for rank in range(self._num_ranks)]
        held = {json.loads(self._store.get(self._answer(name))) for name in (*ranks, *self._known)}
        # Every process of the group still has it, or all form a new one.
        if self._known != self._grouped or len(held) != 1 or None in held:
            self._grouped, number = self._known.copy(), self._number
        else:
            (number,) = held
        group = {"number": number, "samplers": self._grouped, "num_members": self._num_members}
        self._set(f"group/{self._number}", group)
        for old in (f"offer/{self._number - 2}", f"group/{self._number - 2}"):
            self._store.delete_key(old)

    def _answer(self, name: str) -> str:
        return f"accept/{self._number}/{name}"

    def _newcomers(self) -> list[str]:
        found, first = list[str](), self._num_members + 1
        self._num_members = self._store.add("num_samplers", 0)
        for index in range(first, self._num_members + 1):
            with suppress(RuntimeError):  # it died before it had set its name
                name, _, code = self._store.get(f"sampler/{index}").decode(errors="replace").partition(" ")
                is_known = name in (*self._known, *found)
                if not is_known and hmac.compare_digest(code.encode(), self._meeting.code_of(name).encode()):
                    found.append(name)
                else:
                    _log.warning("a process without the token of this run tried to receive versions; it is left out")
        return found

    def _set(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps(value))


class _Shared:
    """An iterator from which several threads take."""

    def __init__(self, items: Iterator[Path]) -> None:
        self._items, self._lock = items, threading.Lock()

    def __iter__(self) -> Iterator[Path]:
        return self

    def __next__(self) -> Path:
        with self._lock:
            return next(self._items)


def _send(group: Group, files: Iterable[Path]) -> None:
    for path in files:
        size = path.stat().st_size
        send_header(group, (path.name, size))
        broadcast(group, torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8))
    send_header(group, None)


def _names_of(number: int, ranks: Iterable[int]) -> list[str]:
    """The names of the process groups of one number."""
    return [f"{number}/{rank}/{stream}" for rank in ranks for stream in range(NUM_STREAMS)]


def _join_all(store: Store, names: Sequence[str], rank: int, size: int, host: str) -> list[Group]:
    # In the same order everywhere: a store serves one wait at a time, so two groups could wait for each other.
    return [join_group(store, name, rank, size, host) for name in names]


def _name_of(rank: int) -> str:
    """How a rank answers an offer; samplers have names of their own."""
    return f"rank{rank}"


class Receiver:
    """A sampler's end, in a thread of its own after `start`."""

    def __init__(self, address: Path) -> None:
        """`address`: the file in which the trainer says where it is found."""
        self._address = address
        self._condition = threading.Condition()
        self._coming: PolicyVersion | None = None
        """The version whose files are being received."""
        self._arrived: tuple[PolicyVersion, Arrival] | None = None
        self._is_stopped = False
        self._thread: threading.Thread | None = None

    def start(self, model: Transformer) -> None:
        """Receive versions for this network from now on."""
        self._thread = threading.Thread(target=self._run, args=(model,), name="m2forge-receiver", daemon=True)
        self._thread.start()

    def take(self, version: PolicyVersion) -> Arrival | None:
        """A version that has come, which is then released here; None if it did not come whole."""
        with self._condition:
            self._condition.wait_for(lambda: self._coming != version)
            arrived, self._arrived = self._arrived, None
        return arrived[1] if arrived is not None and arrived[0] == version else None

    def stop(self) -> None:
        """Receive no more. A thread that waits for a file of a trainer that hangs is left behind."""
        self._is_stopped = True
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _run(self, model: Transformer) -> None:
        while not self._is_stopped:
            try:
                meeting = Meeting.read(self._address)
                membership = _Membership(meeting, self._note, lambda: self._is_stopped, model)
            except (OSError, RuntimeError, ValueError, KeyError, TypeError):
                time.sleep(RETRY_S)
                continue
            try:
                membership.follow()
            except RuntimeError as error:
                _log.info("the trainer has exited, versions are read from files: %s", _first_line(error))
                time.sleep(RETRY_S)

    def _note(self, coming: PolicyVersion | None, arrival: Arrival | None = None) -> None:
        """Begin to receive `coming`, or end it: with its files, or without, if the broadcast failed."""
        with self._condition:
            if arrival is not None and self._coming is not None:
                self._arrived = self._coming, arrival
            elif coming is not None:
                self._arrived = None  # memory for one version at a time
            self._coming = coming
            self._condition.notify_all()


class _Membership:
    """A sampler's part in the broadcasts of one trainer process."""

    def __init__(
        self, meeting: Meeting, note: Callable[..., None], is_stopped: Callable[[], bool], model: Transformer
    ) -> None:
        self._meeting, self._note, self._is_stopped, self._model = meeting, note, is_stopped, model
        self._store, self._host = meeting.connect()
        self._groups: tuple[int, list[Group]] | None = None
        self._id, self._index = "", 0

    def follow(self) -> None:
        """Take part until the trainer's store is unreachable, which raises."""
        seen = 0  # an open offer counts this sampler if it registers before the sender lists newcomers
        self._register()
        while not self._is_stopped():
            if (number := self._store.add("number", 0)) == seen:
                time.sleep(POLL_S)
                continue
            seen = number
            if (offer := self._read("offer", number)) is None:
                continue
            self._note(PolicyVersion(**offer["version"]))
            arrival: Arrival | None = None
            try:
                arrival = self._accept(number, offer["num_ranks"])
            finally:
                self._note(None, arrival)

    def _read(self, kind: str, number: int) -> dict[str, Any] | None:
        """The value of an offer's key; None after the sender has deleted it, two offers later."""
        key = f"{kind}/{number}"
        while True:
            with suppress(RuntimeError):  # a timeout; if the sender has exited, the next request raises
                self._store.wait([key], timedelta(seconds=READ_S))
                found: dict[str, Any] = json.loads(self._store.get(key))
                return found
            if self._store.add("number", 0) >= number + 2:
                return None

    def _register(self) -> None:
        self._id, self._index = secrets.token_hex(8), self._store.add("num_samplers", 1)
        self._store.set(f"sampler/{self._index}", f"{self._id} {self._meeting.code_of(self._id)}")

    def _accept(self, number: int, num_ranks: int) -> Arrival | None:
        """Accept an offer and receive its files; None if the broadcast failed."""
        self._store.set(f"accept/{number}/{self._id}", json.dumps(self._groups and self._groups[0]))
        group = self._read("group", number)
        if group is None or self._id not in group["samplers"]:
            self._groups = None
            # Register again only if the sender has dropped this name: it waits for an answer from every name.
            if group is not None and self._index <= group["num_members"]:
                self._register()
            return None
        own_rank, size = 1 + group["samplers"].index(self._id), 1 + len(group["samplers"])
        arrival = Arrival(self._model)
        try:
            if self._groups is None or self._groups[0] != group["number"]:
                self._groups = None
                names = _names_of(group["number"], range(num_ranks))
                self._groups = group["number"], _join_all(self._store, names, own_rank, size, self._host)
            with ThreadPoolExecutor(len(self._groups[1])) as pool:
                list(pool.map(partial(_receive, arrival=arrival), self._groups[1]))
        except (RuntimeError, OSError) as error:  # the latter if there is no memory
            self._groups = None
            _log.warning("a broadcast failed, the version is read from its files: %s", _first_line(error))
            return None
        return arrival


def _receive(group: Group, arrival: Arrival) -> None:
    """Receive the files of one stream, and stage each while those after it come."""
    being_staged = deque[Future[Tensor]]()
    with ThreadPoolExecutor(NUM_BUFFERS - 1) as pool:
        while (header := receive_header(group)) is not None:
            name, size = header
            buffer = being_staged.popleft().result() if len(being_staged) == NUM_BUFFERS - 1 else torch.empty(0)
            if len(buffer) < size:
                buffer = empty_host((size,), torch.uint8, pinned=False)
            broadcast(group, buffer[:size])
            being_staged.append(pool.submit(_stage, arrival, name, buffer, size))
        for staged in being_staged:
            staged.result()


def _stage(arrival: Arrival, name: str, buffer: Tensor, size: int) -> Tensor:
    """Returns the buffer, which is free again."""
    arrival.add(name, buffer[:size])
    return buffer


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0].split(". ", 1)[0]
