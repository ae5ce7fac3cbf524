"""Parses Python source in threads.

CPython before 3.13 counts the depth of the tree that it makes in one variable of the process: threads that parse at the
same time raise SystemError for sound source. Here one thread parses at a time.
"""

import ast
import threading

_LOCK = threading.Lock()


def parse_python(source: str) -> ast.Module:
    """The tree of a module; raises SyntaxError or ValueError as `ast.parse` does."""
    with _LOCK:
        return ast.parse(source)
