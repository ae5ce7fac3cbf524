"""Sandboxes: how long one takes to create, use and destroy, how many a second, and what an idle one costs.

bwrap and podman are measured beside it where they are installed.

    python benchmarks/sandbox.py [--quick] [--json]
"""

import asyncio
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from report import Bar, arguments, finish, print_table

from m2forge.protocols import Command
from m2forge.sandbox.backend import open_sandbox
from m2forge.sandbox.config import SandboxConfig

CONFIG = SandboxConfig(backend="namespace")
TRUE = Command(("/bin/true",))


async def cycle() -> None:
    sandbox = await open_sandbox(CONFIG)
    await sandbox.run(TRUE)
    await sandbox.close()


async def p50_ms(step: Callable[[], Awaitable[object]], repeats: int) -> float:
    times = []
    for number in range(repeats + 3):
        started_s = time.perf_counter()
        await step()
        if number >= 3:
            times.append(time.perf_counter() - started_s)
    return 1000 * statistics.median(times)


async def rate(num: int, at_once: int) -> float:
    """Cycles a second, several at once."""
    started_s = time.perf_counter()
    left = iter(range(num))

    async def work() -> None:
        for _ in left:
            await cycle()

    await asyncio.gather(*(work() for _ in range(at_once)))
    return num / (time.perf_counter() - started_s)


async def fork_share(repeats: int, num_bytes: int) -> float:
    """Time to fork over time to create, with an image of that size."""
    with tempfile.TemporaryDirectory() as scratch:
        layer = Path(scratch) / "layer"
        (layer / "opt").mkdir(parents=True)
        with (layer / "opt" / "data").open("wb") as file:
            file.truncate(num_bytes)
        config = CONFIG.model_copy(update={"layers": (str(layer),)})
        template = await open_sandbox(config)
        await template.run(Command(("sh", "-c", "echo prepared > file")))
        snapshot = await template.snapshot()

        async def create() -> None:
            await (await open_sandbox(config)).close()

        async def fork() -> None:
            await (await template.fork(snapshot)).close()

        created, forked = await p50_ms(create, repeats), await p50_ms(fork, repeats)
        await template.close()
        await snapshot.remove()
    return forked / created


async def idle_mb(num: int) -> float:
    """What the machine's available memory falls by for each idle sandbox, without this process."""
    before = _available_bytes()
    sandboxes = [await open_sandbox(CONFIG) for _ in range(num)]
    used = before - _available_bytes()
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
    return used / num / 1e6


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no MemAvailable in /proc/meminfo")


async def attempt_cpu_ms(repeats: int) -> float:
    """CPU time of an empty attempt: fork, three commands, its files in a fresh fork, destroy."""
    template = await open_sandbox(CONFIG)
    snapshot = await template.snapshot()
    before = _cpu_s()
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as scratch:
            sandbox = await template.fork(snapshot)
            for _ in range(3):
                await sandbox.run(TRUE)
            await sandbox.download(".", Path(scratch), 1 << 20)
            await sandbox.close()
            verifier = await template.fork(snapshot)
            await verifier.upload(Path(scratch), ".")
            await verifier.run(TRUE)
            await verifier.close()
    used = _cpu_s() - before
    await template.close()
    await snapshot.remove()
    return 1000 * used / repeats


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def peer_ms(command: list[str], repeats: int) -> float | None:
    if shutil.which(command[0]) is None:
        return None
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        if subprocess.run(command, capture_output=True).returncode:
            return None
        times.append(time.perf_counter() - started_s)
    return 1000 * statistics.median(times)


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    repeats = 30 if args.quick else 200
    cycle_ms = asyncio.run(p50_ms(cycle, repeats))

    async def commands() -> float:
        sandbox = await open_sandbox(CONFIG)
        taken = await p50_ms(lambda: sandbox.run(TRUE), repeats)
        await sandbox.close()
        return taken

    command_ms = asyncio.run(commands())
    per_s = asyncio.run(rate(100 if args.quick else 1000, 2 * (os.cpu_count() or 1)))
    shares = {size: asyncio.run(fork_share(repeats, size)) for size in (100_000_000, 2_000_000_000)}
    num_idle = 100 if args.quick else 500
    idle = asyncio.run(idle_mb(num_idle))
    cpu_ms = asyncio.run(attempt_cpu_ms(repeats))
    bwrap = peer_ms(["bwrap", "--unshare-all", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink",
                     "usr/lib", "/lib", "--proc", "/proc", "--dev", "/dev", "/bin/true"], repeats)  # fmt: skip
    podman = peer_ms(["podman", "run", "--rm", "--network=none", "--rootfs", "/", "/bin/true"], 5)
    rows = [
        ("create + command + destroy", f"{cycle_ms:.1f} ms", _shown(bwrap), _shown(podman)),
        ("command in a running sandbox", f"{command_ms:.1f} ms", "–", "–"),
        ("cycles a second", f"{per_s:.0f}", "–", "–"),
        (f"memory of one of {num_idle} idle", f"{idle:.2f} MB", "–", "–"),
        ("CPU of an empty attempt", f"{cpu_ms:.1f} ms", "–", "–"),
    ]
    print_table("Sandboxes", ("", "namespace", "bwrap", "podman run"), rows)
    bars = [
        Bar.at_most("create + command + destroy, p50 ms", cycle_ms, 12),
        Bar.at_least("cycles a second", per_s, 120),
        Bar.at_most("command in a running sandbox, p50 ms", command_ms, 4),
        *(Bar.at_most(f"fork over create, {size / 1e9:g} GB image", share, 1.2) for size, share in shares.items()),
        Bar.at_most("idle sandbox, MB", idle, 1.5),
        Bar.at_most("CPU of an empty attempt, ms", cpu_ms, 40),
    ]
    if podman is not None:
        bars.append(Bar.at_least("times faster than podman run", podman / cycle_ms, 30))
    finish(bars, args.json)


def _shown(ms: float | None) -> str:
    return "not installed" if ms is None else f"{ms:.1f} ms"


if __name__ == "__main__":
    main()
