"""The backends `podman` and `docker`: the runtime builds the root and the namespaces, our program is PID 1 in them.

    this process ──socket in a mounted folder──▶ PID 1 (c/, mounted into the container) ──▶ commands

The runtime is called to start, freeze and remove a container, never to run a command: commands go over the socket, as
with `namespace`, with the same rights, filter and network policies. PID 1, and the container with it, ends with the
stream, so a killed owner leaves nothing behind.

An image is one that `m2forge image` knows, which is imported into the runtime's store on first use, else a name that
the runtime knows itself.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import resource
import shutil
import socket
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from m2forge.errors import ConfigError, DataError, NotFoundError
from m2forge.protocols import Snapshot
from m2forge.sandbox import cgroup, network
from m2forge.sandbox.channel import program
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.image import Image, ImageStore, id_base
from m2forge.sandbox.init_sandbox import START_S, InitSandbox
from m2forge.sandbox.init_worker import MAX_FILES

Runtime = Literal["podman", "docker"]
_INIT, _SOCKET_FOLDER = "/.m2forge-init", "/.m2forge"
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETPCAP", "SETUID")
"""What PID 1 needs to run commands as other users, to write files for the caller and to install programs for `build`.
Other commands have none."""
_numbers = itertools.count(1)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ContainerImage:
    """A name in the runtime's store, and what is added when a container starts."""

    name: str
    uploads: tuple[Path, ...] = ()
    binds: tuple[tuple[str, str], ...] = ()
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ContainerSnapshot:
    """See `Snapshot`. An image of the runtime's store."""

    runtime: Runtime
    image: ContainerImage

    async def remove(self) -> None:
        await call(self.runtime, "rmi", "--force", self.image.name)


class ContainerSandbox(InitSandbox):
    """See `Sandbox`. Opened by `open`."""

    @classmethod
    async def open(
        cls,
        runtime: Runtime,
        config: SandboxConfig,
        env: Mapping[str, str] | None = None,
        gateway: network.Address | None = None,
        image: ContainerImage | None = None,
    ) -> "ContainerSandbox":
        """`image`: instead of the configuration's."""
        if shutil.which(runtime) is None:
            raise ConfigError(
                f'sandbox.backend: "{runtime}" is not installed; install it, or set backend = "namespace"'
            )
        sandbox = cls(config, env or {}, gateway)
        return await sandbox._complete_open(sandbox._open(runtime, image))

    async def _open(self, runtime: Runtime, image: ContainerImage | None) -> None:
        config = self._config
        if image is None:
            image = await _find_image(runtime, config)
        self._runtime, self._image, self._image_env = runtime, image, dict(image.env)
        self._limits = self._process_limits(None)
        self._name = f"m2forge-{os.getpid()}-{next(_numbers)}"
        self._is_gone: asyncio.Task[None] | None = None
        _report_unbounded_disk(runtime)
        with tempfile.TemporaryDirectory(prefix="m2forge-") as folder, _listen(Path(folder)) as listener:
            await call(runtime, "run", *self._options(folder), image.name, "contain", f"{_SOCKET_FOLDER}/socket")
            try:
                async with asyncio.timeout(START_S):
                    end, _ = await asyncio.get_running_loop().sock_accept(listener)
            except TimeoutError:
                await self._remove()
                raise ConfigError(f"sandbox.backend: PID 1 of a {runtime} container did not connect") from None
        try:
            # PID 1 of a container uses only workspace, user and ports.
            await self._open_channel(end, self._setup_frame())
            for layer in image.uploads:
                await self.upload(layer, "/", user="0:0")
        except BaseException:
            await self.close()
            raise

    async def snapshot(self) -> ContainerSnapshot:
        name = (await call(self._runtime, "commit", "--pause=true", self._name)).split()[-1]
        image = ContainerImage(name, binds=self._image.binds, env=self._image.env)
        return ContainerSnapshot(self._runtime, image)

    async def fork(self, snapshot: Snapshot) -> "ContainerSandbox":
        if not isinstance(snapshot, ContainerSnapshot) or snapshot.runtime != self._runtime:
            raise DataError(f"expected a snapshot of a {self._runtime} sandbox, received {type(snapshot).__name__}")
        return await ContainerSandbox.open(self._runtime, self._config, self._env, self._gateway, snapshot.image)

    # -- start and end -------------------------------------------------------------------------------------------------

    def _options(self, folder: str) -> list[str]:
        config = self._config
        num_files = min(MAX_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        num_processes = self._limits.num_processes or cgroup.MAX_PROCESSES
        binds = [(str(program()), _INIT), (folder, _SOCKET_FOLDER), *self._image.binds]
        binds += [(path, path) for path in (str(Path(folder).absolute()) for folder in config.folders)]
        options = [
            *("--detach", "--rm", "--name", self._name, "--network", "none", "--hostname", "sandbox"),
            *("--user", "0:0", "--workdir", "/", "--entrypoint", _INIT),
            *("--security-opt", "no-new-privileges", "--cap-drop", "ALL"),
            *(f"--cap-add={name}" for name in _CAPABILITIES),
            *("--pids-limit", str(num_processes + cgroup.RESERVE)),
            *("--ulimit", f"nofile={num_files}:{num_files}", "--ulimit", f"nproc={num_processes}:{num_processes}"),
            *(f"--volume={source}:{target}:ro" for source, target in binds),
            *(f"--device={device}" for device in config.devices),
        ]
        if config.max_memory_bytes is not None:
            options += ["--memory", str(config.max_memory_bytes)]
        if config.max_cpus is not None:
            options += ["--cpus", str(config.max_cpus)]
        return options

    async def _wait_until_gone(self) -> None:
        if self._is_gone is None:
            self._is_gone = asyncio.ensure_future(self._remove())
        await asyncio.shield(self._is_gone)

    async def _remove(self) -> None:
        with contextlib.suppress(ConfigError):  # The runtime may have removed it already.
            await call(self._runtime, "rm", "--force", self._name)


@functools.cache
def _report_unbounded_disk(runtime: Runtime) -> None:
    _log.warning(
        '%s: max_disk_bytes limits each written file, and not their sum; backend = "namespace" limits both', runtime
    )


async def call(runtime: Runtime, *arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        runtime,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await process.communicate()
    if process.returncode:
        said = stderr.decode(errors="replace").strip()[-1000:]
        raise ConfigError(f"sandbox.backend: `{runtime} {arguments[0]}` ended with {process.returncode}: {said}")
    return stdout.decode(errors="replace")


@contextlib.contextmanager
def _listen(folder: Path) -> Iterator[socket.socket]:
    """A socket in a folder, whose path may be longer than the address of a socket can be."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(f"/proc/self/fd/{descriptor}/socket")
        finally:
            os.close(descriptor)
        listener.listen(1)
        listener.setblocking(False)
        yield listener


async def _find_image(runtime: Runtime, config: SandboxConfig) -> ContainerImage:
    store = ImageStore()
    try:
        base = await asyncio.to_thread(store.resolve, config.image)
    except NotFoundError:
        base, name = Image(()), config.image
        await _require_image(runtime, name)
    else:
        name = await _imported(runtime, await asyncio.to_thread(store.stored, base.layers[0]))
    above = await asyncio.to_thread(store.stack, config.layers)
    return ContainerImage(name, (*base.layers[1:], *above.layers), (*base.binds, *above.binds), (*base.env, *above.env))


async def _imported(runtime: Runtime, layer: Path) -> str:
    """The runtime's own image of a layer."""
    name = f"m2forge-layer:{layer.name[:32]}"
    with contextlib.suppress(ConfigError):
        await call(runtime, "image", "inspect", name)
        return name
    with tempfile.TemporaryDirectory() as scratch:
        archive = Path(scratch) / "layer.tar"
        await asyncio.to_thread(_write_tar, layer, archive)
        await call(runtime, "import", str(archive), name)
    return name


async def _require_image(runtime: Runtime, name: str) -> None:
    """Refuse a name that the runtime does not have, instead of letting it search a registry for minutes."""
    try:
        await call(runtime, "image", "inspect", name)
    except ConfigError:
        raise NotFoundError(
            f"image: neither `m2forge image list` nor {runtime} has {name!r}; add it with `m2forge image build NAME "
            f"SOURCE`, or pull it with {runtime}"
        ) from None


def _write_tar(layer: Path, archive: Path) -> None:
    base = id_base()

    def shift(member: tarfile.TarInfo) -> tarfile.TarInfo:
        # Without shifted ids all files of a layer belong to this user, who is root in a container of its own.
        member.uid, member.gid = (max(member.uid - base, 0), max(member.gid - base, 0)) if base else (0, 0)
        return member

    with tarfile.open(archive, "w") as file:
        file.add(layer, ".", filter=shift)
