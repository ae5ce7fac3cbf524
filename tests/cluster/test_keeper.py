"""A keeper's roles outlive the loop that launched them, and a later loop finds them again."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from m2forge.cluster.keeper import SOCKET_FILE, KeptLauncher, KeptRole
from m2forge.cluster.launcher import SOCKET, Role
from m2forge.cluster.process_record import read_histories
from m2forge.errors import EngineError
from tests.rl.ring import running, wait_until_gone

ROOT = Path(__file__).parents[2]
SERVER = Role("server", ("tests.cluster.pid_server", SOCKET), ("first-key",), ("127.0.0.1", 0))
LIMIT_S = 120.0


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def ask(url: str) -> int:
    """The process that serves the URL."""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), LIMIT_S) as connection:
        return int(connection.recv(100))


def play(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), LIMIT_S))


async def launch(launcher: KeptLauncher, role: Role = SERVER) -> tuple[KeptRole, int]:
    """The role, supervised, and the process that answers for it."""
    launched = await launcher.launch(role)
    background.add(asyncio.create_task(launched.supervise()))
    return launched, await asyncio.to_thread(ask, launched.url)


background: set[asyncio.Task[None]] = set()


def leave(launcher: KeptLauncher) -> None:
    """As if the loop were killed: its connection breaks."""
    assert launcher._writer is not None
    launcher._closing.set()
    launcher._writer.transport.abort()


async def kill(pid: int) -> None:
    """Kill a process and wait until it can accept no connection."""
    os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}/exe").exists():
        await asyncio.sleep(0.01)


def keeper_of(folder: Path) -> int:
    return next(pid for pid, words in running() if "m2forge.cluster.keeper" in words and str(folder) in words)


def test_a_later_loop_finds_roles_under_their_urls_and_keys(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)  # a socket's own path holds 107 bytes
    folder.mkdir()

    async def scene() -> None:
        first = KeptLauncher(folder, "same", LIMIT_S)
        launched, pid = await launch(first)
        leave(first)
        second = KeptLauncher(folder, "same", LIMIT_S)
        found, found_pid = await launch(second, Role("server", SERVER.command, ("other-key",), SERVER.address))
        assert (found.url, found.keys, found_pid) == (launched.url, ("first-key",), pid)
        starts = found.num_starts
        await kill(pid)
        assert await asyncio.to_thread(ask, found.url) != pid
        assert found.num_starts != starts, "another process sees that it was restarted"
        await found.stop()
        await second.close()

    play(scene)
    wait_until_gone(folder)
    (history,) = read_histories(folder / "processes")
    assert (history.num_starts, history.is_running) == (2, False)
    assert [status for _, status in history.deaths] == [-signal.SIGKILL]


def test_a_loop_of_other_code_or_configuration_ends_the_roles(tmp_path: Path) -> None:
    async def scene() -> None:
        first = KeptLauncher(tmp_path, "one", LIMIT_S)
        _, pid = await launch(first)
        leave(first)
        second = KeptLauncher(tmp_path, "another", LIMIT_S)
        launched, other = await launch(second, Role("server", SERVER.command, ("other-key",), SERVER.address))
        assert other != pid
        assert launched.keys == ("other-key",)
        assert pid not in dict(running())
        await second.close()

    play(scene)
    wait_until_gone(tmp_path)


def test_without_a_loop_the_keeper_ends_in_time(tmp_path: Path) -> None:
    async def scene() -> None:
        launcher = KeptLauncher(tmp_path, "same", 0.3)
        _, pid = await launch(launcher)
        leave(launcher)
        until_s = time.monotonic() + LIMIT_S
        while (tmp_path / SOCKET_FILE).exists() or pid in dict(running()):
            assert time.monotonic() < until_s, "it waits for a loop for ever"
            await asyncio.sleep(0.05)

    play(scene)
    wait_until_gone(tmp_path)


def test_a_killed_keeper_is_replaced_at_the_same_address(tmp_path: Path) -> None:
    async def scene() -> None:
        launcher = KeptLauncher(tmp_path, "same", LIMIT_S)
        launched, pid = await launch(launcher)
        url, keys = launched.url, launched.keys
        os.kill(keeper_of(tmp_path), signal.SIGKILL)
        until_s, answered = time.monotonic() + LIMIT_S, pid
        while answered == pid:
            assert time.monotonic() < until_s, "its roles are gone"
            await asyncio.sleep(0.05)
            with_error = await asyncio.to_thread(ask_or_none, url)
            answered = pid if with_error is None else with_error
        assert (launched.url, launched.keys) == (url, keys)
        await launcher.close()

    play(scene)
    wait_until_gone(tmp_path)


def ask_or_none(url: str) -> int | None:
    try:
        return ask(url)
    except (OSError, ValueError):
        return None


def test_a_role_that_a_restart_would_not_help_ends_the_run(tmp_path: Path) -> None:
    async def scene() -> None:
        launcher = KeptLauncher(tmp_path, "same", LIMIT_S)
        broken = await launcher.launch(Role("broken", ("tests.cluster.fatal", "no such thing")))
        with pytest.raises(EngineError, match="the broken process: no such thing"):
            await broken.supervise()
        await broken.stop()
        await launcher.close()

    play(scene)
    wait_until_gone(tmp_path)


def test_an_address_that_is_taken_is_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        launcher = KeptLauncher(tmp_path, "same", LIMIT_S)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            role = Role("server", SERVER.command, (), taken.getsockname())
            with pytest.raises(EngineError, match=r"the server process: .* cannot be listened on"):
                await launcher.launch(role)
        await launcher.close()

    play(scene)
    wait_until_gone(tmp_path)
