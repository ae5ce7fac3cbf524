"""The backend `namespace`: commands in fresh Linux namespaces over an image, without a container runtime.

    this process ──socket──▶ supervisor (outside) ──▶ PID 1 (inside) ──▶ commands

A C program is both supervisor and PID 1 (c/). It mounts an overlay of the image's layers and a bounded upper layer,
leaves everything else behind, and runs commands that have no capability and a seccomp filter. The sandbox ends, with
all of its processes and files, when it is closed and when this process ends, whatever ends it.

Started by root, ids 0 to 65,535 inside are unused ids outside. Started by an ordinary user, a sandbox has one id.
"""

import asyncio
import contextlib
import fcntl
import functools
import itertools
import logging
import os
import posixpath
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from m2forge.compiled import cache_folder
from m2forge.errors import ConfigError, DataError, EngineError, NotFoundError
from m2forge.protocols import Command, Outcome, OutcomeReason, Snapshot
from m2forge.sandbox import cgroup, network
from m2forge.sandbox.archive import END, SAME_MODE, Entry, TreeWriter, read_entries, unpack_stream, write_tree
from m2forge.sandbox.channel import Channel, Kind, pack_text, pack_texts, program
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.image import ID_BASE, NUM_IDS, Image, ImageStore, id_base, remove_tree, shifts_ids
from m2forge.sandbox.init_worker import (
    EXECUTE,
    PACK,
    PACK_UPPER,
    UNPACK,
    InitWorker,
    Limits,
    Transfer,
    run_payload,
)
from m2forge.sandbox.stream import Source

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
START_S = 30.0
MAX_TRANSFER_FILES = 1_000_000
_SHM_BYTES = 256 << 20
_NOT_FOUND, _OUTSIDE = 2, 3
"""Exit statuses of c/pack.c."""
_log = logging.getLogger(__name__)

WHAT_TO_ENABLE = (
    "enable user namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces=15000, "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container: run it with --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined --security-opt systempaths=unconfined), "
    'or choose sandbox.backend = "process" for trusted programs'
)


@dataclass(frozen=True, slots=True)
class LayerSnapshot:
    """See `Snapshot`. The layers of a sandbox with its frozen upper layer on top."""

    image: Image
    layer: Path

    async def remove(self) -> None:
        await asyncio.to_thread(remove_tree, self.layer)


@functools.cache
def run_folder() -> Path:
    """This process's folder for upper layers on disk and for snapshots. What killed processes left is removed."""
    parent = cache_folder() / "sandboxes"
    parent.mkdir(parents=True, exist_ok=True)
    with (parent / "lock").open("a") as whole:
        fcntl.flock(whole, fcntl.LOCK_EX)  # A folder without its lock yet must not look abandoned.
        for left in parent.glob("*/lock"):
            with contextlib.suppress(OSError), left.open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(left.parent)
        own = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=parent))
        # The descriptor stays open, and with it the lock, while this process lives.
        fcntl.flock(os.open(own / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC), fcntl.LOCK_SH)
    return own


class NamespaceSandbox:
    """See `Sandbox`. Belongs to one event loop; opened by `open`."""

    _numbers = itertools.count(1)

    def __init__(self, config: SandboxConfig, env: Mapping[str, str], gateway: network.Address | None) -> None:
        self._config, self._env, self._gateway = config, dict(env), gateway
        self.workspace = config.workspace
        self._children: dict[int, InitWorker | Transfer] = {}
        self._lingering: set[Source] = set()
        self._servers: list[asyncio.Server] = []
        self._is_closing = False

    @classmethod
    async def open(
        cls,
        config: SandboxConfig,
        env: Mapping[str, str] | None = None,
        gateway: network.Address | None = None,
        image: Image | None = None,
    ) -> "NamespaceSandbox":
        """`env`: variables of every command. `gateway`: what 127.0.0.1 at that port reaches, if the network policy is
        not `none`. `image`: instead of the configuration's."""
        sandbox = cls(config, env or {}, gateway)
        if image is None:
            image = await asyncio.to_thread(ImageStore().stack, (config.image, *config.layers))
        starting = asyncio.ensure_future(sandbox._open(image))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])
            if starting.exception() is None:
                await sandbox.close()
            raise
        return sandbox

    async def _open(self, image: Image) -> None:
        self._image = image
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[list[int]] = loop.create_future()
        self._gone: asyncio.Future[None] = loop.create_future()
        self._cgroups = cgroup.plan(self._config)
        path = str(program())
        self._disk = self._make_disk()
        near, far = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [path, "start", str(far.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                pass_fds=(far.fileno(),),
                cwd="/",
            )
        except BaseException:
            near.close()
            self._clean_up()
            raise
        finally:
            far.close()
        self._limits = self._process_limits(self._cgroups)
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._pidfd, self._take_end)
        self._channel = Channel(near, self._take, self._lose)
        try:
            await self._channel.send(Kind.SETUP, 0, self._setup(image, self._cgroups))
            async with asyncio.timeout(START_S):
                listeners = await self._ready
            for descriptor, handler in zip(listeners, self._handlers().values(), strict=True):
                self._servers.append(await network.serve(socket.socket(fileno=descriptor), handler))
        except TimeoutError:
            await self.close()
            raise EngineError(f"a sandbox did not start within {START_S:g} s") from None
        except BaseException:
            await self.close()
            raise

    # -- Sandbox -------------------------------------------------------------------------------------------------------

    async def run(self, command: Command) -> Outcome:
        worker = await self._start(command, is_fed=False)
        try:
            return await worker.wait()
        except asyncio.CancelledError:
            await worker.stop()
            raise

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

    async def snapshot(self) -> LayerSnapshot:
        layer = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="layer-", dir=run_folder()))

        def use(descriptor: int) -> None:
            most = self._config.max_disk_bytes if self._config.upper == "memory" else 1 << 62
            with (
                os.fdopen(descriptor, "rb", buffering=1 << 18, closefd=False) as file,
                TreeWriter(layer, most, 1 << 62, id_base()) as writer,
            ):
                unpack_stream(file.read, writer)

        try:
            await self._transfer(PACK_UPPER, ("pack",), "snapshot", is_input=False, use=use)
            layer.chmod(0o755)
            if shifts_ids():
                os.chown(layer, ID_BASE, ID_BASE)
        except BaseException:
            remove_tree(layer)
            raise
        return LayerSnapshot(Image((*self._image.layers, layer), self._image.binds), layer)

    async def fork(self, snapshot: Snapshot) -> "NamespaceSandbox":
        if not isinstance(snapshot, LayerSnapshot):
            raise DataError(f"expected a snapshot of a namespace sandbox, received {type(snapshot).__name__}")
        return await NamespaceSandbox.open(self._config, self._env, self._gateway, snapshot.image)

    async def close(self) -> None:
        self._is_closing = True
        for server in self._servers:
            server.close()
        self._servers.clear()
        self._channel.close()
        await self._gone
        self._lose()
        children = list(self._children.values())
        ending = [child.ended for child in children if isinstance(child, InitWorker) and child.is_started]
        await asyncio.gather(*ending, return_exceptions=True)
        for source in self._lingering:
            source.close()
        self._lingering.clear()

    # -- commands ------------------------------------------------------------------------------------------------------

    async def _start(self, command: Command, *, is_fed: bool) -> InitWorker:
        self._require_open()
        id = next(self._numbers)
        worker = InitWorker(id, self._channel, self._config, is_fed=is_fed)
        self._children[id] = worker
        payload = run_payload(command, EXECUTE, self._config, self._limits, self._environment(command.env))
        starting = asyncio.ensure_future(worker.start(payload, command, self._keep))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A half-started worker could not be stopped.
            await starting
            await worker.stop()
            raise
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
        finally:
            self._children.pop(id, None)
        if status in (_NOT_FOUND, _OUTSIDE):
            raise NotFoundError(f"{path} is not a file or folder inside the sandbox: {text}")
        if status:
            raise DataError(f"{path}: the sandbox refused it: {text or f'status {status}'}")

    def _keep(self, source: Source) -> None:
        self._lingering.add(source)
        source.ended.add_done_callback(lambda _: self._lingering.discard(source))

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        inherits = [name for name in self._config.inherits if name != "PATH" and name in os.environ]
        own = {"HOME": self.workspace, "PWD": self.workspace} | self._env
        proxy = self._proxy_environment() if self._config.network in ("allowlist", "public") else {}
        return {"PATH": PATH} | {name: os.environ[name] for name in inherits} | proxy | own | dict(variables)

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
        if self._is_closing or self._gone.done():
            raise EngineError("the sandbox is closed")

    # -- start and end -------------------------------------------------------------------------------------------------

    def _setup(self, image: Image, plan: cgroup.Plan) -> bytes:
        config = self._config
        if shifts_ids():
            ids = (0, 0, ID_BASE, ID_BASE, NUM_IDS)
        else:
            user, group = _numeric(config.user)
            ids = (user, group, os.geteuid(), os.getegid(), 1)
        binds = [*image.binds, *((folder, folder) for folder in map(_absolute, config.folders))]
        binds += [(f"+{_absolute(device)}", _absolute(device)) for device in config.devices]
        ports = list(self._handlers())
        shm_bytes = min(_SHM_BYTES, config.max_disk_bytes)
        return b"".join(
            (
                struct.pack("<5I", *ids),
                *map(pack_text, ("sandbox", config.workspace, config.user, self._disk)),
                struct.pack("<3Q", config.max_disk_bytes, config.max_inodes, shm_bytes),
                pack_texts([str(layer) for layer in reversed(image.layers)]),
                pack_texts([source for source, _ in binds]),
                pack_texts([target for _, target in binds]),
                struct.pack(f"<{1 + len(ports)}I", len(ports), *ports),
                pack_texts(plan.folders),
                pack_texts([file for file, _ in plan.writes]),
                pack_texts([value for _, value in plan.writes]),
            )
        )

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

    def _process_limits(self, plan: cgroup.Plan) -> Limits:
        config = self._config
        return Limits(
            None if plan.has_memory else config.max_memory_bytes,
            config.max_cpu_s,
            min(config.max_file_bytes or config.max_disk_bytes, config.max_disk_bytes),
            config.max_processes or cgroup.MAX_PROCESSES,
        )

    def _make_disk(self) -> str:
        if self._config.upper == "memory":
            return ""
        folder = tempfile.mkdtemp(prefix="upper-", dir=run_folder())
        if shifts_ids():
            os.chown(folder, ID_BASE, ID_BASE)
        return folder

    def _take(self, kind: Kind, id: int, payload: bytes, fds: list[int]) -> None:
        if kind is Kind.EXIT and id in self._children:
            self._children[id].take_exit(payload)
        elif kind is Kind.READY and not self._ready.done():
            self._ready.set_result(fds)
        elif kind is Kind.FAILED and not self._ready.done():
            self._ready.set_exception(_start_error(payload.decode(errors="replace")))
        else:
            for descriptor in fds:
                os.close(descriptor)

    def _lose(self) -> None:
        """No frame will come any more."""
        if not self._ready.done():
            self._ready.set_exception(EngineError("a sandbox ended before it was ready"))
            self._ready.exception()  # It may never be awaited.
        for child in list(self._children.values()):
            child.lose(OutcomeReason.KILLED if self._is_closing else None)

    def _take_end(self) -> None:
        """The supervisor has ended: no process of the sandbox is left."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        if self._process.returncode:
            self._clean_up()
        self._gone.set_result(None)
        self._lose()  # A command may have been sent after the end of the stream.

    def _clean_up(self) -> None:
        """Remove what a supervisor that failed or was killed has left. PID 1 dies with it, in a moment."""
        for folder in self._cgroups.folders:
            for _ in range(100):
                try:
                    Path(folder).rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.01)  # Its last process has not ended yet.
        if self._disk:
            remove_tree(Path(self._disk))


def _start_error(text: str) -> Exception:
    if text.startswith(("namespaces:", "uid map:", "gid map:", "setgroups:")):
        return ConfigError(f"sandbox.backend: the kernel refused the namespaces ({text}); {WHAT_TO_ENABLE}")
    if text.startswith(("proc:", "tmpfs:", "overlay:", "devpts:", "private mounts:")):
        return ConfigError(f"sandbox.backend: a mount of the sandbox was refused ({text}); {WHAT_TO_ENABLE}")
    return EngineError(f"a sandbox could not start: {text}")


def _numeric(user: str) -> tuple[int, int]:
    uid, _, gid = user.partition(":")
    if user == "root":
        return 0, 0
    if not uid.isdigit() or (gid and not gid.isdigit()):
        raise ConfigError(
            f"sandbox.user: expected UID or UID:GID, received {user!r}: a sandbox that an ordinary user starts has one "
            "id, which must be known before the image is read"
        )
    return int(uid), int(gid or uid)


def _absolute(path: str) -> str:
    return str(Path(path).absolute())
