"""Chooses among tasks without levels by their measured pass rates: pass rates of groups in, the next task out.

    p ← p + (pass rate − p) / min(n, WINDOW)          after the n-th group of attempts at the task
    weight = max(MIN_WEIGHT, 4·p·(1 − p))             1 before the first group

A group whose attempts all pass, or all fail, has no advantages, so a task is drawn in proportion to the variance of an
attempt's success, which is what a group can learn from. `MIN_WEIGHT` lets tasks return that were too hard, or have been
forgotten. The next task depends on the sequence of pass rates and on the generator; the state is JSON.
"""

import random
from collections.abc import Mapping, Sequence

from m2forge.errors import RecordError
from m2forge.records import JsonValue

WINDOW = 4
"""Number of groups over which the mean of pass rates extends."""
MIN_WEIGHT = 0.05


class PassRates:
    def __init__(self, ids: Sequence[str]) -> None:
        self._ids = tuple(ids)
        self._rates: dict[str, tuple[int, float]] = {}
        """Number of groups and mean pass rate, by task."""

    def choose(self, rng: random.Random) -> str:
        return rng.choices(self._ids, [self.weight(id) for id in self._ids])[0]

    def weight(self, id: str) -> float:
        if id not in self._rates:
            return 1.0
        _, rate = self._rates[id]
        return max(MIN_WEIGHT, 4 * rate * (1 - rate))

    def record(self, id: str, pass_rate: float) -> None:
        if not 0 <= pass_rate <= 1:
            raise RecordError(f"pass rate of task {id}: expected a number from 0 to 1, received {pass_rate!r}")
        num, rate = self._rates.get(id, (0, 0.0))
        self._rates[id] = (num + 1, rate + (pass_rate - rate) / min(num + 1, WINDOW))

    def state(self) -> dict[str, JsonValue]:
        return {id: [num, rate] for id, (num, rate) in self._rates.items()}

    def restore(self, state: Mapping[str, JsonValue]) -> None:
        """Resume from a `state()`; tasks that are no longer there are forgotten."""
        known = set(self._ids)
        for id, value in state.items():
            match value:
                case [int(num), float(rate) | int(rate)] if id in known:
                    self._rates[id] = (num, float(rate))
