"""How a run starts its processes: a role in, a supervised process out, which is restarted whenever it dies.

    launched = await launcher.launch(role)     places it: its node and its URL are known
    await launched.supervise()                 runs it until it is stopped or its work is complete
    await launched.stop()

A role is a module that runs as `python -m` would run it. The launcher decides where: `local` runs all roles on this
machine, `ray_launcher` on the nodes of a Ray cluster. A server's listening socket belongs to the launcher, so it
outlives the server: a client that connects during a restart waits instead of being refused, and an agent whose client
library retries broken connections continues.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from m2forge.errors import M2ForgeError

SOCKET = "{socket}"
"""Argument that the launcher replaces by the file descriptor of the role's listening socket."""
NODE_ADDRESS = "M2FORGE_NODE_ADDRESS"
"""Environment variable with the address at which other nodes reach this one, where a launcher uses several."""
FATAL_STATUS = 78
"""Exit status of a failure that every restart would repeat: the run ends with the last line that the process
printed."""


@dataclass(frozen=True, slots=True)
class Role:
    name: str
    """Such as `gateway`; its log has this name too."""
    command: tuple[str, ...]
    """Module and arguments."""
    keys: tuple[str, ...] = field(default=(), repr=False)
    """The lines of its standard input, a pipe, because agents can read its arguments and environment."""
    address: tuple[str, int] | None = None
    """Host and port that it serves, port 0 for any that is free; None: it serves nothing."""


class Launched(Protocol):
    name: str
    keys: tuple[str, ...]

    @property
    def url(self) -> str:
        """Empty if it serves nothing. It changes if the role moves to another node."""
        ...

    @property
    def num_starts(self) -> int:
        """A number that changes whenever its process starts, before the process can answer anything."""
        ...

    async def supervise(self) -> None:
        """Run it, restarting it until it is stopped or exits with 0 and its work is complete. Every other exit counts
        as a death: a server that receives SIGTERM also exits with 0. Raises if restarts do not help."""
        ...

    async def stop(self) -> None: ...


class Launcher(Protocol):
    async def launch(self, role: Role, is_done: Callable[[], bool] = lambda: False) -> Launched:
        """`is_done`: whether its work is complete once it exits with 0; never true for a server."""
        ...

    async def close(self) -> None:
        """Close the listening sockets; call it after all processes have ended."""
        ...


def end_with_error(error: M2ForgeError) -> NoReturn:
    """End this process and the run; the error becomes the last line of its log."""
    print(" ".join(str(error).split()), file=sys.stderr, flush=True)
    sys.exit(FATAL_STATUS)
