"""A server that dies is started again, and nobody who connects meanwhile is refused."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from m2forge.cluster.launcher import SOCKET, Role
from m2forge.cluster.local import LocalLauncher

ROOT = Path(__file__).parents[2]
NUM_KILLS, TIMEOUT_S = 2, 30.0


def test_connections_to_a_dead_server_are_answered_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    async def ask(port: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        response = await reader.read()
        writer.close()
        return int(response)

    async def main() -> list[int]:
        launcher = LocalLauncher(tmp_path)
        child = await launcher.launch(Role("server", ("tests.cluster.pid_server", SOCKET), address=("127.0.0.1", 0)))
        keeping, port = asyncio.create_task(child.supervise()), int(child.url.rpartition(":")[2])
        pids = [await ask(port)]
        for _ in range(NUM_KILLS):
            os.kill(pids[-1], signal.SIGKILL)
            while Path(f"/proc/{pids[-1]}/exe").exists():
                await asyncio.sleep(0.01)
            pids += await asyncio.gather(ask(port), ask(port))
        await child.stop()
        await keeping
        await launcher.close()
        assert child.num_starts == 1 + NUM_KILLS
        return pids

    pids = asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    assert len(set(pids)) == 1 + NUM_KILLS
    assert pids[1::2] == pids[2::2]
