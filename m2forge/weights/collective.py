"""Policy versions by broadcast: the files of a version go from the trainer's ranks to the memory of the samplers.

    rank r: its files of a version ── process group of the rank and all samplers ──▶ the same bytes in each sampler

Rank 0 offers each version, through a TCPStore of its own, after its files are written and before they are renamed into
place. The samplers that accept in time form a group with each rank, which lasts until a sampler joins, leaves or dies.
A sampler keeps the received files until it has to load this version, and then compares the digests in the version's
manifest. A broadcast that fails, or that a sampler misses, costs only time: the sampler reads the version from its
folder. Others (samplers that start, `export`, the run page) read files only.

The broadcast runs over gloo, from host memory to host memory, because versions are staged there anyway. The TCPStore
has no access control: all keys begin with a random token, which is in a file that only the run's user can read.
"""

import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed
from torch import Tensor

from m2forge.files import write_atomic
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
BUCKET_S = 60.0
"""Timeout of one bucket: a sampler that hangs fails the broadcast after this."""
BUCKET_BYTES = 1 << 26
NUM_IN_FLIGHT = 2
"""Buckets that are sent at the same time."""
POLL_S = 0.02
RETRY_S = 0.5
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Meeting:
    """The rendezvous of ranks and samplers."""

    port: int
    token: str

    def connect(self, server: bool = False) -> Store:
        store = dist.TCPStore(
            LOCAL, self.port, is_master=server, wait_for_workers=False, timeout=timedelta(seconds=STORE_S)
        )
        return dist.PrefixStore(self.token, store)


def join_group(store: Store, name: str, rank: int, size: int) -> Group:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOCAL)]
    options._timeout = timedelta(seconds=CONNECT_S)
    options._threads = NUM_IN_FLIGHT
    return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options)


def broadcast(group: Group, content: Tensor) -> None:
    """Send bytes from the group's first process into the same memory of the others, in buckets."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, timedelta(seconds=BUCKET_S)
    in_flight: list[Any] = []
    for bucket in content.split(BUCKET_BYTES):
        if len(in_flight) == NUM_IN_FLIGHT:
            in_flight.pop(0).wait()
        in_flight.append(group.broadcast([bucket], options))
    for work in in_flight:
        work.wait()


class Sender:
    """One rank of the trainer; all ranks call its methods together."""

    def __init__(self, address: Path, rank: int = 0, exchange: Callable[[Any], list[Any]] = lambda value: [value]):
        """`address`: the file in which samplers find rank 0. `exchange`: returns what each rank passed."""
        self._address, self._rank, self._exchange = address, rank, exchange
        meeting = None
        if rank == 0:
            store = dist.TCPStore(LOCAL, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=STORE_S))
            meeting = Meeting(store.port, secrets.token_hex(16))
            self._store: Store = dist.PrefixStore(meeting.token, store)
        meeting = exchange(meeting)[0]
        if rank:
            self._store = meeting.connect()
        else:
            write_atomic(address, json.dumps({"port": meeting.port, "token": meeting.token}), mode=0o600)
        self._number = self._num_members = 0
        self._known: list[str] = []
        """Samplers that have registered and accepted since."""
        self._group: tuple[int, Group] | None = None
        """The group's number, that of the offer for which it was formed."""
        self._grouped: list[str] = []
        """Its samplers."""

    def send(self, version: PolicyVersion, files: Sequence[Sequence[Path]]) -> None:
        """Broadcast the files of a version, those of each rank."""
        numbers = self._exchange(self._group and self._group[0])
        offered = self._offer(version, files, numbers) if self._rank == 0 else None
        number, num_samplers = self._exchange(offered)[0]
        if not num_samplers:
            return
        started_s = time.monotonic()
        try:
            if self._group is None or self._group[0] != number:
                self._group = None
                self._group = number, join_group(self._store, f"{number}/{self._rank}", 0, 1 + num_samplers)
            for path in files[self._rank]:
                size = path.stat().st_size
                broadcast(self._group[1], torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8))
        except RuntimeError as error:
            self._group = None
            message = "the broadcast of version %d failed: samplers that lack it read its files (%s)"
            _log.warning(message, version.step, _first_line(error))
        else:
            message = "broadcast version %d to %d samplers in %.2f s"
            _log.info(message, version.step, num_samplers, time.monotonic() - started_s)

    def close(self) -> None:
        self._group = None
        if self._rank == 0:
            self._address.unlink(missing_ok=True)

    def _offer(
        self, version: PolicyVersion, files: Sequence[Sequence[Path]], numbers: Sequence[int | None]
    ) -> tuple[int, int]:
        """Offer a version; returns the number of the group that takes it, and how many samplers are in it."""
        self._number += 1
        sizes = [[(path.name, path.stat().st_size) for path in found] for found in files]
        self._set(f"offer/{self._number}", {"version": version.to_dict(), "files": sizes})
        self._store.add("number", 1)
        self._known += self._newcomers()
        until_s, waited_for = time.monotonic() + ACCEPT_S, self._known
        while waited_for and time.monotonic() < until_s:
            waited_for = [name for name in waited_for if not self._store.check([self._answer(name)])]
            time.sleep(POLL_S if waited_for else 0)
        answered = [name for name in self._known if name not in waited_for]
        held = {name: json.loads(self._store.get(self._answer(name))) for name in answered}
        if waited_for:
            message = "%d samplers no longer take part in broadcasts: they have exited or do not respond"
            _log.warning(message, len(waited_for))
        self._known = list(held)
        # Every process of the group still has it, or all form a new one.
        present = {*numbers, *held.values()}
        if self._known != self._grouped or len(present) != 1 or None in present:
            self._grouped, number = self._known.copy(), self._number
        else:
            (number,) = present
        self._set(f"group/{self._number}", {"number": number, "samplers": self._grouped})
        for old in (f"offer/{self._number - 2}", f"group/{self._number - 2}"):
            self._store.delete_key(old)
        return number, len(self._grouped)

    def _answer(self, sampler: str) -> str:
        return f"accept/{self._number}/{sampler}"

    def _newcomers(self) -> list[str]:
        found, first = [], self._num_members + 1
        self._num_members = self._store.add("num_samplers", 0)
        for index in range(first, self._num_members + 1):
            with suppress(RuntimeError):  # it died before it had set its name
                found.append(self._store.get(f"sampler/{index}").decode())
        return found

    def _set(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps(value))


class Receiver:
    """A sampler's end, in its own thread. `take` returns the files of a received version."""

    def __init__(self, address: Path, *, pinned: bool = False) -> None:
        """`pinned`: receive into pinned memory, from which a GPU copies fastest, and which the next version reuses."""
        self._address, self._pinned = address, pinned
        self._condition = threading.Condition()
        self._coming: PolicyVersion | None = None
        """The version whose files are being received."""
        self._images: tuple[PolicyVersion, Mapping[str, Tensor]] | None = None
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="m2forge-receiver", daemon=True)
        self._thread.start()

    def take(self, version: PolicyVersion) -> Mapping[str, Tensor]:
        """The files of this version by name, which are then released here. Empty if they were not received."""
        with self._condition:
            self._condition.wait_for(lambda: self._coming != version)
            images, self._images = self._images, None
        return images[1] if images is not None and images[0] == version else {}

    def stop(self) -> None:
        self._is_stopped = True
        self._thread.join()

    def _run(self) -> None:
        while not self._is_stopped:
            try:
                content = json.loads(self._address.read_text(encoding="utf-8"))
                meeting = Meeting(int(content["port"]), str(content["token"]))
                # A store would retry for long, and log every retry.
                socket.create_connection((LOCAL, meeting.port), CONNECT_S).close()
            except (OSError, ValueError, KeyError, TypeError):
                time.sleep(RETRY_S)
                continue
            try:
                _Membership(meeting, self._note, lambda: self._is_stopped, self._pinned).follow()
            except RuntimeError as error:
                _log.info("the trainer has exited, versions are read from files: %s", _first_line(error))
                time.sleep(RETRY_S)

    def _note(self, coming: PolicyVersion | None, images: Mapping[str, Tensor] | None = None) -> None:
        """Begin to receive `coming`, or end it: with its files, or without, if the broadcast failed."""
        with self._condition:
            if images is not None and self._coming is not None:
                self._images = self._coming, images
            elif coming is not None:
                self._images = None  # memory for one version at a time
            self._coming = coming
            self._condition.notify_all()


class _Membership:
    """A sampler's part in the broadcasts of one trainer process."""

    def __init__(
        self, meeting: Meeting, note: Callable[..., None], is_stopped: Callable[[], bool], pinned: bool
    ) -> None:
        self._store, self._note, self._is_stopped, self._pinned = meeting.connect(), note, is_stopped, pinned
        self._groups: tuple[int, list[Group]] | None = None
        self._id = ""

    def follow(self) -> None:
        """Take part until the trainer's store is unreachable, which raises."""
        seen = self._store.add("number", 0)
        self._register()
        while not self._is_stopped():
            if (number := self._store.add("number", 0)) == seen:
                time.sleep(POLL_S)
                continue
            seen = number
            offer = json.loads(self._store.get(f"offer/{number}"))
            self._note(PolicyVersion(**offer["version"]))
            images: Mapping[str, Tensor] | None = None
            try:
                images = self._accept(number, offer["files"])
            finally:
                self._note(None, images)

    def _register(self) -> None:
        self._id = secrets.token_hex(8)
        self._store.set(f"sampler/{self._store.add('num_samplers', 1)}", self._id)

    def _accept(self, number: int, files: Sequence[Sequence[tuple[str, int]]]) -> Mapping[str, Tensor] | None:
        """Accept an offer and receive its files; None if the broadcast failed."""
        self._store.set(f"accept/{number}/{self._id}", json.dumps(self._groups and self._groups[0]))
        group = json.loads(self._store.get(f"group/{number}"))
        if self._id not in group["samplers"]:
            self._groups = None
            self._register()
            return None
        own_rank, size = 1 + group["samplers"].index(self._id), 1 + len(group["samplers"])
        try:
            with ThreadPoolExecutor(len(files)) as pool:
                if self._groups is None or self._groups[0] != group["number"]:
                    self._groups = None
                    names = [f"{group['number']}/{rank}" for rank in range(len(files))]
                    self._groups = (
                        group["number"],
                        list(pool.map(lambda name: join_group(self._store, name, own_rank, size), names)),
                    )
                parts = list(pool.map(partial(_receive, pinned=self._pinned), self._groups[1], files))
        except RuntimeError as error:
            self._groups = None
            _log.warning("a broadcast failed, the version is read from its files: %s", _first_line(error))
            return None
        return {name: image for part in parts for name, image in part.items()}


def _receive(group: Group, files: Sequence[tuple[str, int]], *, pinned: bool) -> dict[str, Tensor]:
    """The files of one rank."""
    images = {}
    for name, size in files:
        images[name] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        broadcast(group, images[name])
    return images


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0].split(". ", 1)[0]
