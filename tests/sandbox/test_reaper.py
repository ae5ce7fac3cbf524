"""The channel between a sandbox and its reaper: a command cannot forge what comes on it, and dies where it tries."""

import asyncio
import os
import random
import sys
from pathlib import Path

import pytest

from m2forge.protocols import Command, Outcome, OutcomeReason
from m2forge.sandbox import reaper
from m2forge.sandbox.process import ProcessSandbox
from m2forge.sandbox.reaper import LIMITS, Order
from tests.sandbox.test_kill import lives, wait_until

OPEN = """
import os
opened = []
above = f"/proc/{os.getppid()}"
for number in open(f"{above}/cmdline").read().split("\\0")[-3:-1]:  # CONTROL and STATUS
    try:
        os.write(os.open(f"{above}/fd/{number}", os.O_WRONLY | os.O_NONBLOCK), b"\\xf3garbage" * 4)
        opened.append(number)
    except OSError as error:
        print(type(error).__name__)
assert not opened
"""
TAKE = """
import ctypes, os, time
print(os.getpid(), flush=True)
status = int(open(f"/proc/{os.getppid()}/cmdline").read().split("\\0")[-2])
syscall = ctypes.CDLL(None, use_errno=True).syscall
taken = syscall(438, syscall(434, os.getppid(), 0), status, 0)  # pidfd_getfd of pidfd_open
if taken >= 0:
    os.write(taken, b"garbage " * 16)
    time.sleep(60)
"""
FAKE_REAPER = """
import os, sys, time
control, status = int(sys.argv[1]), int(sys.argv[2])
secret = os.read(control, 24)[8:]
sys.path.insert(0, ROOT)
from m2forge.sandbox.reaper import REPORT, STARTED
me = os.getpid()
os.write(status, MESSAGES)
time.sleep(60)
"""


def run(folder: Path, *argv: str) -> Outcome:
    return asyncio.run(asyncio.wait_for(ProcessSandbox(folder).run(Command(argv)), 50))


def test_a_command_cannot_open_its_reapers_channel(tmp_path: Path) -> None:
    outcome = run(tmp_path, sys.executable, "-c", OPEN)
    assert (outcome.reason, outcome.status, outcome.stderr.text()) == (OutcomeReason.EXITED, 0, "")
    assert len(outcome.stdout.text().splitlines()) == 2, "both were tried and refused"


def test_a_command_that_takes_its_reapers_channel_is_killed(tmp_path: Path) -> None:
    outcome = run(tmp_path, sys.executable, "-c", TAKE)
    # Only root can take a descriptor of a process that is not dumpable.
    expected = OutcomeReason.TAMPERED if os.geteuid() == 0 else OutcomeReason.EXITED
    assert outcome.reason is expected
    wait_until(lambda: not lives(int(outcome.stdout.text())))


@pytest.mark.parametrize(
    "messages",
    [
        "b'garbage ' * 3",
        "os.urandom(24)",
        "STARTED.pack(secret, 1)",
        "STARTED.pack(secret, -1)",
        "STARTED.pack(bytes(16), me)",
        "STARTED.pack(secret, me) + REPORT.pack(bytes(16), 0, False, False, 0.0, 0)",
        "STARTED.pack(secret, me) + REPORT.pack(secret, 0, False, False, float('nan'), 0)",
        "STARTED.pack(secret, me) + REPORT.pack(secret, 0, False, False, 1.0, -1)",
        "STARTED.pack(secret, me) + REPORT.pack(secret, 0, False, False, 1.0, 1) + b'x'",
        "b'x' * 60000",
    ],
)
def test_a_malformed_message_kills_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: str) -> None:
    root = Path(reaper.__file__).parent.parent.parent
    script = tmp_path / "fake.py"
    script.write_text(FAKE_REAPER.replace("ROOT", repr(str(root))).replace("MESSAGES", messages))
    monkeypatch.setattr(reaper, "__file__", str(script))
    outcome = run(tmp_path, "true")
    assert (outcome.reason, outcome.status, outcome.cpu_s) == (OutcomeReason.TAMPERED, -9, 0.0)


def test_orders_are_read_as_they_were_packed() -> None:
    rng = random.Random(0)

    def text() -> str:
        return "".join(rng.choice("aé\ud800\udcff\0😀 =") for _ in range(rng.randrange(6)))

    for _ in range(200):
        limits = {name: rng.randrange(1 << 63) for name in LIMITS if rng.random() < 0.5}
        argv, env = [text() for _ in range(rng.randrange(4))], {text(): text() for _ in range(rng.randrange(4))}
        order = Order(rng.randbytes(16), argv, env, text(), limits, rng.random(), rng.random())
        assert vars(Order.unpack(order.pack())) == vars(order)
