"""Speed: every shape falls from 1 to 0, and gives the numbers its docstring promises."""

import inspect
import math
import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import RecordError
from m2forge.reward.config import SpeedShape
from m2forge.reward.judge import SHAPES, speed

SHAPE_NAMES = st.sampled_from(sorted(SHAPES))
TIMES_S = st.floats(0, 1e300)
POSITIVE = st.floats(1e-300, 1e300)


def test_every_shape_that_can_be_configured_exists() -> None:
    assert set(SHAPES) == set(get_args(SpeedShape))


def test_the_table_of_the_docstring_is_true() -> None:
    rows = re.findall(r"^    (\w+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", inspect.getdoc(speed) or "", re.MULTILINE)
    assert [name for name, *_ in rows] == list(SHAPES)
    for name, *values in rows:
        computed = [SHAPES[name](x) for x in (0.5, 1.0, 2.0, 4.0)]
        # Printed to four digits.
        assert computed == pytest.approx([float(value) for value in values], abs=5e-5)


@given(SHAPE_NAMES, TIMES_S, TIMES_S, POSITIVE, POSITIVE)
def test_a_slower_attempt_never_earns_more(
    shape: SpeedShape, first_s: float, second_s: float, base_s: float, half_ratio: float
) -> None:
    slow_s, fast_s = max(first_s, second_s), min(first_s, second_s)
    slow, fast = speed(shape, slow_s, base_s, half_ratio), speed(shape, fast_s, base_s, half_ratio)
    assert 0.0 <= slow <= fast <= 1.0


@given(SHAPE_NAMES, POSITIVE)
def test_no_time_at_all_earns_everything(shape: SpeedShape, base_s: float) -> None:
    assert speed(shape, 0.0, base_s) == 1.0


@pytest.mark.parametrize("shape", ["linear", "exponential", "reciprocal"])
def test_half_is_paid_at_the_half_ratio(shape: SpeedShape) -> None:
    assert speed(shape, 30.0, 20.0, half_ratio=1.5) == 0.5


def test_a_step_pays_everything_up_to_its_ratio_and_then_nothing() -> None:
    assert speed("step", 30.0, 20.0, half_ratio=1.5) == 1.0
    assert speed("step", 30.001, 20.0, half_ratio=1.5) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_times_that_cannot_be_are_refused_by_name(bad: float) -> None:
    with pytest.raises(RecordError, match="time_s"):
        speed("linear", bad, 1.0)
    with pytest.raises(RecordError, match="base_s"):
        speed("linear", 1.0, bad)
    with pytest.raises(RecordError, match="base_s"):
        speed("linear", 1.0, 0.0)
