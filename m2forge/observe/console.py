"""The one console on standard error. Log lines and progress bars share it, so that neither overwrites the other."""

from functools import cache

from rich.console import Console


@cache
def stderr_console() -> Console:
    return Console(stderr=True)
