"""Resource limits of a command in a sandbox. The kernel enforces those on memory, CPU time, files and processes.

[sandbox]
timeout_s = 60
max_memory_bytes = 2147483648
"""

from typing import Annotated, Literal

from pydantic import Field

from m2forge.config import Config

Count = Annotated[int, Field(gt=0, lt=1 << 63)]
Seconds = Annotated[float, Field(gt=0)]


class SandboxConfig(Config):
    timeout_s: Seconds = 600.0
    """Wall-clock limit; a command that exceeds it gets SIGTERM, and SIGKILL after `grace_s`."""
    grace_s: Annotated[float, Field(ge=0)] = 0.5
    max_output_bytes: Annotated[int, Field(ge=2)] = 1 << 20
    """Bytes stored of each stream, half from its beginning and half from its end; also the limit of a worker's line."""
    on_flood: Literal["drop", "kill"] = "drop"
    """How to treat output over that limit: drop its middle, or kill the command."""
    max_memory_bytes: Count | None = 4 << 30
    """Address space limit of each process, not of all together."""
    max_cpu_s: Count | None = None
    """CPU time limit of each process."""
    max_file_bytes: Count | None = None
    """Size limit of each written file."""
    max_processes: Count | None = None
    """Limit on the number of processes of this user, including those outside the sandbox; it does not apply to root."""
    inherits: tuple[str, ...] = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
    """Environment variables that the command inherits; no other is passed, so that no key of this process leaks."""
