"""Host memory of any size and dtype: as ordinary memory, and released with its last tensor."""

import gc
import mmap
import weakref

import pytest
import torch

from m2forge.model.host_memory import HUGE_PAGE_BYTES, empty_host


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (1024, 1031)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8])
def test_it_holds_what_is_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = empty_host(shape, dtype, pinned=False)
    assert (found.shape, found.dtype, found.is_contiguous()) == (shape, dtype, True)
    content = torch.arange(found.numel()).remainder(251).to(dtype).view(shape)
    assert torch.equal(found.copy_(content), content)


def test_large_memory_is_released_with_its_last_view(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[mmap.mmap]] = []

    class Watched(mmap.mmap):
        def __init__(self, *_: object, **__: object) -> None:
            made.append(weakref.ref(self))

    monkeypatch.setattr(mmap, "mmap", Watched)
    part = empty_host((HUGE_PAGE_BYTES,), torch.float32, pinned=False)[5:]
    assert made[0]() is not None
    del part
    gc.collect()
    assert made[0]() is None
