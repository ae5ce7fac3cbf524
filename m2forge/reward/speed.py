"""The speed reward h(x): x = T / T_base is the wall-clock time of an attempt over the baseline time of its task.

    linear       h(x) = max(0, 1 − x / 2c)
    exponential  h(x) = 2^(−x / c)
    reciprocal   h(x) = 1 / (1 + x / c)
    step         h(x) = 1 if x ≤ c else 0

c is `half_ratio`. Every h is non-increasing in x, from h(0) = 1 towards 0 and never below, so a slow solution is never
penalized. At x = c the first three give 1/2, and

    c = 1         h(1/2)     h(1)       h(2)       h(4)
    linear        0.75       0.5        0          0
    exponential   0.7071     0.5        0.25       0.0625
    reciprocal    0.6667     0.5        0.3333     0.2
    step          1          1          0          0
"""

import math
from collections.abc import Callable, Mapping

from m2forge.errors import RecordError
from m2forge.reward.config import SpeedShape


def _linear(x: float) -> float:
    return max(0.0, 1.0 - x / 2.0)


def _exponential(x: float) -> float:
    return math.exp2(-x)


def _reciprocal(x: float) -> float:
    return 1.0 / (1.0 + x)


def _step(x: float) -> float:
    return 1.0 if x <= 1.0 else 0.0


SHAPES: Mapping[SpeedShape, Callable[[float], float]] = {
    "linear": _linear,
    "exponential": _exponential,
    "reciprocal": _reciprocal,
    "step": _step,
}
"""Each h as a function of x / c."""


def speed(shape: SpeedShape, time_s: float, base_s: float, half_ratio: float = 1.0) -> float:
    """h(time_s / base_s)."""
    if not (math.isfinite(time_s) and time_s >= 0):
        raise RecordError(f"speed: time_s: expected a finite number of at least 0, received {time_s!r}")
    if not (math.isfinite(base_s) and base_s > 0):
        raise RecordError(f"speed: base_s: expected a finite number above 0, received {base_s!r}")
    return SHAPES[shape](time_s / base_s / half_ratio)
