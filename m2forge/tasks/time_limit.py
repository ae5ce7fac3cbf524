"""Measures how much of a time limit a process has used: its CPU time plus the time it slept.

A process that is runnable but gets no CPU on a loaded machine uses nothing of its limit meanwhile; nor does one that
waits for a disk or is stopped. So a verdict does not depend on the load of the machine.

    used_s += CPU time                            if it is runnable, stopped, or waits for a disk
    used_s += time since the last sample          if it is asleep

The state is sampled every `period_s`. A late sample, because the observing process was starved itself, counts as at
most two periods of sleep.
"""

import os
import time
from pathlib import Path

MAX_WAIT = 5
"""A process that has not used up its limit after this many times the limit of wall-clock time counts as starved."""
NUM_LOOKS, MAX_PERIOD_S = 50, 0.1
"""Number of samples within a limit, and the longest time between two."""

_ASLEEP = "S"
_STATE, _USER, _SYSTEM = 0, 11, 12
"""Indices of fields of /proc/PID/stat after the process's name."""
_TICKS = os.sysconf("SC_CLK_TCK")


class Use:
    """Time that a process uses for one request, from the construction on."""

    def __init__(self, pid: int, limit_s: float) -> None:
        self._stat, self._limit_s = Path(f"/proc/{pid}/stat"), limit_s
        self.period_s = min(MAX_PERIOD_S, limit_s / NUM_LOOKS)
        self._started_s = self._seen_s = time.monotonic()
        self._first_cpu_s = self._seen_cpu_s = self._look()[1]
        self.used_s = 0.0

    @property
    def is_over(self) -> bool:
        return self.used_s >= self._limit_s

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
        """Sample the state if a period has passed; a sample takes longer than most requests."""
        now_s = time.monotonic()
        if now_s - self._seen_s < self.period_s:
            return
        state, cpu_s = self._look()
        since_s, on_cpu_s = now_s - self._seen_s, cpu_s - self._seen_cpu_s
        self.used_s += max(on_cpu_s, min(since_s, 2 * self.period_s)) if state == _ASLEEP else on_cpu_s
        self._seen_s, self._seen_cpu_s = now_s, cpu_s

    def _look(self) -> tuple[str, float]:
        """State and CPU seconds over all threads."""
        fields = self._stat.read_text().rpartition(")")[2].split()
        return fields[_STATE], (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS
