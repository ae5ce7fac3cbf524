"""Which arithmetic runs: the precision of kernels and layers, and the C kernels of a CPU.

Sensitive arithmetic (norms, router, rotary angles, softmax) runs in *at least* float32: bfloat16 is raised to float32,
float64 stays float64, so that exactness tests can run the whole network in float64.

The CPU kernels in c/ are compiled on first use by the machine's C compiler and stored in the user's cache folder.
Without a compiler, or with M2FORGE_NATIVE=0, `library()` is None and the torch references serve. M2FORGE_NATIVE_ARCH
sets another `-march` than the machine's own: x86-64-v3 is AVX2, x86-64-v4 AVX-512 without bfloat16.
"""

import ctypes
import functools
import logging
import os
import platform
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from m2forge.compiled import compiled, find_compiler

FOLDER = Path(__file__).with_name("c")
FLAGS = (
    "-O3",
    "-fopenmp",
    "-pthread",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-Wl,-Bsymbolic",
)
_TYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int32, torch.int64)
_log = logging.getLogger(__name__)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def raised(x: Tensor) -> Tensor:
    """`x` in at least float32."""
    return x.to(at_least_float32(x.dtype))


# -- calling a C kernel ------------------------------------------------------------------------------------------------


def serves(*tensors: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the native kernels support these tensors: this dtype, on a CPU, outside compiled regions, with a
    compiler. The bfloat16 kernels have no gradient."""
    if torch.compiler.is_compiling():
        return False
    for x in tensors:
        if x.dtype != dtype or x.device.type != "cpu":
            return False
    return library() is not None and not (dtype == torch.bfloat16 and needs_gradient(*tensors))


def needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def head_contiguous(x_NHK: Tensor) -> Tensor:
    """Each token's heads contiguous, with any token stride: a slice of a fused projection needs no copy."""
    is_so = x_NHK.stride(2) == 1 and x_NHK.stride(1) == x_NHK.shape[2]
    return x_NHK if is_so else x_NHK.contiguous()


def call(function: str, *arguments: Tensor | int | float | None) -> None:
    """Call `function` of the library on torch's threads: tensors as pointers, ints as int64, floats as float32. An
    argument has the same kind in every call."""
    loaded = library()
    assert loaded is not None
    called = getattr(loaded, function)
    if called.argtypes is None:
        loaded.use_threads.argtypes = [ctypes.c_int64]
        called.argtypes = [_kind(x) for x in arguments]
    loaded.use_threads(torch.get_num_threads())
    called(*[_pointer(x) if isinstance(x, Tensor) else x for x in arguments])


def ask(function: str, *arguments: int) -> int:
    """Call `function` of the library with sizes and return its int64 result."""
    loaded = library()
    assert loaded is not None
    asked = getattr(loaded, function)
    asked.restype = ctypes.c_int64
    return int(asked(*(ctypes.c_int64(x) for x in arguments)))


def _kind(x: Tensor | int | float | None) -> type[ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float]:
    if x is None or isinstance(x, Tensor):
        return ctypes.c_void_p
    return ctypes.c_int64 if isinstance(x, int) else ctypes.c_float


def _pointer(x: Tensor) -> int:
    assert x.is_cpu
    assert x.dtype in _TYPES, f"{x.dtype} would be read as something else"
    return x.data_ptr()


# -- compiling them ----------------------------------------------------------------------------------------------------


@functools.cache
def library() -> ctypes.CDLL | None:
    if os.environ.get("M2FORGE_NATIVE") == "0":
        return None
    compiler = find_compiler()
    if compiler is None:
        _log.warning(
            "no C compiler (%s, gcc) on the PATH: slower torch operations replace the native CPU kernels; install gcc, "
            "or set M2FORGE_NATIVE=0 to silence this",
            os.environ.get("CC", "cc"),
        )
        return None
    try:
        return ctypes.CDLL(str(_built(compiler)))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:  # no home folder is a RuntimeError
        detail = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        _log.warning("the native CPU kernels cannot be built, the slower torch ones serve: %s", detail)
        return None


def _built(compiler: str) -> Path:
    flags = (*FLAGS, f"-march={os.environ.get('M2FORGE_NATIVE_ARCH') or 'native'}")
    return compiled(compiler, sorted(FOLDER.glob("*.[ch]")), "native.so", flags, ("-lm",), _cpu())


def _cpu() -> str:
    """The CPU features that `-march=native` depends on, so that machines sharing a cache each get their own file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = sorted({line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))})
    return "\n".join((platform.machine(), *features))
