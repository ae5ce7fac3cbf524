"""Python source: parsed in threads, and the digest of this package's own.

CPython before 3.13 counts the depth of the tree that it makes in one variable of the process: threads that parse at the
same time raise SystemError for sound source. Here one thread parses at a time.
"""

import ast
import hashlib
import threading
from pathlib import Path

import m2forge

_LOCK = threading.Lock()


def parse_python(source: str) -> ast.Module:
    """The tree of a module; raises SyntaxError or ValueError as `ast.parse` does."""
    with _LOCK:
        return ast.parse(source)


def code_digest(*texts: str) -> str:
    """Digest of the package's source and of `texts`."""
    digest = hashlib.sha256()
    root = Path(m2forge.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    for text in texts:
        digest.update(b"\0" + text.encode())
    return digest.hexdigest()
