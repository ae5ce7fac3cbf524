"""Sampler and gateway of a run: two server processes, each on a listening socket that outlives it."""

from dataclasses import dataclass

from m2forge.cluster.launcher import SOCKET, Launched, Launcher, Role
from m2forge.key import make_key
from m2forge.rl.child_main import MODULE
from m2forge.rl.layout import Layout

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Server:
    child: Launched

    @property
    def url(self) -> str:
        return self.child.url

    @property
    def key(self) -> str:
        """API key that the sampler requires on every route and the gateway on its admin routes."""
        return self.child.keys[0]


@dataclass(frozen=True)
class Servers:
    sampler: Server
    gateway: Server


async def make_servers(launcher: Launcher, layout: Layout, host: str = HOST, port: int = 0) -> Servers:
    """Create both servers without starting them. `host` and `port` are the gateway's; port 0 picks a free one."""

    async def make(
        name: str, *arguments: str, address: tuple[str, int] = (HOST, 0), engine_keys: tuple[str, ...] = ()
    ) -> Server:
        command = (MODULE, name, str(layout.run_dir), SOCKET, *arguments)
        return Server(await launcher.launch(Role(name, command, (make_key(), *engine_keys), address)))

    sampler = await make("sampler")
    gateway = await make("gateway", sampler.url, address=(host, port), engine_keys=(sampler.key,))
    return Servers(sampler, gateway)
