"""A gateway over a scripted engine as a process of its own, which `tests/forked.py` starts.

Sends its address, then `stopped` when it ends on SIGTERM.
"""

import asyncio
from multiprocessing.connection import Connection
from pathlib import Path

from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.server import GatewayServer
from tests.gateway.dialogue import minimax
from tests.gateway.live import ADMIN_KEY, CONTEXT, Scene, WatchedEngine


def run(output: Connection, journal: Path, delay_s: float, shutdown_s: float) -> None:
    asyncio.run(_serve(output, journal, delay_s, shutdown_s))


async def _serve(output: Connection, journal: Path, delay_s: float, shutdown_s: float) -> None:
    format = minimax()
    server = GatewayServer(
        WatchedEngine(format, Scene(format), delay_s=delay_s),
        format,
        GatewayConfig(port=0, journal=str(journal), shutdown_s=shutdown_s),
        context=CONTEXT,
        admin_key=ADMIN_KEY,
        captures_signals=True,
    )
    output.send(server.url)
    await server.serve()
    output.send("stopped")
