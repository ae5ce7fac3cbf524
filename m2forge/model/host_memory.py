"""Host memory for whole versions of a policy's weights."""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 1 << 21


def empty_host(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Uninitialised host memory: pinned, from which a GPU copies fastest, or in huge pages, where the system has them.
    Fresh memory in small pages costs more than twice the time of the copy into it."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if pinned or num_bytes < HUGE_PAGE_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=pinned)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
