"""The CPU kernels of the folder c/, compiled on first use by the machine's C compiler and kept in the user's cache.

Without a compiler, or with M2FORGE_NATIVE=0, `library()` is None and the torch twins serve. The file is built under a
temporary name and renamed, so that processes starting together never load a half-written one.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path(__file__).with_name("c")
FLAGS = (
    "-O3",
    "-march=native",
    "-fopenmp",
    "-pthread",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-Wl,-Bsymbolic",
)

_log = logging.getLogger(__name__)


@functools.cache
def library() -> ctypes.CDLL | None:
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if os.environ.get("M2FORGE_NATIVE") == "0" or compiler is None:
        return None
    try:
        return ctypes.CDLL(str(_built(compiler)))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:  # no home folder is a RuntimeError
        detail = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        _log.warning("the native CPU kernels cannot be built, the slower torch ones serve: %s", detail)
        return None


def _built(compiler: str) -> Path:
    sources = sorted(FOLDER.glob("*.[ch]"))
    made_of = (*(path.read_bytes() for path in sources), compiler.encode(), " ".join(FLAGS).encode(), _cpu().encode())
    key = hashlib.sha256(b"\0".join(made_of)).hexdigest()[:16]
    target = _cache() / f"native-{key}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=target.parent, suffix=".so")
        os.close(handle)
        try:
            command = [compiler, *FLAGS, *(str(path) for path in sources if path.suffix == ".c"), "-o", partial, "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True)
            Path(partial).replace(target)
        finally:
            Path(partial).unlink(missing_ok=True)
    return target


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "m2forge"


def _cpu() -> str:
    """What `-march=native` depends on, so that a cache shared between machines serves each its own file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = sorted({line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))})
    return "\n".join((platform.machine(), *features))


def serves(*tensors: Tensor) -> bool:
    """Whether the native kernels take these tensors: float32 on a CPU, outside compiled regions, with a compiler."""
    if torch.compiler.is_compiling():
        return False
    return all(x.device.type == "cpu" and x.dtype == torch.float32 for x in tensors) and library() is not None


def head_contiguous(x_NHK: Tensor) -> Tensor:
    """Each token's heads side by side, tokens at any distance: a slice of a joint projection needs no copy."""
    is_so = x_NHK.stride(2) == 1 and x_NHK.stride(1) == x_NHK.shape[2]
    return x_NHK if is_so else x_NHK.contiguous()


def call(function: str, *arguments: Tensor | int | float | None) -> None:
    """Call `function` of the library on torch's threads: tensors as pointers, ints as int64, floats as float32."""
    loaded = library()
    assert loaded is not None
    loaded.use_threads(ctypes.c_int64(torch.get_num_threads()))
    getattr(loaded, function)(*(_converted(x) for x in arguments))


def _converted(x: Tensor | int | float | None) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float:
    if x is None:
        return ctypes.c_void_p(None)
    if isinstance(x, Tensor):
        assert x.device.type == "cpu"
        assert x.dtype in (torch.float32, torch.int32, torch.int64), f"{x.dtype} would be read as something else"
        return ctypes.c_void_p(x.data_ptr())
    return ctypes.c_int64(x) if isinstance(x, int) else ctypes.c_float(x)
