"""Adapts difficulty to success: pass rates of groups in, a range of levels out.

The range is `width` adjacent levels within the bounds of the stage. Only groups whose task is inside the range count,
since a group drawn before the last change may be of another level. Every change resets the counted groups. The levels
depend only on the sequence of pass rates.
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
        """The lowest and highest level to draw from."""
        return self._lowest, min(self._lowest + self._config.width - 1, self._bounds[1])

    @property
    def pass_rate(self) -> float | None:
        """Mean pass rate of the groups counted at these levels; None before the first."""
        return sum(self._rates) / len(self._rates) if self._rates else None

    def bound(self, bounds: tuple[int, int]) -> None:
        """Set the bounds and clamp the current range to them."""
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
        """Resume from a `state()`. If `num_groups` is now smaller, the latest pass rates are kept."""
        lowest, rates = state.get("lowest"), state.get("rates")
        if not isinstance(lowest, int) or not isinstance(rates, list):
            raise RecordError(f"pace: state: expected lowest and rates, received {dict(state)!r}")
        self._go_to(lowest)
        self._rates.clear()
        self._rates.extend(float(rate) for rate in rates)

    def _go_to(self, lowest: int) -> None:
        """Move the range to `lowest`, clamped so that its full width fits into the bounds if possible."""
        highest_start = max(self._bounds[0], self._bounds[1] - self._config.width + 1)
        lowest = min(max(lowest, self._bounds[0]), highest_start)
        if lowest != self._lowest:
            self._rates.clear()
        self._lowest = lowest
