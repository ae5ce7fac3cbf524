"""A real server in the loop of the test, on any free port."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from m2forge.listener import address
from m2forge.rollout.config import ServerConfig
from m2forge.rollout.server.app import bind, make_server

KEY = "server-key"
KEYED = {"Authorization": f"Bearer {KEY}"}


class PromptServer(uvicorn.Server):
    """Stops when it is told to: the pauses that uvicorn makes then add up over many tests."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stop = asyncio.Event()

    async def main_loop(self) -> None:
        await self.stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        for task in (tasks := list(self.server_state.tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    """The address under which `app` is served."""
    with bind(ServerConfig(port=0)) as listener:
        server = PromptServer(make_server(app).config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield address(listener)
        finally:
            server.stop.set()
            await task
