"""Log lines on standard error, set up once by the command line.

Every module logs through `logging.getLogger(__name__)`. As a library, m2forge leaves handlers to its caller.

A slow path that a computation takes at every step warns once: `warn_once`.
"""

import functools
import logging
import os

from rich.logging import RichHandler

from m2forge.errors import ConfigError
from m2forge.observe.console import stderr_console

LEVEL_VARIABLE = "M2FORGE_LOG"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def set_up_logging() -> None:
    """Send m2forge's log to standard error at the level named by M2FORGE_LOG (default INFO)."""
    level = os.environ.get(LEVEL_VARIABLE, "INFO").upper()
    if level not in LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE}={level}: no such log level; use one of {', '.join(LEVELS)}")
    logger = logging.getLogger("m2forge")
    logger.setLevel(level)
    if not logger.handlers:
        handler = RichHandler(console=stderr_console(), show_path=False, rich_tracebacks=True, log_time_format="[%X]")
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)


@functools.cache
def warn_once(logger: logging.Logger, text: str) -> None:
    """Log `text` as a warning, the first time in this process; `warn_once.cache_clear()` starts over."""
    logger.warning("%s", text)
