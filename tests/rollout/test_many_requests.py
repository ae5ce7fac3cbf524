"""Many requests leave nothing behind in the memory of the process. (test_core.py checks that all are answered.)"""

import gc
import sys
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from m2forge.errors import RequestError
from m2forge.protocols import Prompt
from m2forge.rollout.core import Core
from tests.rollout.draw import tiny

MAX_CACHE_TOKENS = 20
NUM_TIMES = 4
LEAK_BYTES = 4
"""Share of a request: half a reference."""


def serve_some(core: Core, clock: list[float], random: np.random.Generator, num_prompts: int) -> None:
    """Aborts, deadlines and prompts that are too long at random; every sample that was let in ends exactly once."""
    num_open, num_ended = 0, 0

    def step() -> None:
        nonlocal num_ended
        num_ended += sum(chunk.finish_reason is not None for _, chunk in core.step())
        clock[0] += 1.0

    for number in range(num_prompts):
        prompt = Prompt(
            random.integers(0, 3, int(random.integers(1, 16))).astype(np.int32),
            max_tokens=int(random.integers(1, 9)),
            timeout_s=float(random.integers(1, 20)) if random.random() < 0.3 else None,
        )
        if prompt.ids.size + prompt.max_tokens - 1 > MAX_CACHE_TOKENS:
            with pytest.raises(RequestError):
                core.add(str(number), prompt)
        else:
            core.add(str(number), prompt)
            num_open += 1
        while core.num_waiting > 20:
            step()
        if random.random() < 0.3:
            core.abort(str(random.integers(0, number + 1)))
    while not core.is_idle:
        step()
    core.audit()
    core._scheduler.pool.clear()
    assert num_ended == num_open


def growth(num_prompts: int, num_times: int = NUM_TIMES) -> int:
    """Bytes that `num_prompts` leave behind, every time: the least of several times, as other things come and go."""
    clock, random = [0.0], np.random.default_rng(5)
    core, sizes = tiny(clock, num_blocks=5, max_running=8, step_tokens=40), []
    tracemalloc.start()
    try:
        for _ in range(1 + num_times):
            serve_some(core, clock, random, num_prompts)
            gc.collect()
            # Python keeps up to 4,096 names that attributes were looked up by, and numpy and torch make new ones.
            sys._clear_type_cache()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    return min(after - before for before, after in pairwise(sizes))


def test_some_requests_leave_no_memory_behind() -> None:
    assert growth(60) < 60 * LEAK_BYTES


def test_a_leak_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []
    add = Core.add

    def add_and_keep(core: Core, id: str, prompt: Prompt) -> None:
        add(core, id, prompt)
        kept.append(id + "x")

    monkeypatch.setattr(Core, "add", add_and_keep)
    assert growth(20, num_times=2) > 20 * LEAK_BYTES


@pytest.mark.long
def test_ten_thousand_requests_leave_no_memory_behind() -> None:
    assert growth(10_000 // NUM_TIMES) < LEAK_BYTES * 10_000 // NUM_TIMES
