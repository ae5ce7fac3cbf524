"""The shared console on standard error: log lines and progress bars use it, so that neither overwrites the other."""

from functools import cache

from rich.console import Console


@cache
def stderr_console() -> Console:
    return Console(stderr=True)
