"""The cgroups that limit a sandbox: version 2 or 1, as children of this process's own, where they can be created.

A child cannot use more than its parent, so a sandbox stays within the limits of the process that started it. Version 2
allows no children of a group that has processes; the sandbox's group is then beside it, as services of systemd are,
and stays within the limits of the common parent. Where nothing is writable, rlimits of each process serve, which
`Plan.has_memory` reports.
"""

import contextlib
import functools
import itertools
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

from m2forge.errors import ConfigError
from m2forge.sandbox.config import SandboxConfig

MAX_PROCESSES = 1024
_PERIOD_US = 100_000
RESERVE = 16
"""Processes beyond the limit of the user, so that PID 1 can still read files for the caller."""
_numbers = itertools.count()
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """Folders to create and values to write before a sandbox starts."""

    folders: tuple[str, ...] = ()
    writes: tuple[tuple[str, str], ...] = field(default_factory=tuple)
    has_memory: bool = False


@functools.cache
def parents() -> dict[str, Path]:
    """The folder in which groups of sandboxes can be created, by controller."""
    try:
        return find_parents(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    except OSError:
        return {}


def find_parents(own: str, mounts: str) -> dict[str, Path]:
    """From the groups of this process and its mounts, as /proc shows them. A folder of version 2 is found under the
    name of each of its controllers."""
    found: dict[str, Path] = {}
    for fields in (line.split() for line in mounts.splitlines()):
        kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
        for number, controllers, path in (line.split(":", 2) for line in own.splitlines()):
            names = controllers.split(",")
            is_v2 = kind == "cgroup2" and number == "0"
            if not is_v2 and not (kind == "cgroup" and controllers and set(names) <= set(options)):
                continue
            # The fourth field is the part of the hierarchy that is mounted.
            inner = os.path.relpath(path, fields[3]) if path.startswith(fields[3]) else "."
            folder = Path(fields[4]) / inner
            usable = _delegated(folder) if is_v2 else names if os.access(folder, os.W_OK) else []
            if is_v2 and not usable and inner != ".":
                folder = folder.parent
                usable = _enabled(folder)
            found |= {name: folder for name in usable if name in ("memory", "pids", "cpu") and name not in found}
    return found


def _delegated(folder: Path) -> list[str]:
    """The controllers that children of a version 2 cgroup can have."""
    if not os.access(folder, os.W_OK):
        return []
    try:
        available = (folder / "cgroup.controllers").read_text().split()
        wanted: list[str] = [name for name in ("memory", "pids", "cpu") if name in available]
        enabled = (folder / "cgroup.subtree_control").read_text().split()
        if missing := [name for name in wanted if name not in enabled]:
            # The kernel refuses it in a group that has processes, unless it is the root.
            (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in missing))
    except OSError:
        return []
    return wanted


def _enabled(folder: Path) -> list[str]:
    """The controllers that the children of a version 2 cgroup have, if this process may add one beside its own."""
    if not os.access(folder, os.W_OK) or not os.access(folder / "cgroup.procs", os.W_OK):
        return []
    return (folder / "cgroup.subtree_control").read_text().split()


@functools.cache
def _report_missing_memory() -> None:
    _log.warning("no memory cgroup is writable: max_memory_bytes limits the address space of each process instead")


@functools.cache
def _remove_abandoned() -> None:
    """Remove the groups of killed processes whose supervisors were killed too; one that is used cannot be removed."""
    for parent in set(parents().values()):
        for folder in parent.glob("m2forge-*-*"):
            if not Path("/proc", folder.name.split("-")[1]).exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()


def num_oom_kills(plan: Plan) -> int:
    """How many processes of a sandbox the kernel has killed because its memory was used up."""
    for folder in plan.folders:
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                fields = dict(line.split() for line in (Path(folder) / name).read_text().splitlines())
                return int(fields.get("oom_kill", 0))
    return 0


def plan(config: SandboxConfig) -> Plan:
    _remove_abandoned()
    if config.max_cpus is not None and "cpu" not in parents():
        raise ConfigError(
            f"sandbox.max_cpus: {config.max_cpus:g} needs a writable cgroup with the controller `cpu`, and none is; "
            "leave max_cpus out, or run as a user to whom a cgroup is delegated"
        )
    if config.max_memory_bytes is not None and "memory" not in parents():
        _report_missing_memory()
    name = f"m2forge-{os.getpid()}-{next(_numbers)}"
    memory = str(config.max_memory_bytes) if config.max_memory_bytes is not None else None
    cpu = None if config.max_cpus is None else str(max(int(config.max_cpus * _PERIOD_US), 1000))
    folders: dict[str, None] = {}
    writes: list[tuple[str, str]] = []
    for controller, value in (
        ("memory", memory),
        ("pids", str((config.max_processes or MAX_PROCESSES) + RESERVE)),
        ("cpu", cpu),
    ):
        parent = parents().get(controller)
        if parent is None or value is None:
            continue
        folder = parent / name
        folders[str(folder)] = None
        is_v2 = (parent / "cgroup.controllers").exists()
        if controller == "memory":
            writes.append((str(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")), value))
        elif controller == "pids":
            writes.append((str(folder / "pids.max"), value))
        elif is_v2:
            writes.append((str(folder / "cpu.max"), f"{value} {_PERIOD_US}"))
        else:
            writes.append((str(folder / "cpu.cfs_quota_us"), value))
    return Plan(tuple(folders), tuple(writes), memory is not None and "memory" in parents())
