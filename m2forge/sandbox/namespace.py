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
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from m2forge.compiled import cache_folder
from m2forge.errors import ConfigError, DataError, EngineError
from m2forge.protocols import Snapshot
from m2forge.sandbox import cgroup, network
from m2forge.sandbox.archive import TreeWriter, unpack_stream
from m2forge.sandbox.channel import program
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.image import ID_BASE, NUM_IDS, Image, ImageStore, id_base, remove_tree, shifts_ids
from m2forge.sandbox.init_sandbox import PATH, InitSandbox
from m2forge.sandbox.init_worker import PACK_UPPER

_SHM_BYTES = 256 << 20
_INODE_BYTES = 256
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


class NamespaceSandbox(InitSandbox):
    """See `Sandbox`. Opened by `open`."""

    @classmethod
    async def open(
        cls,
        config: SandboxConfig,
        env: Mapping[str, str] | None = None,
        gateway: network.Address | None = None,
        image: Image | None = None,
    ) -> "NamespaceSandbox":
        """`image`: instead of the configuration's."""
        sandbox = cls(config, env or {}, gateway)
        if image is None:
            image = await asyncio.to_thread(ImageStore().stack, (config.image, *config.layers))
        return await sandbox._complete_open(sandbox._open(image))

    async def _open(self, image: Image) -> None:
        self._image, self._image_env = image, dict(image.env)
        loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = loop.create_future()
        self._cgroups, self._num_oom_kills = cgroup.plan(self._config), 0
        self._limits = self._process_limits(None if self._cgroups.has_memory else self._config.max_memory_bytes)
        path = str(program())
        self._disk = await asyncio.to_thread(_make_disk, self._config) if self._config.upper == "disk" else ""
        near, far = socket.socketpair()
        try:
            setup = self._setup(image, self._cgroups)
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
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._pidfd, self._take_end)
        try:
            await self._open_channel(near, setup)
        except BaseException:
            await self.close()
            raise

    async def snapshot(self) -> LayerSnapshot:
        layer = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="layer-", dir=run_folder()))

        def use(descriptor: int) -> None:
            with (
                os.fdopen(descriptor, "rb", buffering=1 << 18, closefd=False) as file,
                TreeWriter(layer, self._config.max_disk_bytes, 1 << 62, id_base()) as writer,
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
        return LayerSnapshot(Image((*self._image.layers, layer), self._image.binds, self._image.env), layer)

    async def fork(self, snapshot: Snapshot) -> "NamespaceSandbox":
        if not isinstance(snapshot, LayerSnapshot):
            raise DataError(f"expected a snapshot of a namespace sandbox, received {type(snapshot).__name__}")
        return await NamespaceSandbox.open(self._config, self._env, self._gateway, snapshot.image)

    # -- start and end -------------------------------------------------------------------------------------------------

    def _setup(self, image: Image, plan: cgroup.Plan) -> bytes:
        config = self._config
        if shifts_ids():
            ids = (0, 0, ID_BASE, ID_BASE, NUM_IDS)
        else:
            user, group = _numeric(config.user)
            ids = (user, group, os.geteuid(), os.getegid(), 1)
        binds = [*image.binds, *((path, path) for path in _present("folders", config.folders))]
        binds += [(f"+{path}", path) for path in _present("devices", config.devices)]
        max_bytes = config.max_disk_bytes
        if plan.has_memory and config.max_memory_bytes is not None and config.upper == "memory":
            # Files that fill the memory of the sandbox would leave none for the command that removes them.
            max_bytes = min(max_bytes, config.max_memory_bytes * 7 // 8)
        sizes = (max_bytes, config.max_inodes, min(_SHM_BYTES, max_bytes))
        return self._setup_frame(ids, "sandbox", self._disk, sizes, image.layers, binds, plan)

    def _takes_oom_kill(self) -> bool:
        before, self._num_oom_kills = self._num_oom_kills, cgroup.num_oom_kills(self._cgroups)
        return self._num_oom_kills > before

    def _start_error(self, text: str) -> Exception:
        if text.startswith(("namespaces:", "uid map:", "gid map:", "setgroups:")):
            return ConfigError(f"sandbox.backend: the kernel refused the namespaces ({text}); {WHAT_TO_ENABLE}")
        if text.startswith(("proc:", "tmpfs:", "overlay:", "devpts:", "private mounts:")):
            return ConfigError(f"sandbox.backend: a mount of the sandbox was refused ({text}); {WHAT_TO_ENABLE}")
        if text.startswith("disk:"):
            return _disk_error(text)
        return EngineError(f"a sandbox could not start: {text}")

    async def _wait_until_gone(self) -> None:
        await asyncio.shield(self._gone)  # a cancelled `close` may be repeated

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
            Path(f"{self._disk}.img").unlink(missing_ok=True)
            remove_tree(Path(self._disk))


def _make_disk(config: SandboxConfig) -> str:
    """A folder to mount on, and beside it a file with an empty file system, whose size is the limit on what a sandbox
    writes. Only root can mount it."""
    mkfs = shutil.which("mkfs.ext4", path=PATH)
    if not shifts_ids() or mkfs is None:
        raise _disk_error("no mkfs.ext4 is installed" if shifts_ids() else "this process is not root")
    folder = Path(tempfile.mkdtemp(prefix="upper-", dir=run_folder()))
    file = folder.with_suffix(".img")
    try:
        file.touch(0o600)
        os.truncate(file, config.max_disk_bytes + config.max_inodes * _INODE_BYTES + (8 << 20))
        owner = f"root_owner={ID_BASE}:{ID_BASE},nodiscard,lazy_itable_init=1"
        command = [mkfs, "-q", "-F", "-O", "^has_journal", "-m", "0", "-N", str(config.max_inodes), "-E", owner]
        done = subprocess.run([*command, str(file)], capture_output=True, text=True)
        if done.returncode:
            raise _disk_error(done.stderr.strip()[-500:])
    except BaseException:
        file.unlink(missing_ok=True)
        folder.rmdir()
        raise
    return str(folder)


def _disk_error(why: str) -> ConfigError:
    return ConfigError(
        f'sandbox.upper: "disk" needs root, mkfs.ext4 and a free loop device, without which max_disk_bytes could not '
        f'be enforced ({why}); set upper = "memory"'
    )


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


def _present(key: str, paths: Sequence[str]) -> list[str]:
    """Absolute paths of a key of the configuration."""
    for path in paths:
        if not Path(path).exists():
            raise ConfigError(f"sandbox.{key}: {path} does not exist on this machine; correct it or leave it out")
    return [str(Path(path).absolute()) for path in paths]
