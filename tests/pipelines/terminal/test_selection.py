"""Selection by pass rates: the bound, the number of attempts, the decisions at known pass rates."""

import math
import random

import pytest

from m2forge.pipelines.terminal.pipeline import NUM_ATTEMPTS, Decision, measure, upper_bound


@pytest.mark.parametrize("num", NUM_ATTEMPTS)
def test_the_bound_equals_its_closed_forms(num: int) -> None:
    assert upper_bound(0, num) == pytest.approx(1 - 0.05 ** (1 / num), abs=1e-12)
    assert upper_bound(num - 1, num) == pytest.approx(0.95 ** (1 / num), abs=1e-12)
    assert upper_bound(num, num) == 1


@pytest.mark.parametrize(("num", "most"), [(4, 1), (8, 3), (16, 9), (32, 21)])
def test_so_many_passes_are_selected_at_each_number(num: int, most: int) -> None:
    """The most passes whose bound is below 0.8, by P(at most k of n pass at a rate of 0.8) < 0.05."""

    def at_most(k: int) -> float:
        return sum(math.comb(num, j) * 0.8**j * 0.2 ** (num - j) for j in range(k + 1))

    assert at_most(most) < 0.05 <= at_most(most + 1)
    assert [upper_bound(k, num) < 0.8 for k in range(num + 1)] == [k <= most for k in range(num + 1)]


@pytest.mark.parametrize(
    ("passes", "decision", "num"),
    [
        ("1000", Decision.SELECTED, 4),
        ("1100" + "1000", Decision.SELECTED, 8),
        ("1111" + "1000" + "11101000", Decision.SELECTED, 16),
        ("1" * 21 + "0" * 11, Decision.SELECTED, 32),
        ("1" * 22 + "0" * 10, Decision.TOO_EASY, 32),
        ("0001", Decision.SELECTED, 4),
        ("11000100", Decision.SELECTED, 8),
        ("1" * 32, Decision.TOO_EASY, 32),
        ("0" * 32, Decision.UNSOLVED, 32),
        ("0" * 31 + "1", Decision.SELECTED, 32),
    ],
)
def test_attempts_double_until_the_variant_is_decided(passes: str, decision: Decision, num: int) -> None:
    made: list[int] = []

    def attempt(number: int) -> bool:
        made.append(number)
        return passes[number] == "1"

    found = measure(attempt)
    assert found.decision is decision
    assert made == list(range(found.num_attempts))
    assert found.num_attempts == num
    assert found.num_passed == passes[: found.num_attempts].count("1")


@pytest.mark.parametrize(("rate", "low", "high"), [(0.0, 0, 0), (0.3, 0.97, 1), (0.8, 0, 0.1), (0.95, 0, 0.005)])
def test_solvers_of_known_pass_rate_are_selected_below_the_limit(rate: float, low: float, high: float) -> None:
    """The bound is applied up to four times, so a rate of 0.8 is selected in up to 10% of cases, not in 5%."""
    rng = random.Random(0)
    found = [measure(lambda _: rng.random() < rate).decision for _ in range(1000)]
    assert low <= found.count(Decision.SELECTED) / len(found) <= high
