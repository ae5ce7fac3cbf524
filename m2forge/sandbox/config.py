"""What a command in a sandbox may use. Limits of memory, time, files and processes are the kernel's own.

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
    """Wall clock. A command that takes longer is told to end, and after `grace_s` it is killed."""
    grace_s: Annotated[float, Field(ge=0)] = 0.5
    max_output_bytes: Annotated[int, Field(ge=2)] = 1 << 20
    """Kept of each stream: half from its beginning, half from its end. A worker's line may not be longer."""
    on_flood: Literal["drop", "kill"] = "drop"
    """What more output than that does: the middle is left out, or the command is ended."""
    max_memory_bytes: Count | None = 4 << 30
    """Address space of each process, not of all together."""
    max_cpu_s: Count | None = None
    """Processor time of each process."""
    max_file_bytes: Count | None = None
    """Size of each file that is written."""
    max_processes: Count | None = None
    """Processes of the user who runs this, those outside the sandbox counted too. The superuser has no such limit."""
    inherits: tuple[str, ...] = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
    """Environment variables that are passed on. No other is, so that no key of this process leaks."""
