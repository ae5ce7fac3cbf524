"""T_base of each task: the moving median of the times of its latest passing attempts.

In: the times of attempts that completed and passed. Out: a baseline time per task that follows the policy: as attempts
become faster, so does the baseline. It depends only on the sequence of times, and its state is JSON: an object created
from it continues exactly. Only the `max_tasks` most recently updated tasks are kept, so that memory stays bounded with
endless new tasks. Thread-safe.
"""

import math
import statistics
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from m2forge.errors import RecordError
from m2forge.reward.config import SpeedConfig

MAX_TASKS = 4096


class BaseTimes:
    def __init__(
        self,
        config: SpeedConfig,
        state: Mapping[str, Sequence[float]] | None = None,
        *,
        max_tasks: int = MAX_TASKS,
    ) -> None:
        """`state`: from an earlier `state()`. If the window is smaller now, the latest times are kept."""
        self._config, self._max_tasks = config, max_tasks
        self._lock = threading.Lock()
        self._times_s: dict[str, deque[float]] = {}
        """Times by task, the most recently updated task last."""
        for task_id, times_s in (state or {}).items():
            self.add(task_id, times_s)

    def base_s(self, task_id: str, group_times_s: Sequence[float] = ()) -> float | None:
        """The baseline time of a task; for one without passing attempts so far, the median of `group_times_s`, the
        passing attempts of the current group; None if there are none of those either."""
        with self._lock:
            times_s = list(self._times_s.get(task_id, ())) or group_times_s
        return max(statistics.median(times_s), self._config.min_base_s) if times_s else None

    def add(self, task_id: str, times_s: Iterable[float]) -> None:
        """Add the times of passing attempts; the first are evicted first."""
        times_s = list(times_s)
        for time_s in times_s:
            if not (math.isfinite(time_s) and time_s >= 0):
                raise RecordError(
                    f"baseline time of task {task_id}: expected finite times of at least 0 s, received {time_s!r}"
                )
        if not times_s:
            return
        with self._lock:
            known = self._times_s.pop(task_id, None) or deque(maxlen=self._config.window)
            known.extend(times_s)
            self._times_s[task_id] = known
            while len(self._times_s) > self._max_tasks:
                del self._times_s[next(iter(self._times_s))]

    def state(self) -> dict[str, list[float]]:
        with self._lock:
            return {task_id: list(times_s) for task_id, times_s in self._times_s.items()}
