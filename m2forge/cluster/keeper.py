"""A keeper launches roles for a loop and keeps them alive when the loop is killed.

    loop ── launch, start, stop ──▶ keeper ── children ──▶ sampler, gateway, host-0, host-1, …

    python -m m2forge.cluster.keeper FOLDER OUTLIVE_S FINGERPRINT [PLAN]

FOLDER is the run's, which only its owner can enter. With PLAN, the JSON of a `RayPlan`, the roles run on the nodes of a
Ray cluster, otherwise as children on this machine. Loop and keeper exchange lines of JSON over a Unix socket in it:

    {"do": "launch", "role": {…}}              {"name", "url", "keys"}: of the role, which may already run
    {"do": "start" or "stop", "name"}          {"name", "ended": error or null} once it has ended
    {"do": "end"}                              the keeper stops everything and exits

If the loop's connection breaks, roles keep running, dead ones are restarted. A resumed loop with the same fingerprint,
that is with the same code and configuration, finds them under their URLs and keys; one with another fingerprint ends
them. Without a loop the keeper ends after OUTLIVE_S. Its children die with it; the loop then starts another keeper and
launches the roles again at the same addresses and with the same keys.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from m2forge.cluster.launcher import Launched, Launcher, Role
from m2forge.cluster.local import MAX_DEATHS, SHORT_S, LocalLauncher
from m2forge.cluster.process_record import RoleUrl, record_size
from m2forge.cluster.ray_launcher import RayLauncher, RayPlan
from m2forge.errors import EngineError, M2ForgeError
from m2forge.observe.log import set_up_logging
from m2forge.python_source import code_digest

MODULE = "m2forge.cluster.keeper"
SOCKET_FILE, LOCK_FILE, LOG_FOLDER, RECORD_FOLDER = "keeper.sock", "keeper.lock", "log", "processes"
START_S = 120.0
"""Timeout of a keeper's start, which includes the end of its predecessor."""
POLL_S = 0.05
MAX_LINE_BYTES = 1 << 20

_log = logging.getLogger(__name__)


def fingerprint(configuration: str) -> str:
    """Digest of everything that determines the behaviour of the run's processes on this machine."""
    return code_digest(sys.executable, str(Path.cwd()), configuration)


@contextlib.contextmanager
def _socket_path(folder: Path) -> Iterator[str]:
    """The path of the socket. A path of a socket holds about 100 bytes, and a run's folder may be longer."""
    if sys.platform != "linux":
        yield str(folder / SOCKET_FILE)
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_FILE}"
    finally:
        os.close(descriptor)


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


# -- the loop's side ---------------------------------------------------------------------------------------------------


class KeptLauncher:
    """See `Launcher`."""

    def __init__(self, folder: Path, fingerprint: str, outlive_s: float, plan: RayPlan | None = None) -> None:
        """`plan`: for roles on a Ray cluster."""
        self._folder, self._fingerprint, self._outlive_s = folder, fingerprint, outlive_s
        self._plan = [] if plan is None else [plan.to_json()]
        self._roles: dict[str, KeptRole] = {}
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._closing = asyncio.Event()

    async def launch(self, role: Role, is_done: Callable[[], bool] = lambda: False) -> "KeptRole":
        """A role that a keeper already runs is adopted, with its URL and keys. `is_done` has no effect: kept roles work
        until they are stopped."""
        if self._listening is None:
            await self._connect()
            self._listening = asyncio.create_task(self._listen())
        kept = self._roles[role.name] = KeptRole(role, self._folder / RECORD_FOLDER, self._send)
        self._send({"do": "launch", "role": asdict(role)})
        await asyncio.wait({kept.placed, self._listening}, return_when=asyncio.FIRST_COMPLETED)
        if not kept.placed.done():
            raise EngineError(f"the {role.name} process: the keeper of the run's processes has ended")
        kept.placed.result()
        return kept

    async def close(self) -> None:
        """End the keeper, with all of its roles."""
        self._closing.set()
        self._send({"do": "end"})
        if self._listening is not None:
            await asyncio.gather(self._listening, return_exceptions=True)
        if self._process is not None:
            await self._process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        # What a broken connection loses, `_relaunch` sends again.
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(_line(message))

    async def _connect(self) -> None:
        """Connect to the keeper of the run, or start one."""
        if not await self._try_connect():
            await self._start()

    async def _try_connect(self) -> bool:
        try:
            with _socket_path(self._folder) as path:
                reader, writer = await asyncio.open_unix_connection(path, limit=MAX_LINE_BYTES)
            hello = json.loads(await reader.readline() or b"{}")
        except (OSError, ValueError):
            return False
        if hello.get("fingerprint") == self._fingerprint:
            self._reader, self._writer = reader, writer
            return True
        if hello:
            _log.info("the processes of the run have other code or another configuration; they are started again")
            writer.write(_line({"do": "end"}))
            await reader.read()
        writer.close()
        return False

    async def _start(self) -> None:
        log_path = self._folder / LOG_FOLDER / "keeper.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", MODULE, str(self._folder), str(self._outlive_s), self._fingerprint),
                *self._plan,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until_s = time.monotonic() + START_S
        while not await self._try_connect():
            if self._process.returncode is not None or time.monotonic() > until_s:
                raise EngineError(f"the keeper of the run's processes did not start; see {log_path}")
            await asyncio.sleep(POLL_S)

    async def _listen(self) -> None:
        """Resolve the roles' pending futures; if the keeper dies, start another with the same roles."""
        num_short = 0
        try:
            while True:
                started_s = time.monotonic()
                await self._read()
                assert self._writer is not None
                self._writer.close()
                if self._closing.is_set():
                    return
                num_short = num_short + 1 if time.monotonic() - started_s < SHORT_S else 1
                if num_short >= MAX_DEATHS:
                    raise EngineError(
                        f"the keeper of the run's processes ended {num_short} times in a row; see "
                        f"{self._folder / LOG_FOLDER / 'keeper.log'}"
                    )
                _log.warning("the keeper of the run's processes ended; starting it and its processes again")
                await self._connect()
                if self._closing.is_set():
                    self._send({"do": "end"})
                for role in self._roles.values():
                    role.relaunch()
        except (M2ForgeError, OSError) as error:
            for role in self._roles.values():
                role.end(EngineError(str(error)))

    async def _read(self) -> None:
        assert self._reader is not None
        with contextlib.suppress(ConnectionError):
            while line := await self._reader.readline():
                message = json.loads(line)
                role = self._roles[message["name"]]
                if "url" in message:
                    role.place(message["url"], tuple(message["keys"]))
                elif "refused" in message:
                    role.refuse(message["refused"])
                else:
                    role.end(None if message["ended"] is None else EngineError(message["ended"]))


class KeptRole:
    """See `Launched`."""

    def __init__(self, role: Role, record_folder: Path, send: Callable[[dict[str, Any]], None]) -> None:
        self.name, self.keys = role.name, role.keys
        self._find_url: Callable[[], str] = lambda: ""
        self._role, self._record_folder, self._send = role, record_folder, send
        self.placed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_started = False

    @property
    def url(self) -> str:
        return self._find_url()

    @property
    def num_starts(self) -> int:
        """Not a count: a number that changes whenever its process starts or ends."""
        return record_size(self._record_folder, self.name)

    async def supervise(self) -> None:
        self._is_started = True
        self._send({"do": "start", "name": self.name})
        await asyncio.shield(self._ended)

    async def stop(self) -> None:
        if not self._is_started or self._ended.done():
            return
        self._send({"do": "stop", "name": self.name})
        await asyncio.wait({self._ended})

    def place(self, url: str, keys: tuple[str, ...]) -> None:
        self.keys = keys
        parts, address = urlsplit(url), None
        if self._role.address is not None:
            self._find_url = RoleUrl(self._record_folder, self.name)
            address = (str(parts.hostname), int(parts.port or 0))
        self._role = replace(self._role, keys=keys, address=address)
        if not self.placed.done():
            self.placed.set_result(None)

    def refuse(self, problem: str) -> None:
        self.end(EngineError(f"the {self.name} process: {problem}"))

    def relaunch(self) -> None:
        self._send({"do": "launch", "role": asdict(self._role)})
        if self._is_started and not self._ended.done():
            self._send({"do": "start", "name": self.name})

    def end(self, error: EngineError | None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            for future in (self._ended, self.placed):
                if not future.done():
                    future.set_exception(error)
                    # It is raised where it is awaited; one role that raises ends the run.
                    future.exception()


# -- the keeper's side -------------------------------------------------------------------------------------------------


@dataclass
class _Kept:
    role: Role
    child: Launched
    running: asyncio.Task[None] | None = None


class Keeper:
    def __init__(self, folder: Path, outlive_s: float, fingerprint: str, launcher: Launcher) -> None:
        self._folder, self._outlive_s, self._fingerprint, self._launcher = folder, outlive_s, fingerprint, launcher
        self._kept: dict[str, _Kept] = {}
        self._over = asyncio.Event()
        self._loop: asyncio.StreamWriter | None = None
        self._talking: set[asyncio.Task[Any]] = set()
        self._expiry: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Serve loops until one ends it, none reconnects in time, or SIGTERM arrives."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._over.set)
        with socket.socket(socket.AF_UNIX) as listener:
            with _socket_path(self._folder) as path:
                Path(path).unlink(missing_ok=True)
                listener.bind(path)
            server = await asyncio.start_unix_server(self._talk, sock=listener, limit=MAX_LINE_BYTES)
            self._expire_later()
            await self._over.wait()
            server.close()
        (self._folder / SOCKET_FILE).unlink(missing_ok=True)
        await asyncio.gather(*(kept.child.stop() for kept in self._kept.values()))
        await asyncio.gather(*(kept.running for kept in self._kept.values() if kept.running), return_exceptions=True)
        await self._launcher.close()
        if self._loop is not None:
            self._loop.close()
        await asyncio.gather(*self._talking)

    def _expire_later(self) -> None:
        self._expiry = asyncio.get_running_loop().call_later(self._outlive_s, self._expire)

    def _expire(self) -> None:
        _log.warning("no loop reconnected within cluster.outlive_s, %g s: all processes end", self._outlive_s)
        self._over.set()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talking.add(task)
        task.add_done_callback(self._talking.discard)
        self._loop = writer
        if self._expiry is not None:
            self._expiry.cancel()
        writer.write(_line({"fingerprint": self._fingerprint}))
        try:
            with contextlib.suppress(ConnectionError):
                while line := await reader.readline():
                    await self._obey(json.loads(line))
        finally:
            if self._loop is writer and not self._over.is_set():
                self._loop = None
                _log.warning("the loop has disconnected; processes keep running for %g s", self._outlive_s)
                self._expire_later()

    async def _obey(self, message: dict[str, Any]) -> None:
        match message["do"]:
            case "launch":
                await self._launch(read_role(message["role"]))
            case "start":
                self._start(self._kept[message["name"]])
            case "stop":
                kept = self._kept[message["name"]]
                await kept.child.stop()
                if kept.running is None or kept.running.done():
                    self._tell_end(kept, None)
            case "end":
                self._over.set()

    async def _launch(self, role: Role) -> None:
        kept = self._kept.get(role.name)
        if kept is None:
            try:
                kept = self._kept[role.name] = _Kept(role, await self._launcher.launch(role))
            except M2ForgeError as error:
                self._tell({"name": role.name, "refused": str(error)})
                return
        self._tell({"name": role.name, "url": kept.child.url, "keys": list(kept.role.keys)})

    def _start(self, kept: _Kept) -> None:
        if kept.running is None:
            kept.running = asyncio.create_task(self._supervise(kept))
        elif kept.running.done():
            # It failed while no loop was connected.
            self._tell_end(kept, kept.running.exception())

    async def _supervise(self, kept: _Kept) -> None:
        try:
            await kept.child.supervise()
        except M2ForgeError as error:
            self._tell_end(kept, error)
            raise
        self._tell_end(kept, None)

    def _tell_end(self, kept: _Kept, error: BaseException | None) -> None:
        self._tell({"name": kept.role.name, "ended": None if error is None else str(error)})

    def _tell(self, message: dict[str, Any]) -> None:
        if self._loop is not None and not self._loop.is_closing():
            self._loop.write(_line(message))


def read_role(data: dict[str, Any]) -> Role:
    address = None if data["address"] is None else (str(data["address"][0]), int(data["address"][1]))
    return Role(data["name"], tuple(data["command"]), tuple(data["keys"]), address)


def main(folder: Path, outlive_s: float, fingerprint: str, plan: str | None = None) -> None:
    log, records = folder / LOG_FOLDER, folder / RECORD_FOLDER
    launcher = LocalLauncher(log, records) if plan is None else RayLauncher(RayPlan.read(plan), log, records)
    with (folder / LOCK_FILE).open("w") as lock:
        # The predecessor may still be ending its processes.
        fcntl.flock(lock, fcntl.LOCK_EX)
        asyncio.run(Keeper(folder, outlive_s, fingerprint, launcher).run())


if __name__ == "__main__":
    set_up_logging()
    main(Path(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
