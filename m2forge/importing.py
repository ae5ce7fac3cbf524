"""Imports of large libraries without garbage collection."""

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Imports make a million objects and no garbage: without collections they take an eighth less time, and later
    collections leave these objects out. Where every module is imported already, collections go on as before."""
    num_before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_before:
            gc.freeze()
        gc.enable()
