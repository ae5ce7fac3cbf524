"""Sampler and gateway of a run: two servers, each behind a socket that outlives it (forge/child.py)."""

import secrets
import socket
from dataclasses import dataclass

from m2forge.forge.child import Child
from m2forge.forge.config import ForgeConfig
from m2forge.forge.layout import Layout
from m2forge.forge.process import ENGINE_KEY_VARIABLE, MODULE
from m2forge.listener import address, listen
from m2forge.rollout.server_config import ADMIN_KEY_VARIABLE

HOST = "127.0.0.1"
BACKLOG = 2048


@dataclass(frozen=True)
class Server:
    child: Child
    listener: socket.socket
    key: str
    """Of its admin routes."""

    @property
    def url(self) -> str:
        return address(self.listener)


@dataclass(frozen=True)
class Servers:
    sampler: Server
    gateway: Server

    @property
    def num_starts(self) -> int:
        return self.sampler.child.num_starts + self.gateway.child.num_starts

    def close(self) -> None:
        """When both processes have ended."""
        self.sampler.listener.close()
        self.gateway.listener.close()


def make_servers(config: ForgeConfig, layout: Layout) -> Servers:
    """Not started yet."""

    def make(name: str, key_variable: str, *arguments: str, **env: str) -> Server:
        listener, key = listen(HOST, 0, BACKLOG), secrets.token_urlsafe(24)
        command = (MODULE, name, str(layout.run_dir), str(listener.fileno()), *arguments)
        return Server(Child(name, command, {key_variable: key} | env, layout.log, listener), listener, key)

    sampler = make("sampler", ADMIN_KEY_VARIABLE)
    gateway = make("gateway", config.gateway.admin_key_env, sampler.url, **{ENGINE_KEY_VARIABLE: sampler.key})
    return Servers(sampler, gateway)
