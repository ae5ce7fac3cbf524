"""Commands run as told, with the environment they are given and within their limits; workers are fed and read."""

import asyncio
import sys
import time
from pathlib import Path

import pytest

from m2forge.errors import DataError, NotFoundError, RecordError
from m2forge.protocols import Command, Outcome, OutcomeReason, Sandbox
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.process import ProcessSandbox


def run(folder: Path, *argv: str, config: SandboxConfig | None = None, **options: object) -> Outcome:
    sandbox: Sandbox = ProcessSandbox(folder, config)
    return asyncio.run(sandbox.run(Command(argv, **options)))  # type: ignore[arg-type]  # options of any field


def sh(folder: Path, script: str, config: SandboxConfig | None = None, **options: object) -> Outcome:
    return run(folder, "sh", "-c", script, config=config, **options)


def test_a_command_runs_in_its_workspace(tmp_path: Path) -> None:
    outcome = sh(tmp_path / "work", "pwd; echo $HOME; cat; echo oh >&2; touch made; exit 3", stdin=b"fed\n")
    place = str((tmp_path / "work").resolve())
    assert outcome.stdout.text() == f"{place}\n{place}\nfed\n"
    assert outcome.stderr.text() == "oh\n"
    assert (outcome.reason, outcome.status, outcome.is_success) == (OutcomeReason.EXITED, 3, False)
    assert (tmp_path / "work" / "made").exists()
    assert outcome.started_s <= outcome.finished_s
    assert outcome.max_memory_bytes > 0


def test_streams_can_be_merged_in_their_order(tmp_path: Path) -> None:
    outcome = sh(tmp_path, "echo 1; echo 2 >&2; echo 3", merges_stderr=True)
    assert (outcome.stdout.text(), outcome.stderr.text()) == ("1\n2\n3\n", "")


def test_nothing_is_inherited_that_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hidden")
    monkeypatch.setenv("LANG", "C.UTF-8")
    # The environment of the process above it is readable too.
    outcome = sh(tmp_path, "env; tr '\\0' '\\n' < /proc/$PPID/environ", env={"OPENAI_API_KEY": "m2f-1"})
    names = {line.split("=")[0] for line in outcome.stdout.text().splitlines()}
    assert names >= {"PATH", "LANG", "HOME", "OPENAI_API_KEY"}
    assert names <= {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "HOME", "PWD", "OPENAI_API_KEY", "LD_LIBRARY_PATH"} | {
        "SHLVL",
        "OLDPWD",
        "_",
    }
    outcome = sh(tmp_path, "echo $SECRET_KEY", config=SandboxConfig(backend="process", inherits=("SECRET_KEY", "PATH")))
    assert outcome.stdout.text() == "hidden\n"


def test_secrets_of_a_command_are_not_shown(tmp_path: Path) -> None:
    assert "m2f-1" not in repr(Command(("x",), {"KEY": "m2f-1"}))
    sandbox = ProcessSandbox(tmp_path)

    async def command_lines() -> str:
        worker = await sandbox.start(Command(("sleep", "60"), {"KEY": "m2f-secret"}))
        await asyncio.sleep(0.1)
        lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
        await worker.stop()
        return b"".join(lines).decode(errors="replace")

    assert "m2f-secret" not in asyncio.run(command_lines())


def test_a_program_that_cannot_be_run_exits_as_in_a_shell(tmp_path: Path) -> None:
    outcome = run(tmp_path, "no-such-program")
    assert (outcome.reason, outcome.status) == (OutcomeReason.EXITED, 127)
    assert "no-such-program: cannot be run: No such file" in outcome.stderr.text()
    (tmp_path / "text").write_text("no program")
    assert run(tmp_path, "./text").status == 126
    for argv in ((), ("",), ("a\0b",)):
        with pytest.raises(RecordError):
            Command(argv)


def test_a_signal_is_told_apart_from_an_exit(tmp_path: Path) -> None:
    outcome = sh(tmp_path, "kill -SEGV $$")
    assert (outcome.reason, outcome.status) == (OutcomeReason.SIGNALLED, -11)


def test_time_runs_out(tmp_path: Path) -> None:
    started_s = time.monotonic()
    outcome = sh(tmp_path, "echo before; sleep 60", timeout_s=1.0)
    assert (outcome.reason, outcome.status) == (OutcomeReason.TIMEOUT, -15)
    assert outcome.stdout.text() == "before\n"
    assert time.monotonic() - started_s < 50


def test_a_command_may_tidy_up_when_its_time_is_over(tmp_path: Path) -> None:
    outcome = sh(tmp_path, "trap 'echo tidy; exit 0' TERM; sleep 60 & wait", timeout_s=1.0)
    assert (outcome.reason, outcome.stdout.text()) == (OutcomeReason.TIMEOUT, "tidy\n")


def test_a_command_that_ignores_being_told_is_killed(tmp_path: Path) -> None:
    config = SandboxConfig(backend="process", timeout_s=1.0, grace_s=0.1)
    outcome = sh(tmp_path, "trap '' TERM; while :; do sleep 0.05; done", config=config)
    assert (outcome.reason, outcome.status) == (OutcomeReason.TIMEOUT, -9)


def test_a_flood_is_counted_and_does_not_stop_the_command(tmp_path: Path) -> None:
    config = SandboxConfig(backend="process", max_output_bytes=1000)
    outcome = sh(tmp_path, "head -c 30000000 /dev/zero; echo; echo end; echo done >&2", config=config)
    assert outcome.is_success
    assert outcome.stdout.num_bytes == 30_000_005
    assert (len(outcome.stdout.head), len(outcome.stdout.tail)) == (500, 500)
    assert outcome.stdout.tail.endswith(b"\nend\n")
    assert outcome.stderr.text() == "done\n"


def test_a_flood_ends_the_command_where_so_configured(tmp_path: Path) -> None:
    config = SandboxConfig(backend="process", max_output_bytes=1000, on_flood="kill", timeout_s=20)
    outcome = sh(tmp_path, "yes", config=config)
    assert outcome.reason is OutcomeReason.FLOODED
    assert len(outcome.stdout.head) == 500


@pytest.mark.slow
def test_limits_are_the_kernels(tmp_path: Path) -> None:
    code = "import sys\ntry:\n    b = bytearray(300 << 20)\nexcept MemoryError:\n    sys.exit(7)"
    assert (
        run(
            tmp_path, sys.executable, "-c", code, config=SandboxConfig(backend="process", max_memory_bytes=200 << 20)
        ).status
        == 7
    )
    assert (
        run(tmp_path, sys.executable, "-c", code, config=SandboxConfig(backend="process", max_memory_bytes=None)).status
        == 0
    )
    outcome = sh(
        tmp_path, "head -c 100000 /dev/zero > big", config=SandboxConfig(backend="process", max_file_bytes=4096)
    )
    assert not outcome.is_success
    assert (tmp_path / "big").stat().st_size == 4096
    outcome = sh(tmp_path, "while :; do :; done", config=SandboxConfig(backend="process", max_cpu_s=1, timeout_s=30))
    assert outcome.reason is OutcomeReason.SIGNALLED
    # The kernel counts by clock ticks for the limit and exactly for what it reports: on a busy machine a bare
    # `ulimit -t 1` ends a loop that took 0.73 s.
    assert 0.5 < outcome.cpu_s < 3


def test_a_worker_is_fed_and_read_line_by_line(tmp_path: Path) -> None:
    async def talk() -> Outcome:
        sandbox = ProcessSandbox(tmp_path)
        code = (
            "import sys\nfor line in iter(sys.stdin.readline, 'end\\n'):\n"
            "    print(line.strip()[::-1], flush=True)\nprint('bye', end='')"
        )
        worker = await sandbox.start(Command((sys.executable, "-c", code)))
        for number in range(5):
            await worker.send(f"abc{number}\n".encode())
            assert await worker.receive_line(10) == f"{number}cba\n".encode()
        with pytest.raises(TimeoutError):
            await worker.receive_line(0.05)
        await worker.send(b"late\n")
        assert await worker.receive_line(10) == b"etal\n"
        await worker.send(b"end\n")
        assert await worker.receive_line(10) == b"bye"
        assert await worker.receive_line(10) == b""
        await worker.send(b"nobody hears this")
        return await worker.wait()

    assert asyncio.run(talk()).is_success


@pytest.mark.slow
def test_a_worker_that_nobody_reads_costs_no_memory(tmp_path: Path) -> None:
    async def talk() -> None:
        sandbox = ProcessSandbox(tmp_path, SandboxConfig(backend="process", max_output_bytes=1000))
        worker = await sandbox.start(Command(("yes",)))
        await asyncio.sleep(0.3)
        assert len(worker._streams._lines) < 300_000
        assert [await worker.receive_line(30) for _ in range(10_000)] == [b"y\n"] * 10_000
        outcome = await worker.stop()
        assert outcome.reason is OutcomeReason.KILLED
        endless = await sandbox.start(Command(("head", "-c", "100000000", "/dev/zero")))
        with pytest.raises(DataError, match="exceeds 1000 bytes"):
            await endless.receive_line(30)
        await sandbox.close()

    asyncio.run(talk())


def test_files_are_those_of_the_workspace(tmp_path: Path) -> None:
    async def use() -> None:
        sandbox = ProcessSandbox(tmp_path / "work")
        await sandbox.write("a/b.txt", b"hello")
        assert await sandbox.read("a/b.txt", 5) == b"hello"
        assert (await sandbox.run(Command(("cat", "a/b.txt")))).stdout.head == b"hello"
        with pytest.raises(DataError, match="larger than 4 bytes"):
            await sandbox.read("a/b.txt", 4)
        (tmp_path / "secret").write_text("x")
        (tmp_path / "work" / "link").symlink_to(tmp_path / "secret")
        for path in ("../secret", str(tmp_path / "secret"), "link", "a", "none", "."):
            with pytest.raises(NotFoundError):
                await sandbox.read(path, 100)
        for path in ("../secret", "link", ".", "/etc/m2forge"):
            with pytest.raises(NotFoundError):
                await sandbox.write(path, b"")

    asyncio.run(use())
    assert (tmp_path / "secret").read_text() == "x"


def test_many_commands_run_at_once(tmp_path: Path) -> None:
    async def run_all() -> list[str]:
        sandbox = ProcessSandbox(tmp_path)
        outcomes = await asyncio.gather(*(sandbox.run(Command(("echo", str(number)))) for number in range(20)))
        return [outcome.stdout.text() for outcome in outcomes]

    assert asyncio.run(run_all()) == [f"{number}\n" for number in range(20)]
