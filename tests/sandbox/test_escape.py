"""Probes that succeed outside and fail in a namespace sandbox, and bombs that it contains."""

import asyncio
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from m2forge.errors import DataError
from m2forge.protocols import Command, OutcomeReason, Sandbox
from m2forge.sandbox import cgroup
from m2forge.sandbox.config import SandboxConfig
from tests.sandbox.places import require, shell, use
from tests.sandbox.probes import PRELUDE, PROBES, RUNNER

MIN_PROBES = 40
CONFIG = SandboxConfig(backend="namespace", timeout_s=60)
PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A secret file, a process with a key, and listening sockets outside; what the probes need to know of them."""
    require("namespace")
    if not Path(PYTHON).exists():
        pytest.skip(f"the probes need {PYTHON}")
    folder = tmp_path_factory.mktemp("outside")
    secret = folder / "secret"
    secret.write_text("hidden")
    tcp, udp = socket.create_server(("0.0.0.0", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    abstract, named = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    name = f"m2forge-{os.getpid()}"
    abstract.bind(f"\0{name}")
    named.bind(str(folder / "socket"))
    for listener in (abstract, named):
        listener.listen()
    threading.Thread(target=_echo, args=(udp,), daemon=True).start()
    victim = subprocess.Popen(["sleep", "47114711"], env={"VICTIM_KEY": "hidden"}, cwd="/")
    group = next(iter(cgroup.parents().values()), Path("/sys/fs/cgroup")) / f"m2forge-probe-{os.getpid()}"
    facts = {
        "SECRET": str(secret),
        "VICTIM": victim.pid,
        "HOST_HOME": str(Path.home()),
        "TCP_PORT": tcp.getsockname()[1],
        "UDP_PORT": udp.getsockname()[1],
        "HOST_IP": _host_ip(),
        "NAME_SERVER": _name_server(),
        "ABSTRACT": name,
        "SOCKET": str(folder / "socket"),
        "CGROUP": str(group),
    }
    with secret.open() as file:
        os.set_inheritable(file.fileno(), True)
        os.environ["HOST_SECRET"] = "hidden"
        try:
            known = "".join(f"{name} = {value!r}\n" for name, value in (facts | {"PROBES": PROBES}).items())
            yield PRELUDE + known + RUNNER
        finally:
            del os.environ["HOST_SECRET"]
            victim.kill()
            victim.wait()
            for open_socket in (tcp, udp, abstract, named):
                open_socket.close()


def _echo(udp: socket.socket) -> None:
    try:
        while True:
            _, sender = udp.recvfrom(10)
            udp.sendto(b"pong", sender)
    except OSError:
        pass  # The test is over.


def _host_ip() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _name_server() -> str:
    path = Path("/etc/resolv.conf")
    lines = path.read_text().splitlines() if path.exists() else []
    return next(
        (line.split()[1] for line in lines if line.startswith("nameserver ") and " 127." not in line), "192.0.2.1"
    )


def test_probes_succeed_outside_and_fail_inside(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = subprocess.run(
        [PYTHON, "-c", program],
        cwd=tmp_path,
        close_fds=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
    )
    outside = set(json.loads(done.stdout))
    with capsys.disabled():
        powerless = PROBES.keys() - outside
        print(f"\n{len(outside)} probes succeed outside; not here: {', '.join(sorted(powerless)) or 'none'}")
    if os.geteuid() == 0:
        assert len(outside) >= MIN_PROBES
    # In a sandbox of an ordinary user PID 1 has the same id; see test_process_1_cannot_be_ended_from_inside.
    assert probe(program, None) <= (set() if os.geteuid() == 0 else {"signal_the_parent"})


def test_root_inside_escapes_no_more(program: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("a sandbox of an ordinary user has one id")
    assert probe(program, "0:0") <= {"become_root", "signal_the_parent"}


def test_process_1_cannot_be_ended_from_inside() -> None:
    require("namespace")
    user = "0:0" if os.geteuid() == 0 else None  # who may signal it

    async def act(sandbox: Sandbox) -> None:
        script = "for s in KILL STOP TERM INT SEGV ABRT CHLD; do kill -$s 1; done; kill -KILL -1"
        await sandbox.run(Command(("sh", "-c", script), user=user))
        assert (await sandbox.run(Command(("true",)))).is_success

    use(CONFIG, act)


def probe(program: str, user: str | None) -> set[str]:
    outcome = use(CONFIG, lambda sandbox: sandbox.run(Command((PYTHON, "-c", program), user=user)))
    assert outcome.is_success, outcome.stderr.text()
    return set(json.loads(outcome.stdout.text()))


def test_a_fork_bomb_is_contained() -> None:
    require("namespace")
    config = CONFIG.model_copy(update={"max_processes": 64})
    script = "import os\nfor _ in range(12):\n    try:\n        os.fork()\n    except OSError:\n        os._exit(0)"

    async def act(sandbox: Sandbox) -> None:
        await sandbox.run(Command((PYTHON, "-c", script), timeout_s=5))
        end_s = time.monotonic() + 60
        while not (await sandbox.run(Command(("true",)))).is_success:
            assert time.monotonic() < end_s
            await asyncio.sleep(0.05)  # What the bomb left running ends by itself.

    use(config, act)


def test_memory_is_limited() -> None:
    require("namespace")
    config = CONFIG.model_copy(update={"max_memory_bytes": 200 << 20})
    code = "b = bytearray(300 << 20); print(len(b))"

    async def act(sandbox: Sandbox) -> None:
        outcome = await sandbox.run(Command((PYTHON, "-c", code)))
        assert not outcome.is_success
        assert "314572800" not in outcome.stdout.text()
        # Out of memory, the kernel kills a command and not PID 1.
        assert (await sandbox.run(Command(("cat", "/proc/self/oom_score_adj")))).stdout.text() == "500\n"
        # Written files are memory too, and leave some for the command that removes them.
        filled = await sandbox.run(Command(("sh", "-c", "sleep 60 & exec head -c 300000000 /dev/zero > large")))
        assert not filled.is_success
        assert (await sandbox.run(Command(("rm", "large")))).is_success

    use(config, act)


def test_a_flood_costs_no_memory() -> None:
    require("namespace")
    config = CONFIG.model_copy(update={"max_output_bytes": 1000})
    outcome = shell("head -c 30000000 /dev/zero", config)
    assert (outcome.stdout.num_bytes, len(outcome.stdout.head)) == (30_000_000, 500)


def test_daemons_live_until_close(tmp_path: Path) -> None:
    require("namespace")
    mark = f"daemon of {tmp_path.name} {os.getpid()}"  # Other tests that run beside this one have daemons too.
    daemon = f"setsid sh -c 'trap \"\" TERM HUP; while :; do echo {mark}; sleep 0.05; done' & echo started"

    async def act(sandbox: Sandbox) -> None:
        started_s = time.monotonic()
        outcome = await sandbox.run(Command(("sh", "-c", daemon)))
        assert "started" in outcome.stdout.text()
        assert time.monotonic() - started_s < 20  # It holds the streams open; the command has ended all the same.
        # The brackets keep the pattern from matching the command line that holds it.
        count = await sandbox.run(Command(("sh", "-c", "grep -l '[t]rap' /proc/[0-9]*/cmdline | wc -l")))
        assert int(count.stdout.text()) >= 1
        assert (await sandbox.run(Command(("sleep", "60"), timeout_s=0.1))).reason is OutcomeReason.TIMEOUT

    use(CONFIG, act)
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if _has(path, mark.encode())]


def _has(path: Path, text: bytes) -> bool:
    try:
        return text in path.read_bytes() and path.parent.name != str(os.getpid())
    except OSError:
        return False


def test_links_mislead_neither_upload_nor_download(tmp_path: Path) -> None:
    require("namespace")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a").write_text("sound")
    (tmp_path / "outside").write_text("untouched")

    async def act(sandbox: Sandbox) -> None:
        # The folder, and the file in it, are links that the sandbox's user planted before the upload.
        script = "mkdir /tmp/trap d; ln -s /tmp/trap tests; ln -s /tmp/trap/f d/test_a; echo mine > /tmp/trap/f"
        await sandbox.run(Command(("sh", "-c", script)))
        await sandbox.upload(tmp_path / "tests", "d")
        outcome = await sandbox.run(Command(("sh", "-c", "cat d/test_a /tmp/trap/f; test ! -L d/test_a")))
        assert (outcome.stdout.text(), outcome.status) == ("soundmine\n", 0)
        # A link, and a file that would be written through it.
        await sandbox.run(Command(("sh", "-c", f"mkdir out; ln -s {tmp_path} out/a; echo evil > out/b")))
        assert await sandbox.download("out", tmp_path / "dest", 1000) == ("a",)
        with pytest.raises(DataError):
            await sandbox.download("/proc/self", tmp_path / "proc", 1 << 20)

    use(CONFIG, act)
    assert (tmp_path / "outside").read_text() == "untouched"
    assert not (tmp_path / "dest" / "a").exists()
