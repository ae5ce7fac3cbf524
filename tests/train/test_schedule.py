"""Rates and weights over a phase."""

import pytest

from m2forge.train.config import Curve, PhaseConfig
from m2forge.train.loop import curve_at, lr_at


def make_phase(**changes: object) -> PhaseConfig:
    data = {"name": "a", "steps": 11, "context": 8, "pack_tokens": 8, "lr": {"start": 1.0}}
    return PhaseConfig.model_validate(data | changes)


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_curves_start_and_end_where_they_say(shape: str) -> None:
    curve = Curve.model_validate({"start": 0.3, "end": 0.1, "shape": shape})
    assert curve_at(curve, 0, 11) == pytest.approx(0.3)
    assert curve_at(curve, 5, 11) == pytest.approx(0.2)
    assert curve_at(curve, 10, 11) == pytest.approx(0.1)


def test_a_curve_without_end_is_constant() -> None:
    assert {curve_at(Curve(start=0.3), step, 11) for step in range(11)} == {0.3}


def test_the_rate_warms_up() -> None:
    rates = [lr_at(make_phase(warmup_steps=4), step) for step in range(6)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"warmup_steps": 12}, "warmup_steps"),
        ({"pack_tokens": 4}, "pack_tokens"),
        ({"trains": "mtp"}, "learns nothing"),
        ({"trains": "mtp", "mtp_weight": {"start": 0.0, "end": 0.0}}, "learns nothing"),
        ({"lr": {"start": -1.0}}, "greater than or equal to 0"),
    ],
)
def test_phases_that_cannot_be_meant_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_phase(**change)


def test_a_frozen_phase_may_raise_its_weight_from_nothing() -> None:
    make_phase(trains="mtp", mtp_weight={"start": 0.0, "end": 0.3})
