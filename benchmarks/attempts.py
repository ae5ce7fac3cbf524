"""What an attempt of the kind `command` costs beside its program, whether that grows, and how many run at once.

Every attempt is one of a run: a lease of the pool, a workspace with its own home, an episode at a gateway in another
process, the program in its sandbox, the recorded calls, the verifier in its worker process, the attempt stored in the
pool. The program makes one chat completion, which a scripted engine answers. The limit is the same program started by
nothing but Popen, against the same gateway; it takes turns with the attempts, so that both meet the same machine.

    overhead    median seconds of an attempt, one after another, less the median of the program alone
    growth      of 10,000 attempts, two at once: processor time of the last tenth over the first, of this process, the
                gateway and all programs, which a busy machine changes little; memory, open files, workspaces
    at once     64 attempts concurrently, against 64 programs; all must end with their call, answer and verdict

    python benchmarks/attempts.py [--json] [--quick]
"""

import asyncio
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from attempts_gateway import make_tokenizer
from report import Bar, arguments, finish, print_table
from sqlalchemy import func, select

from m2forge.agents.attempt import AttemptRunner, Overrides
from m2forge.agents.command import CommandAgent
from m2forge.agents.config import CommandConfig
from m2forge.agents.workspace import Workspaces
from m2forge.pool.config import PoolConfig
from m2forge.pool.pool import Pool, PoolWriter
from m2forge.pool.tables import episode_table
from m2forge.records import Task
from m2forge.reward.config import RewardConfig
from m2forge.reward.judge import Judge
from m2forge.rl.attempts import JudgedAttempts
from m2forge.rl.gateway_admin import GatewayAdmin
from m2forge.tasks.catalog import find_family
from m2forge.tasks.config import VerifyConfig
from m2forge.tasks.runner import TaskRunner
from m2forge.text.format import make_format

FOLDER = Path(__file__).parent
COMMAND = (sys.executable, "-I", "-S", str(FOLDER / "attempts_program.py"))
ADMIN_KEY = "m2f-benchmark"
MAX_OVERHEAD_S, MAX_GROWTH, NUM_AT_ONCE = 0.030, 1.1, 64
MAX_GROWN_MIB = 32.0
"""Memory that 10,000 attempts may add to a process: 3 KB each would be a leak that a long run notices."""
MAX_FILES = 8
"""Connections to the gateway are opened as they are needed; a leak would add one an attempt."""
NUM_WARM_UP = 100
"""After them every connection and worker that attempts share is open."""
NUM_PROBES = 20
"""Attempts, then programs alone, that take turns."""


@dataclass(frozen=True)
class Counts:
    num_sequential: int
    num_growing: int
    num_at_once: int


QUICK, WHOLE = Counts(60, 200, 128), Counts(300, 10_000, 1024)


@dataclass(frozen=True)
class Grown:
    """What the attempts of `measure_growth` took and added."""

    first_s: float
    last_s: float
    """Processor seconds of an attempt, in the first tenth and in the last."""
    loop_mib: float
    gateway_mib: float
    num_files: int
    num_lost: int


@dataclass(frozen=True)
class Gateway:
    url: str
    pid: int


@contextmanager
def gateway(folder: Path) -> Iterator[Gateway]:
    command = [sys.executable, str(FOLDER / "attempts_gateway.py"), str(folder / "journal"), ADMIN_KEY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Gateway(process.stdout.readline().strip(), process.pid)
        finally:
            process.kill()


@asynccontextmanager
async def opened(folder: Path, url: str, pool: Pool) -> AsyncIterator[JudgedAttempts]:
    agent = CommandAgent(CommandConfig(command=COMMAND, timeout_s=120.0))
    async with (
        GatewayAdmin(url, ADMIN_KEY) as admin,
        TaskRunner(VerifyConfig(), folder / "verify", ("chain",)) as tasks,
        PoolWriter(pool) as writer,
    ):
        runner = AttemptRunner(agent, admin, tasks, Workspaces(folder / "workspaces"))
        format = make_format("minimax_m2", make_tokenizer())
        judge = Judge(RewardConfig())
        async with JudgedAttempts(runner, pool, writer, judge, format, lambda task, rate: None) as attempts:
            yield attempts


async def attempt_all(attempts: JudgedAttempts, pool: Pool, num: int, num_at_once: int) -> list[float]:
    """Seconds of each of `num` attempts, in the order of their starts."""
    family = find_family("chain")
    times_s: list[float] = []
    seats = asyncio.Semaphore(num_at_once)

    async def attempt(name: str) -> None:
        async with seats:
            (lease,) = pool.lease(name, 1)
            started_s = time.perf_counter()
            await attempts.run(lease)
            times_s.append(time.perf_counter() - started_s)

    done = 0
    while done < num:
        part = min(1000, num - done)
        tasks: list[tuple[Task, int]] = [(family.draw(1, done + index), 1) for index in range(part)]
        pool.put(tasks, "queued")
        await asyncio.gather(*(attempt(f"{done + index}") for index in range(part)))
        done += part
    return times_s


async def program_alone(url: str, num: int, num_at_once: int = 1) -> list[float]:
    """Seconds of the program by itself, each time under the key of another episode."""
    times_s: list[float] = []
    seats = asyncio.Semaphore(num_at_once)
    async with GatewayAdmin(url, ADMIN_KEY) as admin:
        task = find_family("chain").draw(1, 0)
        ids = [f"alone-{index}" for index in range(num)]
        keys = [(await admin.open(id, task, "", Overrides())).key for id in ids]

        def run(key: str) -> None:
            env = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
            started_s = time.perf_counter()
            subprocess.run(COMMAND, env=env, check=True, stdout=subprocess.DEVNULL)
            times_s.append(time.perf_counter() - started_s)

        async def run_in_turn(key: str) -> None:
            async with seats:
                await asyncio.to_thread(run, key)

        await asyncio.gather(*(run_in_turn(key) for key in keys))
        await admin.delete(ids)
    return times_s


def memory_mib(pid: int | None = None) -> float:
    pages = int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def processor_s(gateway: int) -> float:
    """Processor seconds of this process, of the processes that it has waited for, and of the gateway."""
    times = [sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    fields = Path(f"/proc/{gateway}/stat").read_text().rpartition(")")[2].split()
    return sum(times) + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def count_whole(pool: Pool) -> int:
    """Attempts that ended without a failure, with one call and a verdict."""
    columns = episode_table.c
    query = select(func.count()).where(
        columns.failure.is_(None), columns.num_calls == 1, columns.artifacts.contains("verdict")
    )
    with pool.database.read() as connection:
        return int(connection.execute(query).scalar_one())


def open_pool(folder: Path, num: int) -> Pool:
    url = f"sqlite:///{folder}/pool.db"
    config = PoolConfig.model_validate({"url": url, "lease_s": 3600.0, "window": {"queue": num + 1000}})
    return Pool(config, make_tokenizer().vocab_size)


async def measure_overhead(folder: Path, url: str, num: int) -> tuple[float, float]:
    """Median seconds of an attempt and of the program alone, measured in turns."""
    alone_s: list[float] = []
    attempts_s: list[float] = []
    with open_pool(folder, num) as pool:
        async with opened(folder, url, pool) as attempts:
            await attempt_all(attempts, pool, 5, 1)
            for _ in range(0, num, NUM_PROBES):
                alone_s += await program_alone(url, NUM_PROBES)
                attempts_s += await attempt_all(attempts, pool, NUM_PROBES, 1)
    return statistics.median(attempts_s), statistics.median(alone_s)


async def measure_growth(folder: Path, gateway: Gateway, num: int) -> Grown:
    size = num // 10
    with open_pool(folder, num) as pool:
        async with opened(folder, gateway.url, pool) as attempts:
            await attempt_all(attempts, pool, NUM_WARM_UP, 2)
            before = memory_mib(), memory_mib(gateway.pid), open_files()
            used_s: list[float] = []
            for _ in range(10):
                started_s = processor_s(gateway.pid)
                await attempt_all(attempts, pool, size, 2)
                used_s.append((processor_s(gateway.pid) - started_s) / size)
                print(f"{len(used_s) * size:,} of {num:,} attempts", file=sys.stderr, flush=True)
            after = memory_mib(), memory_mib(gateway.pid), open_files()
        assert not list((folder / "workspaces").iterdir()), "a workspace is left"
        return Grown(
            used_s[0],
            used_s[-1],
            after[0] - before[0],
            after[1] - before[1],
            after[2] - before[2],
            NUM_WARM_UP + 10 * size - count_whole(pool),
        )


async def measure_at_once(folder: Path, url: str, num: int) -> tuple[float, float, int]:
    """Attempts a second at 64 concurrent ones, programs alone a second, and how many attempts were lost."""
    with open_pool(folder, num) as pool:
        async with opened(folder, url, pool) as attempts:
            started_s = time.perf_counter()
            await attempt_all(attempts, pool, num, NUM_AT_ONCE)
            rate = num / (time.perf_counter() - started_s)
        num_lost = num - count_whole(pool)
    started_s = time.perf_counter()
    await program_alone(url, num, NUM_AT_ONCE)
    return rate, num / (time.perf_counter() - started_s), num_lost


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    counts = QUICK if options.quick else WHOLE
    with tempfile.TemporaryDirectory(prefix="attempts") as name:
        folder = Path(name)
        for part in ("one", "many", "wide"):
            (folder / part).mkdir()
        with gateway(folder) as server:
            attempt_s, program_s = asyncio.run(measure_overhead(folder / "one", server.url, counts.num_sequential))
            grown = asyncio.run(measure_growth(folder / "many", server, counts.num_growing))
            rate, limit, num_lost = asyncio.run(measure_at_once(folder / "wide", server.url, counts.num_at_once))
    overhead_s = attempt_s - program_s
    print_table(
        "An attempt of the kind command",
        ("", "ours", "the program alone", "ours over it"),
        [
            (
                "one after another, ms",
                f"{1e3 * attempt_s:.1f}",
                f"{1e3 * program_s:.1f}",
                f"{attempt_s / program_s:.2f}x",
            ),
            (f"{NUM_AT_ONCE} at once, a second", f"{rate:.1f}", f"{limit:.1f}", f"{rate / limit:.2f}x"),
            (f"processor time, first tenth of {counts.num_growing:,}, ms", f"{1e3 * grown.first_s:.1f}", "", ""),
            ("last tenth, ms", f"{1e3 * grown.last_s:.1f}", "", ""),
        ],
    )
    bars = [
        Bar.at_most("overhead of an attempt beside its program, ms", 1e3 * overhead_s, 1e3 * MAX_OVERHEAD_S),
        Bar.at_most(
            f"last tenth of {counts.num_growing:,} attempts over the first", grown.last_s / grown.first_s, MAX_GROWTH
        ),
        Bar.at_most("memory that they added to the loop, MiB", grown.loop_mib, MAX_GROWN_MIB),
        Bar.at_most("memory that they added to the gateway, MiB", grown.gateway_mib, MAX_GROWN_MIB),
        Bar.at_most("open files that they added", grown.num_files, MAX_FILES),
        Bar.at_most("attempts lost of them", grown.num_lost, 0),
        Bar.at_most(f"attempts lost of {counts.num_at_once:,}, {NUM_AT_ONCE} at once", num_lost, 0),
    ]
    finish(bars, options.json)


if __name__ == "__main__":
    main()
