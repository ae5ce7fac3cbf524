"""Where commands run, what they reach, and their limits. The kernel enforces those on memory, CPU time, files and
processes.

[sandbox]
backend = "namespace"
image = "host"
network = "none"
timeout_s = 60
max_memory_bytes = 2147483648
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from m2forge.config import Config

Count = Annotated[int, Field(gt=0, lt=1 << 63)]
Seconds = Annotated[float, Field(gt=0)]

BackendName = Literal["process", "namespace", "podman", "docker", "auto"]
Network = Literal["none", "gateway", "allowlist", "public"]


_CONFINING = (
    "image",
    "layers",
    "folders",
    "devices",
    "user",
    "workspace",
    "network",
    "allow",
    "upper",
    "max_disk_bytes",
    "max_inodes",
    "max_cpus",
)
"""Keys that a plain process cannot honour."""


class SandboxConfig(Config):
    backend: BackendName = "namespace"
    """`namespace`: Linux namespaces, needs gcc. `podman`, `docker`: a container, needs gcc too. `auto`: the first of
    these that works on this machine. `process`: a plain process of this machine, for trusted programs; it refuses the
    keys below up to `max_cpus`."""
    image: str = "host"
    """The files that commands see: `host` (this machine's system folders, read-only), a name or digest of `m2forge
    image list`, the path of a folder or tar, or with `podman` and `docker` an image of theirs."""
    layers: tuple[str, ...] = ()
    """Images stacked over `image`, the last on top, such as an agent's program."""
    folders: tuple[str, ...] = ()
    """Folders of this machine that are visible at the same path, read-only."""
    devices: tuple[str, ...] = ()
    """Device files of this machine that commands may use, such as /dev/nvidia0."""
    user: str = "1000:1000"
    """Who commands run as: UID, UID:GID, or a user of the image. A sandbox that an ordinary user starts has this one
    id only."""
    workspace: str = "/workspace"
    """The folder in which commands start; it is created."""
    network: Network = "none"
    """`gateway`: 127.0.0.1 at the gateway's port reaches the attempt's gateway. `allowlist`, `public`: also HTTP and
    HTTPS by a proxy, which the usual variables name: to the hosts of `allow`, or to every public address."""
    allow: tuple[str, ...] = ()
    """Hosts that `allowlist` reaches: `pypi.org`, `.example.com` with all its subdomains, or either with `:PORT`."""
    upper: Literal["memory", "disk"] = "memory"
    """Where written files are: in memory, or in a file system of that size on disk, which needs root and a loop
    device."""
    max_disk_bytes: Count = 2 << 30
    """Limit on all written files together, and on each; with `podman` and `docker` on each only. Files in memory
    (`upper`) also have at most seven eighths of `max_memory_bytes`, where a cgroup limits that."""
    max_inodes: Count = 1 << 18
    """Limit on the number of written files, with `namespace`."""
    max_cpus: Annotated[float, Field(gt=0)] | None = None
    """CPU share of the sandbox, in cores; needs a writable cgroup."""
    timeout_s: Seconds = 600.0
    """Wall-clock limit; a command that exceeds it gets SIGTERM, and SIGKILL after `grace_s`."""
    grace_s: Annotated[float, Field(ge=0)] = 0.5
    max_output_bytes: Annotated[int, Field(ge=2)] = 1 << 20
    """Bytes stored of each stream, half from its beginning and half from its end; also the limit of a worker's line."""
    on_flood: Literal["drop", "kill"] = "drop"
    """How to treat output over that limit: drop its middle, or kill the command."""
    max_memory_bytes: Count | None = 4 << 30
    """Memory of the whole sandbox where a cgroup can limit it, else, and with `process`, address space of each
    process."""
    max_cpu_s: Count | None = None
    """CPU time limit of each process."""
    max_file_bytes: Count | None = None
    """Size limit of each written file."""
    max_processes: Count | None = None
    """Limit on the number of processes: of the sandbox, 1024 if not set; with `process`, of this user, including those
    outside the sandbox, and not for root."""
    inherits: tuple[str, ...] = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
    """Environment variables that the command inherits; no other is passed, so that no key of this process leaks. PATH
    is inherited with `process` only, because an image has its own."""

    @model_validator(mode="after")
    def _check_consistent(self) -> Self:
        fields = type(self).model_fields
        unused = [name for name in _CONFINING if getattr(self, name) != fields[name].default]
        if self.backend == "process" and unused:
            raise ValueError(f'{", ".join(unused)}: backend = "process" does not confine; set backend = "namespace"')
        if self.backend in ("podman", "docker"):
            for name in ("upper", "max_inodes"):
                if getattr(self, name) != fields[name].default:
                    raise ValueError(f'{name}: backend = "{self.backend}" cannot honour it; leave it out')
        if self.allow and self.network != "allowlist":
            raise ValueError(f'allow: needs network = "allowlist", received {self.network!r}')
        if self.network == "allowlist" and not self.allow:
            raise ValueError('network = "allowlist" needs hosts in `allow`')
        if not self.workspace.startswith("/") or ".." in self.workspace.split("/") or self.workspace == "/":
            raise ValueError(f"workspace: expected an absolute path below /, received {self.workspace!r}")
        return self
