"""Nothing of a command outlives it: not its children, not what ran away from them, not even if we are killed."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from m2forge.protocols import Command, Outcome, OutcomeReason
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.process import ProcessSandbox

ROOT = Path(__file__).parent.parent.parent

# Each process writes its id into the folder `pids` and stays; the last two are no children of anybody below us.
FAMILY = """
mkdir -p pids
stay() { : > pids/$(sh -c 'echo $PPID'); while :; do sleep 0.1; done; }
stay &
(trap '' TERM HUP INT; stay) &
setsid sh -c ': > pids/$$; trap "" TERM; while :; do sleep 0.1; done' &
(setsid sh -c ': > pids/$$; while :; do sleep 0.1; done' > /dev/null 2>&1 < /dev/null &)
while [ $(ls pids | wc -l) -lt 4 ]; do sleep 0.01; done
echo ready
"""


def pids(folder: Path) -> list[int]:
    return [int(path.name) for path in (folder / "pids").iterdir()]


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_until(holds: Callable[[], bool], limit_s: float = 60) -> None:
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def family(folder: Path, end: str, config: SandboxConfig | None = None) -> Outcome:
    return asyncio.run(ProcessSandbox(folder, config).run(Command(("sh", "-c", FAMILY + end))))


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("exit 0", OutcomeReason.EXITED),
        ("kill -9 $$", OutcomeReason.SIGNALLED),
        ("sleep 60", OutcomeReason.TIMEOUT),
        ("yes", OutcomeReason.FLOODED),
    ],
)
def test_the_whole_family_ends_with_the_command(tmp_path: Path, end: str, reason: OutcomeReason) -> None:
    config = SandboxConfig(
        backend="process", timeout_s=3 if reason is OutcomeReason.TIMEOUT else 30, grace_s=0.1, on_flood="kill"
    )
    outcome = family(tmp_path, end, config)
    assert outcome.reason is reason
    assert outcome.stdout.text().startswith("ready\n")
    assert len(pids(tmp_path)) == 4
    # At once: whoever hears of the end may use the workspace again.
    assert not any(map(lives, pids(tmp_path)))


def test_cancelling_kills(tmp_path: Path) -> None:
    async def cancel() -> None:
        sandbox = ProcessSandbox(tmp_path)
        task = asyncio.create_task(sandbox.run(Command(("sh", "-c", FAMILY + "sleep 60"))))
        while not (tmp_path / "pids").is_dir() or len(pids(tmp_path)) < 4:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not any(map(lives, pids(tmp_path)))

    asyncio.run(cancel())


def test_closing_a_sandbox_kills_its_workers(tmp_path: Path) -> None:
    async def close() -> None:
        sandbox = ProcessSandbox(tmp_path)
        worker = await sandbox.start(Command(("sh", "-c", FAMILY + "sleep 60")))
        assert await worker.receive_line(30) == b"ready\n"
        await sandbox.close()
        assert (await worker.wait()).reason is OutcomeReason.KILLED
        assert not any(map(lives, pids(tmp_path)))

    asyncio.run(close())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_family_dies_with_us(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        "import asyncio, sys, pathlib\n"
        "from m2forge.protocols import Command\n"
        "from m2forge.sandbox.process import ProcessSandbox\n"
        "sandbox = ProcessSandbox(pathlib.Path(sys.argv[1]))\n"
        "asyncio.run(sandbox.run(Command(('sh', '-c', sys.argv[2]))))\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), FAMILY + "sleep 60"], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    wait_until(lambda: (tmp_path / "pids").is_dir() and len(pids(tmp_path)) == 4)
    parent.send_signal(number)
    parent.wait()
    wait_until(lambda: not any(map(lives, pids(tmp_path))))


def test_a_fork_of_us_does_not_keep_the_family_alive(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, sys, pathlib, time\n"
        "from m2forge.protocols import Command\n"
        "from m2forge.sandbox.process import ProcessSandbox\n"
        "async def main():\n"
        "    sandbox = ProcessSandbox(pathlib.Path(sys.argv[1]))\n"
        "    task = asyncio.create_task(sandbox.run(Command(('sh', '-c', sys.argv[2]))))\n"
        "    while not pathlib.Path(sys.argv[1], 'pids').is_dir():\n"
        "        await asyncio.sleep(0.01)\n"
        "    if not os.fork():\n"  # it holds our end of the control pipe
        "        pathlib.Path(sys.argv[1], 'forked').touch()\n"
        "        time.sleep(20)\n"
        "        os._exit(0)\n"
        "    await task\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), FAMILY + "sleep 60"],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(lambda: (tmp_path / "forked").exists() and len(pids(tmp_path)) == 4)
        parent.kill()
        wait_until(lambda: not any(map(lives, pids(tmp_path))))
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


def test_a_command_that_kills_its_reaper_dies(tmp_path: Path) -> None:
    script = "sh -c 'echo $$; exec sleep 60' & sleep 0.2; kill -9 $PPID; sleep 60"
    outcome = asyncio.run(ProcessSandbox(tmp_path).run(Command(("sh", "-c", script))))
    assert (outcome.reason, outcome.status) == (OutcomeReason.SIGNALLED, -9)
    # Nobody is left to wait for it, and a process that was killed takes a moment to die.
    wait_until(lambda: not lives(int(outcome.stdout.text())))


@pytest.mark.parametrize("reason", [OutcomeReason.TIMEOUT, OutcomeReason.KILLED])
def test_a_command_that_stops_its_reaper_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: OutcomeReason
) -> None:
    monkeypatch.setattr("m2forge.sandbox.command_worker.STUCK_S", 0.2)
    timeout_s = 2.0 if reason is OutcomeReason.TIMEOUT else 60
    script = "setsid sh -c 'echo $$; exec sleep 60' & sleep 0.2; echo; kill -STOP $PPID; sleep 60"

    async def use() -> Outcome:
        worker = await ProcessSandbox(tmp_path).start(Command(("sh", "-c", script), timeout_s=timeout_s))
        process = int(await worker.receive_line(30))
        await worker.receive_line(30)
        await asyncio.sleep(0.1)
        outcome = await (worker.wait() if reason is OutcomeReason.TIMEOUT else worker.stop())
        assert not lives(process)
        return outcome

    assert asyncio.run(asyncio.wait_for(use(), 50)).reason is reason


def test_forking_faster_than_we_look_does_not_help(tmp_path: Path) -> None:
    code = (
        "import os, time\n"
        "end = time.monotonic() + 20\n"
        "while time.monotonic() < end:\n"  # each generation leaves its child behind in a session of its own
        "    if os.fork():\n"
        "        os._exit(0)\n"
        "    os.setsid()\n"
        "    open('last', 'w').write(str(os.getpid()))\n"
    )
    command = Command(
        (sys.executable, "-c", f"import os\nif os.fork() == 0:\n    exec({code!r})\nimport time\ntime.sleep(0.5)")
    )
    outcome = asyncio.run(ProcessSandbox(tmp_path).run(command))
    assert outcome.is_success
    text = (tmp_path / "last").read_text()
    time.sleep(0.2)
    assert (tmp_path / "last").read_text() == text


def test_no_descriptor_and_no_process_is_left(tmp_path: Path) -> None:
    async def use(number: int) -> None:
        sandbox = ProcessSandbox(tmp_path)
        task = asyncio.create_task(sandbox.run(Command(("sh", "-c", "cat; sleep 60 & echo"), stdin=b"x" * 200_000)))
        await asyncio.sleep(0.02 * number)
        task.cancel()  # at every stage of its life, from before its start to after its end
        await asyncio.gather(task, return_exceptions=True)

    async def use_all() -> None:
        await asyncio.gather(*(use(number) for number in range(12)))

    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = set(children.read_text().split())  # other tests may have left some
    asyncio.run(use_all())
    descriptors = set(os.listdir("/proc/self/fd"))  # noqa: PTH208  (the folder's own descriptor would be among them)
    asyncio.run(use_all())
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)  # noqa: PTH208
    assert set(children.read_text().split()) <= before
