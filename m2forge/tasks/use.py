"""How much of a limit of time a process has used: the time that it spent on a processor, and asleep.

A process that wants a processor and gets none, because the machine is loaded, uses nothing of its limit meanwhile; nor
does one that waits for a disk, or that was stopped. So a verdict does not depend on what else the machine does.

    own_s += on a processor                       where it is runnable, stopped, or waits for a disk
    own_s += the time since the last look         where it is asleep

The state is looked at every `period_s`. A look that comes late, because the looking process was starved itself, counts
as at most two periods of sleep.
"""

import os
import time
from pathlib import Path

MAX_WAIT = 5
"""A process that did not use up its limit in this many times its length, by the wall clock, is starved."""
NUM_LOOKS, MAX_PERIOD_S = 50, 0.1
"""Looks within a limit, and the longest time between two."""

_ASLEEP = "S"
_STATE, _USER, _SYSTEM = 0, 11, 12
"""Fields of /proc/PID/stat behind the process's name."""
_TICKS = os.sysconf("SC_CLK_TCK")


class Use:
    """Of one request, from now on."""

    def __init__(self, pid: int, limit_s: float) -> None:
        self._stat, self._limit_s = Path(f"/proc/{pid}/stat"), limit_s
        self.period_s = min(MAX_PERIOD_S, limit_s / NUM_LOOKS)
        self._started_s = self._seen_s = time.monotonic()
        self._first_cpu_s = self._seen_cpu_s = self._look()[1]
        self.own_s = 0.0

    @property
    def is_over(self) -> bool:
        return self.own_s >= self._limit_s

    @property
    def is_starved(self) -> bool:
        return not self.is_over and self.passed_s >= MAX_WAIT * self._limit_s

    @property
    def passed_s(self) -> float:
        return self._seen_s - self._started_s

    @property
    def cpu_s(self) -> float:
        return self._seen_cpu_s - self._first_cpu_s

    def note(self) -> None:
        """Looks again, if a period has passed: a look takes longer than most requests."""
        now_s = time.monotonic()
        if now_s - self._seen_s < self.period_s:
            return
        state, cpu_s = self._look()
        since_s, on_cpu_s = now_s - self._seen_s, cpu_s - self._seen_cpu_s
        self.own_s += max(on_cpu_s, min(since_s, 2 * self.period_s)) if state == _ASLEEP else on_cpu_s
        self._seen_s, self._seen_cpu_s = now_s, cpu_s

    def _look(self) -> tuple[str, float]:
        """State and seconds on a processor, over all threads."""
        fields = self._stat.read_text().rpartition(")")[2].split()
        return fields[_STATE], (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS
