"""Sandboxes: how long one takes to create, use and destroy, how many a second, what an idle one costs, and what stays
behind after thousands of them or after their owner was killed.

bwrap and podman are measured beside it where they are installed; podman needs the image that --peer-image names.

    python benchmarks/sandbox.py [--quick] [--json] [--peer-image debian:bookworm]
"""

import asyncio
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from report import Bar, arguments, finish, print_table

from m2forge.protocols import Command, Sandbox
from m2forge.sandbox import cgroup
from m2forge.sandbox.backend import open_sandbox
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.namespace import run_folder
from m2forge.tasks.folders.environment import prepare
from m2forge.tasks.folders.folder import FolderFile, read_folder, write_folder
from m2forge.tasks.folders.verification import verify_attempt

CONFIG = SandboxConfig(backend="namespace")
TRUE = Command(("/bin/true",))
WRITE = Command(("/bin/sh", "-c", "echo 1 > answer"))
TASK = {
    "task.toml": """schema_version = "1.4"
artifacts = ["/workspace/answer"]
[agent]
user = 1000
[verifier]
environment_mode = "separate"
[environment]
network_mode = "no-network"
workdir = "/workspace"
""",
    "instruction.md": "Write 1 to /workspace/answer.\n",
    "environment/Dockerfile": "FROM debian\nCOPY --chown=1000:1000 files/ /workspace/\nWORKDIR /workspace\n",
    "environment/files/README": "The working directory.\n",
    "tests/test.sh": """#!/bin/sh
reward=0
[ "$(cat /workspace/answer)" = 1 ] && reward=1
echo "$reward" > /logs/verifier/reward.txt
[ "$reward" = 1 ]
""",
}
"""The folder of an empty attempt."""
NUM_OWNED, NUM_IDLE = 20, 500
OWNER = f"""
import asyncio
from m2forge.protocols import Command
from m2forge.sandbox.backend import open_sandbox
from m2forge.sandbox.config import SandboxConfig

async def main():
    sandboxes = [await open_sandbox(SandboxConfig(backend="namespace")) for _ in range({NUM_OWNED})]
    for sandbox in sandboxes:
        await (await sandbox.start(Command(("sh", "-c", "setsid sleep 4713 & echo up; sleep 4713")))).receive_line()
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


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


async def command_ms(config: SandboxConfig, repeats: int) -> float:
    sandbox = await open_sandbox(config)
    try:
        return await p50_ms(lambda: sandbox.run(TRUE), repeats)
    finally:
        await sandbox.close()


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
            for _ in range(num_bytes // 1_000_000):
                file.write(os.urandom(1_000_000))
        config = CONFIG.model_copy(update={"layers": (str(layer),)})
        template = await open_sandbox(config)
        await template.run(Command(("sh", "-c", "echo prepared > file")))
        snapshot = await template.snapshot()
        times: dict[str, list[float]] = {"create": [], "fork": []}

        async def measure(name: str, opening: Awaitable[Sandbox]) -> None:
            started_s = time.perf_counter()
            sandbox = await opening
            await sandbox.close()
            times[name].append(time.perf_counter() - started_s)

        for _ in range(repeats):  # in turns, so that other load disturbs both alike
            await measure("create", open_sandbox(config))
            await measure("fork", template.fork(snapshot))
        await template.close()
        await snapshot.remove()
    return statistics.median(times["fork"]) / statistics.median(times["create"])


async def idle_mb(num: int) -> float:
    """Memory of each idle sandbox: of its processes, of this process for it, and what the kernel holds more than
    before. The machine's free memory would count what other programs do meanwhile."""
    before = _kernel_bytes() + _pss_bytes([os.getpid()])
    sandboxes = [await open_sandbox(CONFIG) for _ in range(num)]
    used = _kernel_bytes() + _pss_bytes([os.getpid(), *_descendants(os.getpid())]) - before
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
    return used / num / 1e6


def _kernel_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    names = ("Slab", "KernelStack", "PageTables", "Percpu", "Shmem")
    return sum(int(fields[name].split()[0]) * 1024 for name in names)


def _pss_bytes(pids: Sequence[int]) -> int:
    """Memory of processes, where pages that several share are counted once."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return sum(int(line.split()[1]) * 1024 for text in texts for line in text.splitlines() if line.startswith("Pss:"))


def _descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [below for child in map(int, children) for below in (child, *_descendants(child))]


async def attempt_cpu_ms(repeats: int) -> float:
    """CPU time of an empty attempt at a task folder: a sandbox of its image, three commands, the verdict of its tests
    in another one, destroy."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "task"
        write_folder(folder, {path: FolderFile(text.encode()) for path, text in TASK.items()})
        environment = await prepare(read_folder(folder), CONFIG, "host")
        before = _cpu_s()
        for _ in range(repeats):
            sandbox = await environment.open()
            for command in (WRITE, TRUE, TRUE):
                await sandbox.run(command)
            verdict = await verify_attempt(environment, sandbox)
            assert verdict.perf == 1, verdict.evidence
        return 1000 * (_cpu_s() - before) / repeats


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


async def num_leaked(num_cycles: int) -> int:
    """Descriptors, processes, mounts, cgroups and files that cycles with a snapshot and a daemon leave behind."""

    def count() -> int:
        own = Path("/proc/self")
        groups = [folder for parent in cgroup.parents().values() for folder in parent.glob(f"m2forge-{os.getpid()}-*")]
        num_processes = len(list(Path("/proc").glob("[0-9]*")))
        return (
            len(list((own / "fd").iterdir()))
            + len((own / "task" / str(os.getpid()) / "children").read_text().split())
            + len((own / "mountinfo").read_text().splitlines())
            + len(groups)
            + len(list(run_folder().iterdir()))
            + (num_processes if num_processes > MAX_STRAY_PROCESSES + num_before else 0)
        )

    async def cycles(num: int) -> None:
        for number in range(num):
            sandbox = await open_sandbox(CONFIG)
            await sandbox.run(Command(("sh", "-c", "echo x > y; sleep 60 &")))
            if number % 20 == 0:
                await (await sandbox.snapshot()).remove()
            await sandbox.close()

    num_before = len(list(Path("/proc").glob("[0-9]*")))
    await cycles(3)
    before = count()
    await cycles(num_cycles)
    return count() - before


MAX_STRAY_PROCESSES = 50
"""Other programs of the machine may start and end meanwhile; a sandbox that stayed would add thousands."""


def seconds_after_kill() -> float:
    """From `kill -9` of a process with sandboxes until the last of their processes is gone."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    owner.stdout.readline()
    until_s = time.perf_counter() + 10
    while len(_sleepers()) < 2 * NUM_OWNED:  # A shell answers before its last `sleep` has begun.
        assert time.perf_counter() < until_s, "the owner's commands do not run"
        time.sleep(0.005)
    owner.kill()
    started_s = time.perf_counter()
    while _sleepers():
        time.sleep(0.005)
    taken_s = time.perf_counter() - started_s
    owner.wait()
    owner.stdout.close()
    return taken_s


def _sleepers() -> list[Path]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == b"sleep\x004713\x00":
                found.append(path)
        except OSError:
            continue  # It has ended.
    return found


def peer_ms(command: Sequence[str], repeats: int) -> float | None:
    if shutil.which(command[0]) is None:
        return None
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        if subprocess.run(command, capture_output=True).returncode:
            return None
        times.append(time.perf_counter() - started_s)
    return 1000 * statistics.median(times)


BWRAP = (
    *("bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"),
    *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev"),
    *("--tmpfs", "/tmp", "/bin/true"),
)
PODMAN_RUN = ("run", "--rm", "--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024")


def podman_ms(image: str, repeats: int) -> tuple[float, float, float] | None:
    """`podman run` of a command, one of our cycles in turn with it, and `podman exec` in a running container. Without
    a network, as our sandboxes are: podman's default takes twice as long."""
    command = ["podman", *PODMAN_RUN, image, "/bin/true"]
    if peer_ms(command, 1) is None:
        return None
    pairs = [(peer_ms(command, 1), asyncio.run(p50_ms(cycle, 10))) for _ in range(repeats)]
    name = f"m2forge-peer-{os.getpid()}"
    start = ["podman", *PODMAN_RUN, "--detach", "--name", name, image, "sleep", "600"]
    subprocess.run(start, check=True, capture_output=True)
    try:
        execute = peer_ms(["podman", "exec", name, "/bin/true"], repeats)
    finally:
        subprocess.run(["podman", "rm", "--force", "--time=0", name], check=True, capture_output=True)
    run = statistics.median(run for run, _ in pairs if run is not None)
    return run, statistics.median(own for _, own in pairs), execute or 0.0


class Report:
    """Rows and bars. Each row is printed as soon as it is measured."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str, str]] = []
        self.bars: list[Bar] = []

    def add(self, name: str, ours: str, *bars: Bar, bwrap: float | None = None, podman: float | None = None) -> None:
        row = (name, ours, _shown(bwrap), _shown(podman))
        self.rows.append(row)
        self.bars += bars
        print(*row, sep="  ", flush=True)


def measure_own(report: Report, *, quick: bool) -> float:
    """Returns the p50 of a command in a running sandbox, with which podman is compared."""
    repeats, num_cycles = (60, 300) if quick else (200, 10_000)
    ours = asyncio.run(p50_ms(cycle, repeats))
    name = "create + command + destroy"
    report.add(name, f"{ours:.1f} ms", Bar.at_most(f"{name}, p50 ms", ours, 12), bwrap=peer_ms(BWRAP, repeats))
    command = asyncio.run(command_ms(CONFIG, repeats))
    name = "command in a running sandbox"
    report.add(name, f"{command:.1f} ms", Bar.at_most(f"{name}, p50 ms", command, 4))
    per_s = asyncio.run(rate(100 if quick else 1000, 2 * (os.cpu_count() or 1)))
    report.add("cycles a second", f"{per_s:.0f}", Bar.at_least("cycles a second", per_s, 120))
    for size in (100_000_000,) if quick else (100_000_000, 2_000_000_000):
        share = asyncio.run(fork_share(repeats, size))
        name = f"fork over create, {size / 1e9:g} GB image"
        report.add(name, f"{share:.2f}", Bar.at_most(name, share, 1.2))
    idle = asyncio.run(idle_mb(NUM_IDLE))
    report.add(f"memory of one of {NUM_IDLE} idle", f"{idle:.2f} MB", Bar.at_most("idle sandbox, MB", idle, 1.5))
    cpu_ms = asyncio.run(attempt_cpu_ms(repeats))
    report.add("CPU of an empty attempt", f"{cpu_ms:.1f} ms", Bar.at_most("CPU of an empty attempt, ms", cpu_ms, 40))
    name = f"left behind by {num_cycles} cycles"
    leaked = asyncio.run(num_leaked(num_cycles))
    report.add(name, f"{leaked}", Bar.at_most(name, leaked, 0))
    gone_s = seconds_after_kill()
    bar = Bar.at_most("seconds until all are gone after kill -9", gone_s, 2)
    report.add(f"{NUM_OWNED} sandboxes gone after their owner's kill -9", f"{gone_s:.2f} s", bar)
    return command


def measure_podman(report: Report, image: str, command: float, *, quick: bool) -> None:
    measured = podman_ms(image, 5 if quick else 10)
    if measured is None:
        print(f"podman is not measured: it is not installed, has no image {image}, or cannot run it", flush=True)
        return
    run, beside, execute = measured
    bar = Bar.at_least("times faster than podman run", run / beside, 30)
    report.add("create + command + destroy, in turn with podman", f"{beside:.1f} ms", bar, podman=run)
    bar = Bar.at_least("times faster than podman exec", execute / command, 40)
    report.add("command in a running sandbox", f"{command:.1f} ms", bar, podman=execute)
    contained = asyncio.run(command_ms(SandboxConfig(backend="podman"), 30 if quick else 200))
    bars = (
        Bar.at_most("command in a podman container, p50 ms", contained, 4),
        Bar.at_least("times faster than podman exec, in a container", execute / contained, 40),
    )
    report.add("the same, backend podman", f"{contained:.1f} ms", *bars, podman=execute)


def _shown(ms: float | None) -> str:
    return "–" if ms is None else f"{ms:.1f} ms"


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--peer-image", default="debian:bookworm", help="the image with which podman is measured")
    args = parser.parse_args()
    report = Report()
    command = measure_own(report, quick=args.quick)
    measure_podman(report, args.peer_image, command, quick=args.quick)
    print_table("Sandboxes", ("", "ours", "bwrap", "podman"), report.rows)
    finish(report.bars, args.json)


if __name__ == "__main__":
    main()
