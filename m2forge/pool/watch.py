"""Measures how long values have stayed unchanged, by the monotonic clock of the observing process.

The clocks of machines and databases are adjusted at times, even by an hour. So a lease counts as unrenewed, and a unit
as stuck, only after one process has seen it unchanged for that long; a restarted process starts counting from zero.
"""

import time
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key")


class Watch(Generic[Key]):
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[Key, tuple[object, float]] = {}

    def unchanged_s(self, found: Mapping[Key, object]) -> dict[Key, float]:
        """Seconds since each key was first seen with its current value; keys that are not in `found` are forgotten."""
        now_s = self._clock()
        self._since = {
            key: known if (known := self._since.get(key)) is not None and known[0] == value else (value, now_s)
            for key, value in found.items()
        }
        return {key: now_s - since_s for key, (_, since_s) in self._since.items()}
