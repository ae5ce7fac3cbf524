"""Difficulty that follows success: pass rates of groups in, a range of levels out.

The range is `width` neighbouring levels within the bounds of the stage. Only groups whose task lies in it are counted,
since a group that was begun before the last move says nothing about where things stand. Every move forgets what was
counted. The levels depend on the order of the pass rates and on nothing else.
"""

from collections import deque
from collections.abc import Mapping

from m2forge.errors import RecordError
from m2forge.records import JsonValue
from m2forge.tasks.config import PaceConfig


class Pace:
    def __init__(self, config: PaceConfig, bounds: tuple[int, int], start: int | None = None) -> None:
        self._config = config
        self._bounds = bounds
        self._lowest = bounds[0] if start is None else start
        self._rates: deque[float] = deque(maxlen=config.num_groups)
        self.bound(bounds)

    @property
    def levels(self) -> tuple[int, int]:
        """The lowest and the highest level to draw from."""
        return self._lowest, min(self._lowest + self._config.width - 1, self._bounds[1])

    @property
    def pass_rate(self) -> float | None:
        """Of the groups counted at these levels; None before the first."""
        return sum(self._rates) / len(self._rates) if self._rates else None

    def bound(self, bounds: tuple[int, int]) -> None:
        """Stay within these levels from here on, as near as may be to where things stand."""
        self._bounds = bounds
        self._go_to(self._lowest)

    def record(self, difficulty: float, pass_rate: float) -> None:
        """Count one group: the share of its attempts that passed."""
        if not 0 <= pass_rate <= 1:
            raise RecordError(f"pace: pass_rate: expected a number from 0 to 1, received {pass_rate!r}")
        lowest, highest = self.levels
        if not lowest <= difficulty <= highest:
            return
        self._rates.append(pass_rate)
        if len(self._rates) < self._config.num_groups:
            return
        mean = sum(self._rates) / len(self._rates)
        if mean > self._config.raise_above:
            self._go_to(lowest + 1)
        elif mean < self._config.lower_below:
            self._go_to(lowest - 1)

    def state(self) -> dict[str, JsonValue]:
        return {"lowest": self._lowest, "rates": list(self._rates)}

    def restore(self, state: Mapping[str, JsonValue]) -> None:
        """Go on from what `state` gave. If fewer groups are counted since, the latest stay."""
        lowest, rates = state.get("lowest"), state.get("rates")
        if not isinstance(lowest, int) or not isinstance(rates, list):
            raise RecordError(f"pace: state: expected lowest and rates, received {dict(state)!r}")
        self._go_to(lowest)
        self._rates.clear()
        self._rates.extend(float(rate) for rate in rates)

    def _go_to(self, lowest: int) -> None:
        """Within the bounds, and with all the width that they have room for."""
        highest_start = max(self._bounds[0], self._bounds[1] - self._config.width + 1)
        lowest = min(max(lowest, self._bounds[0]), highest_start)
        if lowest != self._lowest:
            self._rates.clear()
        self._lowest = lowest
