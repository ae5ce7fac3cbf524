"""Compiles C sources on first use with the machine's own compiler, into the user's cache folder.

The file's name holds a digest of everything it is made of. It is built under a temporary name and renamed, so that
processes that start together never load a partial one.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "m2forge"


def find_compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")


def compiled(
    compiler: str,
    sources: Sequence[Path],
    name: str,
    flags: Sequence[str],
    libraries: Sequence[str] = (),
    machine: str = "",
) -> Path:
    """The compiled file of `sources` (headers included), named NAME-DIGEST with the suffix of `name`. `machine`: what
    the flags depend on, where they mean different things on different machines."""
    parts = (*(path.read_bytes() for path in sources), compiler.encode(), " ".join(flags).encode(), machine.encode())
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    stem, suffix = Path(name).stem, Path(name).suffix
    target = cache_folder() / f"{stem}-{key}{suffix}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=target.parent, suffix=suffix)
        os.close(handle)
        try:
            inputs = [str(path) for path in sources if path.suffix == ".c"]
            command = [compiler, *flags, *inputs, "-o", partial, *libraries]
            subprocess.run(command, check=True, capture_output=True, text=True)
            Path(partial).chmod(0o755)  # A program that its user cannot read has restricted rights on its own /proc.
            Path(partial).replace(target)
        finally:
            Path(partial).unlink(missing_ok=True)
    return target
