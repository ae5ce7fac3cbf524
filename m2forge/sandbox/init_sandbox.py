"""A sandbox whose PID 1 is our program (c/): what holds however its root was built.

Commands, and streams of files in and out, go over one socket to PID 1. Backends build the root and end it.
"""

import asyncio
import itertools
import os
import posixpath
import signal
import socket
import struct
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Self

from m2forge.errors import DataError, EngineError, NotFoundError
from m2forge.protocols import Command, Outcome, OutcomeReason
from m2forge.sandbox import cgroup, network
from m2forge.sandbox.archive import END, SAME_MODE, Entry, TreeWriter, read_entries, unpack_stream, write_tree
from m2forge.sandbox.channel import Channel, Kind, pack_text, pack_texts
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.init_worker import BUILD, EXECUTE, PACK, UNPACK, InitWorker, Limits, Transfer, run_payload
from m2forge.sandbox.stream import Source

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
START_S = 30.0
KILL_ALL_ID = 0
"""The id of a KILL frame that ends all processes."""
MAX_TRANSFER_FILES = 1_000_000
_NOT_FOUND, _OUTSIDE = 2, 3
"""Exit statuses of c/pack.c."""


class InitSandbox:
    """See `Sandbox`. Belongs to one event loop."""

    _numbers = itertools.count(1)

    def __init__(self, config: SandboxConfig, env: Mapping[str, str], gateway: network.Address | None) -> None:
        """`env`: variables of every command. `gateway`: what 127.0.0.1 at that port reaches, if the network policy is
        not `none`."""
        self._config, self._env, self._gateway = config, dict(env), gateway
        self.workspace = config.workspace
        self._image_env: Mapping[str, str] = {}
        self._limits = Limits(None, None, None, None)
        self._children: dict[int, InitWorker | Transfer] = {}
        self._lingering: set[Source] = set()
        self._servers: list[asyncio.Server] = []
        self._is_closing = self.is_lost = False
        self._channel: Channel
        self._ready: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()

    async def _complete_open(self, opening: Coroutine[object, object, None]) -> Self:
        """Run what opens the sandbox. A cancelled call waits until it is open, then closes it."""
        task = asyncio.ensure_future(opening)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            if task.exception() is None:
                await self.close()
            raise
        return self

    async def _open_channel(self, end: socket.socket, setup: bytes) -> None:
        """Send PID 1 what to build, and wait until it is ready."""
        self._channel = Channel(end, self._take, self._lose)
        await self._channel.send(Kind.SETUP, 0, setup)
        try:
            async with asyncio.timeout(START_S):
                listeners = await self._ready
        except TimeoutError:
            raise EngineError(f"a sandbox did not start within {START_S:g} s") from None
        for descriptor, handler in zip(listeners, self._handlers().values(), strict=True):
            self._servers.append(await network.serve(socket.socket(fileno=descriptor), handler))

    async def _wait_until_gone(self) -> None:
        """Wait until no process of the sandbox is left; its stream has ended."""
        raise NotImplementedError

    def _takes_oom_kill(self) -> bool:
        """Whether the kernel has killed a process for want of memory since the last call."""
        return False

    def _start_error(self, text: str) -> Exception:
        return EngineError(f"a sandbox could not start: {text}")

    async def kill_all(self) -> int:
        self._require_open()
        pending = self._children.get(KILL_ALL_ID)
        if not isinstance(pending, Transfer):
            pending = self._children[KILL_ALL_ID] = Transfer(KILL_ALL_ID, self._channel)
            await self._channel.send(Kind.KILL, KILL_ALL_ID, b"")
        try:
            num_killed = await asyncio.shield(pending.num_killed())
            if num_killed is None:
                raise EngineError("the sandbox ended while its processes were killed")
            return num_killed
        finally:
            self._children.pop(KILL_ALL_ID, None)

    async def close(self) -> None:
        self._is_closing = True
        for server in self._servers:
            server.close()
        self._servers.clear()
        self._channel.close()
        await self._wait_until_gone()
        self._lose()
        children = list(self._children.values())
        ending = [child.ended for child in children if isinstance(child, InitWorker) and child.is_started]
        await asyncio.gather(*ending, return_exceptions=True)
        for source in self._lingering:
            source.close()
        self._lingering.clear()

    # -- Sandbox -------------------------------------------------------------------------------------------------------

    async def run(self, command: Command) -> Outcome:
        return await self._run(command, EXECUTE)

    async def build(self, command: Command) -> Outcome:
        """Run a command that installs programs: root may write all files of the sandbox, and give them away."""
        return await self._run(command, BUILD)

    async def _run(self, command: Command, mode: int) -> Outcome:
        return await (await self._start(command, is_fed=False, mode=mode)).wait_or_stop()

    async def start(self, command: Command) -> InitWorker:
        """Start a worker; the sandbox's timeout covers its lifetime."""
        return await self._start(command, is_fed=True)

    async def read(self, path: str, max_bytes: int) -> bytes:
        found: list[bytes] = []

        def use(descriptor: int) -> None:
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                for entry, content in read_entries(file.read):
                    if entry.size > max_bytes:
                        raise DataError(f"{path} is larger than {max_bytes} bytes; read part of it with a command")
                    found.append(b"".join(content))

        await self._transfer(PACK, ("file", "beneath", self._inside(path)), path, is_input=False, use=use)
        if len(found) != 1:
            raise NotFoundError(f"{path} is not a file of the workspace")
        return found[0]

    async def write(self, path: str, content: bytes) -> None:
        folder, _, name = self._inside(path).rpartition("/")
        entry = Entry("f", name.encode(errors="surrogateescape"), SAME_MODE, size=len(content))

        def use(descriptor: int) -> None:
            with os.fdopen(descriptor, "wb", closefd=False) as file:
                file.write(entry.pack())
                file.write(content)
                file.write(END)

        await self._transfer(UNPACK, ("unpack", "beneath", folder or "."), path, is_input=True, use=use)

    async def upload(self, source: Path, path: str, user: str | None = None) -> None:
        if not source.exists():
            raise NotFoundError(f"{source} does not exist")

        def use(descriptor: int) -> None:
            with os.fdopen(descriptor, "wb", buffering=1 << 18, closefd=False) as file:
                write_tree(source, file.write)

        await self._transfer(UNPACK, ("unpack", "anywhere", path), path, is_input=True, use=use, user=user)

    async def download(self, path: str, dest: Path, max_bytes: int) -> tuple[str, ...]:
        left_out: list[str] = []

        def use(descriptor: int) -> None:
            with (
                os.fdopen(descriptor, "rb", buffering=1 << 18, closefd=False) as file,
                TreeWriter(dest, max_bytes, MAX_TRANSFER_FILES) as writer,
            ):
                unpack_stream(file.read, writer)
                left_out.extend(os.fsdecode(name) for name in writer.left_out)

        await self._transfer(PACK, ("pack", "anywhere", path), path, is_input=False, use=use)
        return tuple(left_out)

    # -- commands ------------------------------------------------------------------------------------------------------

    async def _start(self, command: Command, *, is_fed: bool, mode: int = EXECUTE) -> InitWorker:
        self._require_open()
        id = next(self._numbers)
        worker = InitWorker(id, self._channel, self._config, is_fed=is_fed, takes_oom_kill=self._takes_oom_kill)
        self._children[id] = worker
        payload = run_payload(command, mode, self._config, self._limits, self._environment(command.env))
        try:
            await worker.complete_start(worker.start(payload, command, self._keep))
        except BaseException:
            self._children.pop(id, None)
            raise
        worker.ended.add_done_callback(lambda _: self._children.pop(id, None))
        return worker

    async def _transfer(
        self,
        mode: int,
        argv: tuple[str, ...],
        path: str,
        *,
        is_input: bool,
        use: Callable[[int], None],
        user: str | None = None,
    ) -> None:
        self._require_open()
        id = next(self._numbers)
        transfer = Transfer(id, self._channel)
        self._children[id] = transfer
        unlimited = Limits(None, None, None, None)
        payload = run_payload(Command(argv, user=user), mode, self._config, unlimited, {})
        try:
            status, text = await transfer.run(payload, is_input=is_input, use=use)
        except OSError as error:
            raise EngineError(f"{path}: cannot be copied between this machine and the sandbox: {error}") from error
        finally:
            self._children.pop(id, None)
        if status in (_NOT_FOUND, _OUTSIDE):
            raise NotFoundError(f"{path} is not a file or folder inside the sandbox: {text}")
        if status == -signal.SIGKILL:
            raise EngineError(f"{path}: the sandbox, or the process that copies files, was killed")
        if status:
            raise DataError(f"{path}: the sandbox refused it: {text or f'status {status}'}")

    def _keep(self, source: Source) -> None:
        self._lingering.add(source)
        source.ended.add_done_callback(lambda _: self._lingering.discard(source))

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        inherits = [name for name in self._config.inherits if name != "PATH" and name in os.environ]
        own = {"HOME": self.workspace, "PWD": self.workspace} | self._env
        proxy = self._proxy_environment() if self._config.network in ("allowlist", "public") else {}
        return (
            {"PATH": PATH, **self._image_env}
            | {name: os.environ[name] for name in inherits}
            | proxy
            | own
            | dict(variables)
        )

    @staticmethod
    def _proxy_environment() -> dict[str, str]:
        url = f"http://127.0.0.1:{network.PROXY_PORT}"
        names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
        local = "127.0.0.1,localhost"
        return dict.fromkeys(names, url) | {"no_proxy": local, "NO_PROXY": local}

    def _inside(self, path: str) -> str:
        """A path relative to the workspace; the kernel refuses what leaves it through links."""
        relative = posixpath.relpath(posixpath.join(self.workspace, path), self.workspace)
        if relative == "." or relative.startswith("../") or relative == ".." or "\0" in path:
            raise NotFoundError(f"{path} is not a file inside the workspace; use a path below it")
        return relative

    def _require_open(self) -> None:
        if self._is_closing or not self._channel.is_open:
            raise EngineError("the sandbox is closed")

    def _process_limits(self, address_bytes: int | None) -> Limits:
        config = self._config
        return Limits(
            address_bytes,
            config.max_cpu_s,
            min(config.max_file_bytes or config.max_disk_bytes, config.max_disk_bytes),
            config.max_processes or cgroup.MAX_PROCESSES,
        )

    # -- frames and ports ----------------------------------------------------------------------------------------------

    def _handlers(self) -> dict[int, network.Handler]:
        """What serves each port inside."""
        config = self._config
        handlers: dict[int, network.Handler] = {}
        if config.network != "none" and self._gateway is not None:
            handlers[self._gateway[1]] = network.forward(self._gateway)
        if config.network == "allowlist":
            handlers[network.PROXY_PORT] = network.proxy(network.allowlist_rule(config.allow))
        elif config.network == "public":
            handlers[network.PROXY_PORT] = network.proxy(network.public_rule())
        return handlers

    def _setup_frame(
        self,
        ids: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0),
        hostname: str = "",
        disk: str = "",
        sizes: tuple[int, int, int] = (0, 0, 0),
        layers: Sequence[Path] = (),
        binds: Sequence[tuple[str, str]] = (),
        cgroups: cgroup.Plan | None = None,
    ) -> bytes:
        """What PID 1 builds, as c/ reads it. `ids`: user and group inside, their ids outside, and how many. `disk`:
        the folder that the upper layer is mounted on, empty for memory. `sizes`: bytes and files of the upper layer,
        bytes of shared memory. `layers`: lowest first."""
        config, ports, cgroups = self._config, list(self._handlers()), cgroups or cgroup.Plan()
        return b"".join(
            (
                struct.pack("<5I", *ids),
                *map(pack_text, (hostname, config.workspace, config.user, disk)),
                struct.pack("<3Q", *sizes),
                pack_texts([str(layer) for layer in reversed(layers)]),
                pack_texts([source for source, _ in binds]),
                pack_texts([target for _, target in binds]),
                struct.pack(f"<{1 + len(ports)}I", len(ports), *ports),
                pack_texts(cgroups.folders),
                pack_texts([file for file, _ in cgroups.writes]),
                pack_texts([value for _, value in cgroups.writes]),
            )
        )

    def _take(self, kind: Kind, id: int, payload: bytes, fds: list[int]) -> None:
        if kind is Kind.EXIT and id in self._children:
            self._children[id].take_exit(payload)
        elif kind is Kind.READY and not self._ready.done():
            self._ready.set_result(fds)
        elif kind is Kind.FAILED and not self._ready.done():
            self._ready.set_exception(self._start_error(payload.decode(errors="replace")))
        else:
            for descriptor in fds:
                os.close(descriptor)

    def _lose(self) -> None:
        """No frame will come any more."""
        self.is_lost = self.is_lost or not self._is_closing
        if not self._ready.done():
            self._ready.set_exception(EngineError("a sandbox ended before it was ready"))
            self._ready.exception()  # It may never be awaited.
        for child in list(self._children.values()):
            child.lose(OutcomeReason.KILLED if self._is_closing else None)
