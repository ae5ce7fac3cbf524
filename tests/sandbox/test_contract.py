"""What holds for the sandboxes of every backend."""

import asyncio
import time
from pathlib import Path

import pytest

from m2forge.errors import DataError, NotFoundError
from m2forge.protocols import Command, OutcomeReason, Sandbox
from m2forge.sandbox.config import BackendName, SandboxConfig
from tests.sandbox.places import require, shell, use

BACKENDS: tuple[BackendName, ...] = ("process", "namespace")


@pytest.fixture(params=BACKENDS)
def config(request: pytest.FixtureRequest) -> SandboxConfig:
    backend: BackendName = request.param
    require(backend)
    return SandboxConfig(backend=backend, timeout_s=30, grace_s=0.1, max_output_bytes=1000)


def test_a_command_has_streams_status_and_workspace(tmp_path: Path, config: SandboxConfig) -> None:
    async def act(sandbox: Sandbox) -> None:
        script = "pwd; cat; echo oh >&2; touch made; exit 3"
        outcome = await sandbox.run(Command(("sh", "-c", script), stdin=b"fed\n"))
        assert outcome.stdout.text() == f"{sandbox.workspace}\nfed\n"
        assert (outcome.stderr.text(), outcome.reason, outcome.status) == ("oh\n", OutcomeReason.EXITED, 3)
        assert outcome.max_memory_bytes > 0
        merged = await sandbox.run(Command(("sh", "-c", "echo 1; echo 2 >&2; echo 3"), merges_stderr=True))
        assert merged.stdout.text() == "1\n2\n3\n"
        assert (await sandbox.run(Command(("test", "-f", "made")))).is_success

    use(config, act, tmp_path)


def test_only_given_variables_enter(tmp_path: Path, config: SandboxConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hidden")
    outcome = shell("env", config, tmp_path, env={"OPENAI_API_KEY": "m2f-1"})
    names = {line.partition("=")[0] for line in outcome.stdout.text().splitlines()}
    allowed = {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "HOME", "PWD", "OPENAI_API_KEY", "SHLVL", "OLDPWD", "_"}
    assert {"PATH", "HOME", "OPENAI_API_KEY"} <= names <= allowed


def test_programs_that_cannot_be_run(tmp_path: Path, config: SandboxConfig) -> None:
    async def act(sandbox: Sandbox) -> None:
        outcome = await sandbox.run(Command(("no-such-program",)))
        assert (outcome.reason, outcome.status) == (OutcomeReason.EXITED, 127)
        assert "no-such-program: cannot be run: No such file" in outcome.stderr.text()
        await sandbox.write("text", b"no program")
        assert (await sandbox.run(Command(("./text",)))).status == 126

    use(config, act, tmp_path)


def test_time_signals_and_floods(tmp_path: Path, config: SandboxConfig) -> None:
    started_s = time.monotonic()
    outcome = shell("echo before; sleep 60", config, tmp_path, timeout_s=1.0)
    assert (outcome.reason, outcome.status, outcome.stdout.text()) == (OutcomeReason.TIMEOUT, -15, "before\n")
    outcome = shell("trap '' TERM; while :; do sleep 0.05; done", config, tmp_path, timeout_s=1.0)
    assert (outcome.reason, outcome.status) == (OutcomeReason.TIMEOUT, -9)
    assert time.monotonic() - started_s < 50
    outcome = shell("kill -SEGV $$", config, tmp_path)
    assert (outcome.reason, outcome.status) == (OutcomeReason.SIGNALLED, -11)
    outcome = shell("head -c 3000000 /dev/zero; echo end", config, tmp_path)
    assert outcome.is_success
    assert (outcome.stdout.num_bytes, outcome.stdout.tail[-4:]) == (3_000_004, b"end\n")
    outcome = shell("yes", config.model_copy(update={"on_flood": "kill"}), tmp_path)
    assert outcome.reason is OutcomeReason.FLOODED


def test_a_worker_is_fed_and_read(tmp_path: Path, config: SandboxConfig) -> None:
    async def act(sandbox: Sandbox) -> None:
        worker = await sandbox.start(Command(("sh", "-c", "while read line; do echo got $line; done; echo bye")))
        for number in range(5):
            await worker.send(f"{number}\n".encode())
            assert await worker.receive_line(10) == f"got {number}\n".encode()
        with pytest.raises(TimeoutError):
            await worker.receive_line(0.05)
        assert (await worker.stop()).reason is OutcomeReason.KILLED
        endless = await sandbox.start(Command(("sh", "-c", "exec yes")))
        await asyncio.sleep(0.05)
        assert await endless.receive_line(10) == b"y\n"
        assert len((await endless.stop()).stdout.head) < 1 << 20

    use(config, act, tmp_path)


def test_cancelling_kills_the_command(tmp_path: Path, config: SandboxConfig) -> None:
    async def act(sandbox: Sandbox) -> None:
        task = asyncio.create_task(sandbox.run(Command(("sh", "-c", "touch up; sleep 47 & sleep 47"))))
        while not (await sandbox.run(Command(("test", "-f", "up")))).is_success:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        script = "for p in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $p; echo; done"
        lines = (await sandbox.run(Command(("sh", "-c", script)))).stdout.text()
        assert "sleep 47" not in lines

    use(config, act, tmp_path)


def test_all_processes_can_be_killed(tmp_path: Path, config: SandboxConfig) -> None:
    async def act(sandbox: Sandbox) -> tuple[int, int, bool, bool]:
        await sandbox.run(Command(("sh", "-c", "setsid sleep 60 & sleep 61 & true"), stdin=b""))
        worker = await sandbox.start(Command(("cat",)))
        first = await sandbox.kill_all()
        again = await sandbox.kill_all()
        alive = await sandbox.run(Command(("true",)))
        return first, again, (await worker.wait()).is_success, alive.is_success

    num_left = 0 if config.backend == "process" else 2
    assert use(config, act, tmp_path) == (1 + num_left, 0, False, True)


def test_files_are_read_and_written_in_the_workspace_only(tmp_path: Path, config: SandboxConfig) -> None:
    async def act(sandbox: Sandbox) -> None:
        await sandbox.write("a/b.txt", b"hello")
        assert await sandbox.read("a/b.txt", 5) == b"hello"
        assert await sandbox.read(f"{sandbox.workspace}/a/b.txt", 5) == b"hello"
        with pytest.raises(DataError, match="larger than 4"):
            await sandbox.read("a/b.txt", 4)
        await sandbox.run(Command(("sh", "-c", "chmod 755 a/b.txt; ln -s /etc/passwd out; ln -s b.txt a/in")))
        await sandbox.write("a/b.txt", b"replaced")
        outcome = await sandbox.run(Command(("sh", "-c", "cat a/b.txt; test -x a/b.txt")))
        assert (outcome.stdout.text(), outcome.status) == ("replaced", 0)
        assert await sandbox.read("a/in", 100) == b"replaced"
        for path in ("missing", "a", "../x", "/etc/passwd", "out", "."):
            with pytest.raises(NotFoundError):
                await sandbox.read(path, 100_000)
        for path in ("../x", "/etc/x", "."):
            with pytest.raises(NotFoundError):
                await sandbox.write(path, b"")

    use(config, act, tmp_path)


def test_folders_go_in_and_out(tmp_path: Path, config: SandboxConfig) -> None:
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep" / "er" / "file").write_bytes(bytes(range(256)) * 2000)
    (source / "run").write_text("#!/bin/sh\necho ran\n")
    (source / "run").chmod(0o755)
    (source / "link").symlink_to("deep/er/file")
    (source / "twin").hardlink_to(source / "run")

    async def act(sandbox: Sandbox) -> tuple[str, ...]:
        await sandbox.upload(source, "in")
        assert (await sandbox.run(Command(("in/run",)))).stdout.text() == "ran\n"
        await sandbox.run(Command(("sh", "-c", "ln -s /etc in/away; ln -s ../../.. in/deep/up; echo new > in/added")))
        # Each part of the second looks as if it stayed inside, and goes through the first.
        await sandbox.run(Command(("sh", "-c", "ln -s . in/here; ln -s here/here/../.. in/through")))
        await sandbox.run(Command(("sh", "-c", "ln -s ../run in/deep/back")))
        with pytest.raises(DataError, match="more than 1000 bytes"):
            await sandbox.download("in", tmp_path / "small", 1000)
        with pytest.raises(NotFoundError):
            await sandbox.download("nowhere", tmp_path / "none", 1000)
        return await sandbox.download("in", tmp_path / "dest", 1 << 20)

    left_out = use(config, act, tmp_path / "work")
    dest = tmp_path / "dest"
    assert sorted(left_out) == ["away", "deep/up", "through"]
    assert (dest / "deep" / "back").read_text() == "#!/bin/sh\necho ran\n"
    assert (dest / "deep" / "er" / "file").read_bytes() == (source / "deep" / "er" / "file").read_bytes()
    assert (dest / "link").readlink() == Path("deep/er/file")
    assert (dest / "run").samefile(dest / "twin")
    assert ((dest / "run").stat().st_mode & 0o777, (dest / "added").read_text()) == (0o755, "new\n")
    assert (dest / "run").stat().st_mtime_ns == (source / "run").stat().st_mtime_ns


def test_forks_start_from_the_snapshot_and_part(tmp_path: Path, config: SandboxConfig) -> None:
    async def act(sandbox: Sandbox) -> None:
        await sandbox.run(Command(("sh", "-c", "echo one > a; mkdir d; echo two > d/b")))
        snapshot = await sandbox.snapshot()
        await sandbox.run(Command(("sh", "-c", "echo changed > a; rm -r d")))
        forks = [await sandbox.fork(snapshot) for _ in range(3)]
        try:
            for number, fork in enumerate(forks):
                outcome = await fork.run(Command(("sh", "-c", f"cat a d/b; echo {number} > a; rm d/b")))
                assert outcome.stdout.text() == "one\ntwo\n"
            assert [await fork.read("a", 10) for fork in forks] == [b"0\n", b"1\n", b"2\n"]
            assert await sandbox.read("a", 10) == b"changed\n"
        finally:
            for fork in forks:
                await fork.close()
            await snapshot.remove()

    use(config, act, tmp_path / "work")
