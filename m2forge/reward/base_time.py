"""T_base of each task: the moving median of the times of its latest passing attempts.

In: the times of attempts that were completed and passed. Out: a time per task that follows the policy: as attempts
become faster, so does what they are measured against. It depends on the order of the times and nothing else, and its
state is JSON: made again from it, it goes on exactly. The tasks whose times came last are kept, `max_tasks` of them: a
run that meets new tasks for ever needs no more memory. Safe to use from several threads.
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
        """`state`: what `state()` gave. If the window has shrunk since, the latest times stay."""
        self._config, self._max_tasks = config, max_tasks
        self._lock = threading.Lock()
        self._times_s: dict[str, deque[float]] = {}
        """By task, those whose times came last at the end."""
        for task_id, times_s in (state or {}).items():
            self.add(task_id, times_s)

    def base_s(self, task_id: str, group_times_s: Sequence[float] = ()) -> float | None:
        """The baseline time of a task; of one that nobody has solved before, that of `group_times_s`, the passing
        attempts which are to be judged; None if there are none of those either."""
        with self._lock:
            times_s = list(self._times_s.get(task_id, ())) or group_times_s
        return max(statistics.median(times_s), self._config.min_base_s) if times_s else None

    def add(self, task_id: str, times_s: Iterable[float]) -> None:
        """Take the times of passing attempts, in the order they are to be forgotten."""
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
