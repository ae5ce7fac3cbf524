"""A limit on the time and the memory that a block of a test takes, so that a file which makes a reader allocate without
bound fails its test instead of the machine."""

import signal
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_LOOK_S = 0.05


@contextmanager
def within(seconds: float = 1.0, megabytes: int = 64) -> Iterator[None]:
    """CPU time; Python's and numpy's allocations, and pyarrow's. Of pyarrow's the largest since the process began."""
    import pyarrow

    pool = pyarrow.default_memory_pool()
    start_s, most = time.process_time(), megabytes << 20
    arrow_before = pool.max_memory() or 0

    def look(number: int, frame: FrameType | None) -> None:
        check(tracemalloc.get_traced_memory()[0])

    def check(num_bytes: int) -> None:
        taken_s = time.process_time() - start_s
        assert num_bytes < most, f"{num_bytes >> 20} MiB, and {megabytes} are the most"
        assert taken_s < seconds, f"{taken_s:.1f} s, and {seconds} are the most"

    handler = signal.signal(signal.SIGALRM, look)
    tracemalloc.start()
    signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
    try:
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)
        check(tracemalloc.get_traced_memory()[1])
        check(max(0, (pool.max_memory() or 0) - arrow_before))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        tracemalloc.stop()
