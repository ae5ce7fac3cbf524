"""Namespace sandboxes: users, layers, exact snapshots, both upper layers, and no process left after any kill."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from m2forge.compiled import cache_folder
from m2forge.errors import ConfigError, DataError, EngineError
from m2forge.protocols import Command, OutcomeReason, Sandbox
from m2forge.sandbox import cgroup
from m2forge.sandbox.backend import open_sandbox
from m2forge.sandbox.channel import program
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.image import shifts_ids
from m2forge.sandbox.namespace import NamespaceSandbox
from tests.sandbox.places import require, shell, use
from tests.sandbox.test_kill import lives, wait_until

ROOT = Path(__file__).parent.parent.parent
CONFIG = SandboxConfig(backend="namespace", timeout_s=30, grace_s=0.1)
NUM_CYCLES = 10_000 if os.environ.get("M2FORGE_LONG") == "1" else 50

# A tree that is changed in every way that an overlay stores differently.
PREPARE = (
    "mkdir -p d/e gone opaque; echo 1 > d/e/f; echo 2 > gone/f; echo 3 > opaque/f; echo 4 > replaced; echo 5 > twin"
)
CHANGE = """
rm -r gone; rm -r opaque; mkdir opaque; echo new > opaque/g; rm replaced; mkdir replaced; echo 6 > replaced/x
chmod 751 d/e/f; ln d/e/f d/hard; ln -s /nowhere d/link; touch -d '2001-02-03 04:05:06.789' twin; : > empty
mkdir -m 700 closed; echo 7 > "a name
with a line"
"""
LIST = """
find . -mindepth 1 -type d -printf '%p %m %T@ %U:%G\\n' | sort
find . -not -type d -printf '%p %y %m %s %T@ %l %U:%G %n\\n' | sort
find . -type f -print0 | sort -z | xargs -0 cat
"""


@pytest.fixture(autouse=True)
def _can_run() -> None:
    require("namespace")


def require_upper(upper: str) -> None:
    try:
        shell("true", CONFIG.model_copy(update={"upper": upper}))
    except ConfigError as error:
        pytest.skip(str(error))


def test_auto_chooses_namespaces() -> None:
    async def act(sandbox: Sandbox) -> bool:
        return isinstance(sandbox, NamespaceSandbox)

    assert use(SandboxConfig(backend="auto"), act)


def test_auto_never_runs_plain_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def refuse(*arguments: object) -> None:
        raise ConfigError("no namespaces")

    monkeypatch.setattr(NamespaceSandbox, "open", refuse)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no backend that confines"):
        asyncio.run(open_sandbox(SandboxConfig(backend="auto"), tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="a sandbox of an ordinary user has one id")
def test_users_of_a_sandbox_are_apart() -> None:
    async def act(sandbox: Sandbox) -> None:
        for user, ids in ((None, "1000 1000"), ("0:0", "0 0"), ("nobody", "65534 65534"), ("7", "7 7")):
            outcome = await sandbox.run(Command(("sh", "-c", "echo $(id -u) $(id -g)"), user=user))
            assert outcome.stdout.text().strip() == ids
        await sandbox.run(Command(("sh", "-c", "mkdir -m 700 /verdict; echo 0 > /verdict/reward"), user="root"))
        outcome = await sandbox.run(Command(("sh", "-c", "echo 1 > /verdict/reward; cat /verdict/reward")))
        assert "denied" in outcome.stderr.text()
        assert (await sandbox.run(Command(("true",), user="stranger"))).status == 126

    use(CONFIG, act)


def test_a_stack_of_layers_is_one_tree(tmp_path: Path) -> None:
    for name in ("agent", "tools"):
        (tmp_path / name / "opt").mkdir(parents=True)
        (tmp_path / name / "opt" / name).write_text(f"#!/bin/sh\necho {name}\n")
        (tmp_path / name / "opt" / name).chmod(0o755)
        (tmp_path / name / "opt" / "which").write_text(name)
    tmp_path.chmod(0o755)
    config = CONFIG.model_copy(update={"layers": (str(tmp_path / "agent"), str(tmp_path / "tools"))})
    assert shell("/opt/agent; /opt/tools; cat /opt/which", config).stdout.text() == "agent\ntools\ntools"
    shell("echo x > /opt/which", config)
    assert (tmp_path / "tools" / "opt" / "which").read_text() == "tools"
    shared = config.model_copy(update={"folders": (str(tmp_path),)})
    assert shell(f"cat {tmp_path}/tools/opt/which; touch {tmp_path}/x", shared).stderr.text().count("Read-only") == 1


@pytest.mark.parametrize("upper", ["memory", "disk"])
def test_a_fork_is_the_sandbox_at_its_snapshot(upper: str) -> None:
    require_upper(upper)

    async def tree(sandbox: Sandbox) -> str:
        return (await sandbox.run(Command(("sh", "-c", LIST)))).stdout.text()

    async def act(sandbox: Sandbox) -> None:
        await sandbox.run(Command(("sh", "-c", PREPARE)))
        first = await sandbox.snapshot()
        middle = await sandbox.fork(first)
        writer = await middle.start(Command(("sh", "-c", "while :; do echo x >> /tmp/growing; done")))
        await middle.run(Command(("sh", "-c", CHANGE)))
        second = await middle.snapshot()
        assert not (await middle.run(Command(("true",)))).stdout.num_bytes
        size = Command(("stat", "-c", "%s", "/tmp/growing"))
        before = (await middle.run(size)).stdout.text()
        async with asyncio.timeout(60):
            while (await middle.run(size)).stdout.text() == before:  # It goes on.
                await asyncio.sleep(0.01)
        await writer.stop()
        last = await middle.fork(second)
        expected = await tree(middle)
        assert "opaque/g" in expected
        assert "gone" not in expected
        assert await tree(last) == expected
        for opened in (last, middle):
            await opened.close()
        for snapshot in (second, first):
            await snapshot.remove()

    use(CONFIG.model_copy(update={"upper": upper}), act)


@pytest.mark.parametrize("upper", ["memory", "disk"])
def test_written_files_are_limited_in_bytes_and_number(upper: str) -> None:
    require_upper(upper)
    config = CONFIG.model_copy(update={"upper": upper, "max_disk_bytes": 8 << 20, "max_inodes": 500})

    async def act(sandbox: Sandbox) -> None:
        for target in ("/workspace/a", "/tmp/a", "/dev/shm/a", "/dev/a"):
            script = f"i=0; while [ $i -lt 5 ]; do head -c 4000000 /dev/zero >> {target}$i || exit 1; i=$((i+1)); done"
            outcome = await sandbox.run(Command(("sh", "-c", f"{script}; echo full")))
            assert "full" not in outcome.stdout.text(), target
            await sandbox.run(Command(("sh", "-c", f"rm -f {target}*")))
        assert "No space" in (await sandbox.run(Command(("sh", "-c", "seq 1000 | xargs touch")))).stderr.text()
        assert not (await sandbox.run(Command(("truncate", "-s", "1T", "sparse")))).is_success
        with pytest.raises(DataError, match="No space"):
            await sandbox.write("more", bytes(9 << 20))

    use(config, act)


def test_a_worker_can_be_stopped_at_once() -> None:
    async def act(sandbox: Sandbox) -> None:
        for _ in range(30):
            worker = await sandbox.start(Command(("sleep", "60")))
            assert (await asyncio.wait_for(worker.stop(), 30)).reason is OutcomeReason.KILLED

    use(CONFIG, act)


def test_a_snapshot_is_of_one_moment() -> None:
    async def act(sandbox: Sandbox) -> None:
        assert isinstance(sandbox, NamespaceSandbox)
        # Between the two files that are read, the big one is.
        count = "n=0; while :; do n=$((n+1)); echo $n > a; echo $n > b; done"
        script = f"echo 0 > b; head -c 20000000 /dev/zero > big; echo 0 > a; echo up; {count}"
        await (await sandbox.start(Command(("sh", "-c", script)))).receive_line(30)
        async with asyncio.timeout(60):
            snapshots = await asyncio.gather(*(sandbox.snapshot() for _ in range(3)))
        for snapshot in snapshots:
            folder = snapshot.layer / "workspace"
            assert (folder / "big").stat().st_size == 20_000_000
            # A shell that was stopped has written one number to both files, or is about to.
            first, second = (int((folder / name).read_text() or -1) for name in ("a", "b"))
            assert -1 in (first, second) or first - second in (0, 1)
            await snapshot.remove()

    use(CONFIG, act)


def test_a_later_snapshot_is_whole() -> None:
    async def act(sandbox: Sandbox) -> list[list[str]]:
        assert isinstance(sandbox, NamespaceSandbox)
        found = []
        for name in ("a", "b"):
            await sandbox.run(Command(("touch", name)))
            snapshot = await sandbox.snapshot()
            found.append(sorted(path.name for path in (snapshot.layer / "workspace").iterdir()))
            await snapshot.remove()
        return found

    assert use(CONFIG, act) == [["a"], ["a", "b"]]


def test_root_installs_where_an_image_is_built(tmp_path: Path) -> None:
    if not shifts_ids():
        pytest.skip("a sandbox of an ordinary user has one id")
    (tmp_path / "uploaded").write_text("x")

    async def act(sandbox: Sandbox) -> tuple[int, str, str]:
        assert isinstance(sandbox, NamespaceSandbox)
        give = Command(("sh", "-c", "echo y > given && chown 7:8 given && stat -c %u:%g given"), user="0:0")
        refused = (await sandbox.run(give)).status
        given = (await sandbox.build(give)).stdout.text()
        await sandbox.upload(tmp_path / "uploaded", ".", "0:0")  # The folder is another user's.
        return refused, given, (await sandbox.run(Command(("stat", "-c", "%u", "uploaded")))).stdout.text()

    assert use(CONFIG, act) == (2, "7:8\n", "0\n")


def test_a_cancelled_transfer_leaves_nothing(tmp_path: Path) -> None:
    async def act(sandbox: Sandbox) -> None:
        await sandbox.run(Command(("sh", "-c", "mkdir d; head -c 50000000 /dev/zero > d/big")))
        before = len(list(Path("/proc/self/fd").iterdir()))
        for number in range(5):
            download = asyncio.create_task(sandbox.download("d", tmp_path / str(number), 1 << 30))
            await asyncio.sleep(0.005)
            download.cancel()
            with pytest.raises(asyncio.CancelledError):
                await download
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        assert (await sandbox.run(Command(("pgrep", "-c", "sandbox")))).stdout.text() == "1\n"  # PID 1 alone

    use(CONFIG, act)


def test_a_copy_that_fails_here_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    async def act(sandbox: Sandbox) -> None:
        await sandbox.write("a", b"x")
        with pytest.raises(EngineError, match=r"cannot be copied .* Not a directory"):
            await sandbox.download(".", tmp_path / "file" / "below", 100)
        assert await sandbox.read("a", 1) == b"x"

    use(CONFIG, act)


def test_a_storm_of_orphans_does_not_hold_up_the_end() -> None:
    async def whole() -> float:
        sandbox = await open_sandbox(CONFIG.model_copy(update={"max_processes": 64}))
        storm = "import os\nwhile True:\n    try:\n        os.fork() or os._exit(0)\n    except OSError:\n        pass"
        for _ in range(3):
            await sandbox.start(Command(("/usr/bin/python3", "-c", storm)))
        await asyncio.sleep(0.2)
        started_s = time.monotonic()
        await sandbox.close()
        return time.monotonic() - started_s

    assert asyncio.run(whole()) < 20


def test_a_closed_sandbox_says_so() -> None:
    async def whole() -> None:
        sandbox = await open_sandbox(CONFIG)
        worker = await sandbox.start(Command(("sleep", "60")))
        await sandbox.close()
        await sandbox.close()
        assert (await worker.wait()).reason is OutcomeReason.KILLED
        with pytest.raises(EngineError, match="is closed"):
            await sandbox.run(Command(("true",)))

    asyncio.run(whole())


def test_a_cancelled_close_can_be_repeated() -> None:
    async def whole() -> list[object]:
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        sandbox = await open_sandbox(CONFIG)
        closing = asyncio.create_task(sandbox.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await sandbox.close()
        return errors

    assert asyncio.run(whole()) == []


@pytest.mark.parametrize("key", ["folders", "devices"])
def test_a_path_that_is_missing_is_named(key: str, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={key: (str(tmp_path / "nowhere"),)})
    with pytest.raises(ConfigError, match=rf"sandbox\.{key}: .*nowhere does not exist"):
        shell("true", config)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create a device file")
def test_configured_devices_can_be_read_and_written() -> None:
    with tempfile.TemporaryDirectory() as folder:
        shown, hidden = Path(folder) / "nvidia0", Path(folder) / "nvidia1"
        for path in (shown, hidden):
            os.mknod(path, 0o020666, os.makedev(1, 5))  # What /dev/zero is.
            path.chmod(0o666)
        config = CONFIG.model_copy(update={"devices": (str(shown),)})
        done = shell(f"head -c 4 {shown} | od -An -tu1; echo x > {shown}; echo $?; ls {folder}", config)
    assert done.stdout.text().split() == ["0", "0", "0", "0", "0", "nvidia0"]


@pytest.mark.parametrize(("number", "upper"), [(signal.SIGKILL, "memory"), (signal.SIGTERM, "disk")])
def test_nothing_is_left_when_we_are_killed(number: signal.Signals, upper: str) -> None:
    require_upper(upper)
    code = (
        "import asyncio, sys\n"
        "from m2forge.protocols import Command\n"
        "from m2forge.sandbox.backend import open_sandbox\n"
        "from m2forge.sandbox.config import SandboxConfig\n"
        "async def main():\n"
        f"    config = SandboxConfig(backend='namespace', upper={upper!r})\n"
        "    sandboxes = [await open_sandbox(config) for _ in range(5)]\n"
        "    script = 'setsid sleep 4712 & trap \"\" TERM HUP; echo up; while :; do sleep 4712; done'\n"
        "    for sandbox in sandboxes:\n"
        "        worker = await sandbox.start(Command(('sh', '-c', script)))\n"
        "        await worker.receive_line(10)\n"
        "    print(*[sandbox._process.pid for sandbox in sandboxes], flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    supervisors = [int(word) for word in parent.stdout.readline().split()]
    everyone = [*supervisors, *(pid for supervisor in supervisors for pid in descendants(supervisor))]
    assert len(everyone) >= 4 * len(supervisors)
    groups = list(cgroup_folders(parent.pid))
    parent.send_signal(number)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not any(map(lives, everyone)), 20)
    wait_until(lambda: not any(group.exists() for group in groups), 20)
    wait_until(lambda: not list((cache_folder() / "sandboxes").glob(f"{parent.pid}-*/upper-*")), 20)


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [below for child in map(int, children) for below in (child, *descendants(child))]


def cgroup_folders(pid: int) -> list[Path]:
    return [folder for parent in cgroup.parents().values() for folder in parent.glob(f"m2forge-{pid}-*")]


def test_all_processes_are_in_all_cgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = cgroup.plan(CONFIG)
    # Version 2 too, which may be mounted without controllers.
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    unified = [fields[1] for fields in mounts if fields[2] == "cgroup2"]
    added = [f"{root}/m2forge-{os.getpid()}-test" for root in unified if os.access(root, os.W_OK)]
    if any(folder.startswith(f"{root}/") for root in unified for folder in plan.folders):
        added = []  # The plan has a group of version 2 already, and a process has one.
    folders = [*plan.folders, *added]
    if not folders:
        pytest.skip("no cgroup is writable")
    monkeypatch.setattr(cgroup, "plan", lambda config: cgroup.Plan(tuple(dict.fromkeys(folders)), plan.writes))

    async def act(sandbox: Sandbox) -> list[int]:
        worker = await sandbox.start(Command(("sh", "-c", "sleep 60 & echo up; wait")))
        await worker.receive_line()
        return [len((Path(folder) / "cgroup.procs").read_text().split()) for folder in folders]

    assert use(CONFIG, act) == [3] * len(folders)  # PID 1, the shell and `sleep`.
    assert not any(Path(folder).exists() for folder in folders)


def test_a_killed_supervisor_takes_the_sandbox_with_it() -> None:
    async def act(sandbox: Sandbox) -> None:
        assert isinstance(sandbox, NamespaceSandbox)
        worker = await sandbox.start(Command(("sleep", "60")))
        inside = descendants(sandbox._process.pid)
        sandbox._process.kill()
        outcome = await asyncio.wait_for(worker.wait(), 30)
        assert (outcome.reason, outcome.status) == (OutcomeReason.SIGNALLED, -9)
        wait_until(lambda: not any(map(lives, inside)), 20)

    use(CONFIG, act)
    assert cgroup_folders(os.getpid()) == []


def sandbox_mounts() -> list[str]:
    """Mounts of this machine where sandboxes make theirs. Others, such as containers', come and go beside the tests."""
    places = (Path("/tmp"), cache_folder() / "sandboxes")
    targets = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [target for target in targets if any(Path(target).is_relative_to(place) for place in places)]


def test_many_cycles_leak_nothing() -> None:
    def state() -> dict[str, int]:
        own = Path("/proc/self")
        return {
            "descriptors": len(list((own / "fd").iterdir())),
            "children": len((own / "task" / str(os.getpid()) / "children").read_text().split()),
            "mounts": len(sandbox_mounts()),
            "cgroups": len(cgroup_folders(os.getpid())),
        }

    async def cycle(number: int) -> None:
        sandbox = await open_sandbox(CONFIG)
        await sandbox.run(Command(("sh", "-c", "echo x > y; sleep 60 &")))
        if number % 10 == 0:
            await (await sandbox.snapshot()).remove()
        await sandbox.close()

    async def cycles(count: int) -> None:
        for number in range(count):
            await cycle(number)

    asyncio.run(cycles(3))
    before = state()
    asyncio.run(cycles(NUM_CYCLES))
    assert state() == before


ORDINARY = """
import asyncio, concurrent.futures.thread, json, os, sys  # what the ordinary user may not be able to read
from m2forge.errors import ConfigError
from m2forge.protocols import Command
from m2forge.sandbox.backend import open_sandbox
from m2forge.sandbox.config import SandboxConfig

SCRIPT = "id -u; echo x > f; rm -r /var/tmp; mkdir /var/tmp; echo y > /var/tmp/g; cat /etc/shadow"

async def main():
    sandbox = await open_sandbox(SandboxConfig(backend="namespace"))
    outcome = await sandbox.run(Command(("sh", "-c", SCRIPT)))
    snapshot = await sandbox.snapshot()
    fork = await sandbox.fork(snapshot)
    files = (await fork.run(Command(("sh", "-c", "cat f /var/tmp/g")))).stdout.text()
    other = await sandbox.run(Command(("true",), user="7"))
    await fork.close()
    await snapshot.remove()
    await sandbox.close()
    try:
        await open_sandbox(SandboxConfig(backend="namespace", upper="disk"))
    except ConfigError as error:
        return [outcome.stdout.text(), outcome.stderr.text(), files, other.status, str(error)]

os.setgroups([])
os.setresgid(54321, 54321, 54321)
os.setresuid(54321, 54321, 54321)
try:
    print(json.dumps(asyncio.run(main())))
except ConfigError as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="this run is by an ordinary user already")
def test_an_ordinary_user_has_sandboxes_too() -> None:
    with tempfile.TemporaryDirectory() as scratch:  # pytest's own folders are root's alone
        os.chown(scratch, 54321, 54321)
        (Path(scratch) / "m2forge").mkdir(mode=0o777)
        Path(shutil.copy(program(), Path(scratch) / "m2forge")).chmod(0o755)
        os.chown(Path(scratch) / "m2forge", 54321, 54321)
        env = os.environ | {"XDG_CACHE_HOME": scratch, "TMPDIR": scratch, "HOME": scratch}
        done = subprocess.run([sys.executable, "-c", ORDINARY], cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        if isinstance(answer, str):
            pytest.skip(f"sandbox backend namespace, ordinary user: {answer}")
        stdout, stderr, files, other, disk = answer
        assert (stdout, files, other) == ("1000\n", "x\ny\n", 126)
        assert "/etc/shadow" in stderr
        assert 'set upper = "memory"' in disk
        assert not list(Path(scratch).glob("m2forge/sandboxes/*/[ul]*er-*"))


def test_starting_takes_milliseconds() -> None:
    async def measure() -> float:
        times = []
        for _ in range(20):
            started_s = time.perf_counter()
            sandbox = await open_sandbox(CONFIG)
            await sandbox.run(Command(("true",)))
            await sandbox.close()
            times.append(time.perf_counter() - started_s)
        return min(times)

    assert asyncio.run(measure()) < 0.1  # ten times what it takes on an idle machine
