"""Sampler and gateway of a run: two server processes, each on a listening socket that outlives it (rl/child.py)."""

import socket
from dataclasses import dataclass

from m2forge.key import make_key
from m2forge.listener import address, listen
from m2forge.rl.child import Child
from m2forge.rl.child_main import MODULE
from m2forge.rl.layout import Layout

HOST = "127.0.0.1"
BACKLOG = 2048


@dataclass(frozen=True)
class Server:
    child: Child
    listener: socket.socket
    key: str
    """API key that the sampler requires on every route and the gateway on its admin routes."""

    @property
    def url(self) -> str:
        return address(self.listener)


@dataclass(frozen=True)
class Servers:
    sampler: Server
    gateway: Server

    def close(self) -> None:
        """Close the sockets; call it after both processes have ended."""
        self.sampler.listener.close()
        self.gateway.listener.close()


def make_servers(layout: Layout, host: str = HOST, port: int = 0) -> Servers:
    """Create both servers without starting them. `host` and `port` are the gateway's; port 0 picks a free one."""

    def make(
        name: str, *arguments: str, address: tuple[str, int] = (HOST, 0), engine_keys: tuple[str, ...] = ()
    ) -> Server:
        listener, key = listen(*address, BACKLOG), make_key()
        command = (MODULE, name, str(layout.run_dir), str(listener.fileno()), *arguments)
        return Server(Child(name, command, layout.log, listener, keys=(key, *engine_keys)), listener, key)

    sampler = make("sampler")
    gateway = make("gateway", sampler.url, address=(host, port), engine_keys=(sampler.key,))
    return Servers(sampler, gateway)
