"""Mixtures: every batch within rounding, and never a unit off in the long run."""

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import ConfigError, RecordError
from m2forge.tasks.curriculum import Mixture

RATIOS = st.lists(st.integers(1, 60), min_size=1, max_size=4).map(
    lambda parts: {name: Fraction(part, sum(parts)) for name, part in zip("abcd", parts, strict=False)}
)


def check(ratios: dict[str, Fraction], num_units: int, num_batches: int) -> None:
    mixture, totals = Mixture(ratios, num_units), dict.fromkeys(ratios, 0)
    for batch in range(1, num_batches + 1):
        counts = mixture.next()
        assert sum(counts.values()) == num_units
        for name, count in counts.items():
            due = ratios[name] * num_units
            totals[name] += count
            assert abs(count - due) < 1
            assert abs(totals[name] - batch * due) < 1


@given(ratios=RATIOS, num_units=st.integers(1, 70))
def test_ratios_are_kept_in_every_batch_and_over_all(ratios: dict[str, Fraction], num_units: int) -> None:
    check(ratios, num_units, 150)


@pytest.mark.parametrize("num_units", [1, 2, 3, 99, 100])
@pytest.mark.parametrize("parts", [(48, 48, 4, 1), (97, 2, 1, 1), (26, 25, 25, 25), (34, 33, 33, 1)])
def test_hard_ratios_are_kept_too(parts: tuple[int, ...], num_units: int) -> None:
    # For (48, 48, 4, 1) of 101 the largest remainder, carried over, is off by 1.0099 units.
    check({name: Fraction(part, 101) for name, part in zip("abcd", parts, strict=True)}, num_units, 101)


@given(ratios=RATIOS, num_units=st.integers(1, 40), num_before=st.integers(0, 30))
def test_a_mixture_goes_on_from_its_state(ratios: dict[str, Fraction], num_units: int, num_before: int) -> None:
    mixture = Mixture(ratios, num_units)
    for _ in range(num_before):
        mixture.next()
    state = json.loads(json.dumps(mixture.extras))
    again = Mixture(ratios, num_units, state, mixture.num_batches)
    assert [again.next() for _ in range(20)] == [mixture.next() for _ in range(20)]


def test_whole_shares_are_the_same_in_every_batch() -> None:
    mixture = Mixture({"a": Fraction(1, 2), "b": Fraction(1, 4), "c": Fraction(1, 4)}, 8)
    assert [mixture.next() for _ in range(3)] == [{"a": 4, "b": 2, "c": 2}] * 3


def test_what_is_no_mixture_is_refused() -> None:
    for parts in ({}, {"a": Fraction(1, 2)}, {"a": Fraction(3, 2), "b": Fraction(-1, 2)}):
        with pytest.raises(ConfigError, match="mixture: expected"):
            Mixture(parts, 4)
    with pytest.raises(ConfigError, match="1 to 4 ratios"):
        Mixture({name: Fraction(1, 5) for name in "abcde"}, 4)
    with pytest.raises(RecordError, match="a: 7 extra units in 2 batches"):
        Mixture({"a": Fraction(1, 2), "b": Fraction(1, 2)}, 3, {"a": 7}, 2)
