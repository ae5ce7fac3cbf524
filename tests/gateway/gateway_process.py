"""A gateway over a scripted engine as a process of its own: python -m tests.gateway.gateway_process JOURNAL [DELAY_S]

Prints its address; ends on SIGTERM.
"""

import asyncio
import sys

from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.server import GatewayServer
from tests.gateway.dialogue import minimax
from tests.gateway.live import ADMIN_KEY, CONTEXT, Scene, WatchedEngine


async def main(journal: str, delay_s: float = 0.0) -> None:
    format = minimax()
    server = GatewayServer(
        WatchedEngine(format, Scene(format), delay_s=delay_s),
        format,
        GatewayConfig(port=0, journal=journal, shutdown_s=0.3),
        context=CONTEXT,
        admin_key=ADMIN_KEY,
        captures_signals=True,
    )
    print(server.url, flush=True)
    await server.serve()
    print("stopped", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(float, sys.argv[2:])))
