"""What a step is paid, from its parts."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.reward.config import RulesConfig
from m2forge.reward.judge import compose, process_rewards
from m2forge.reward.rule import StructureRule, make_rules

RULES = make_rules(RulesConfig())
NUMBERS = st.floats(-5, 5)
MEASURES = st.lists(st.dictionaries(st.sampled_from([rule.name for rule in RULES]), st.floats(0, 1)), max_size=12)


def test_the_numbers_of_the_docstring() -> None:
    measures = [{"malformed_call": 1.0}, {"structured_step": 1.0}, {"structured_step": 1.0}]
    process = process_rewards(RULES, measures, "shared")
    assert process == pytest.approx([-1.0, 0.2 / 3, 0.2 / 3])
    rewards = compose(process, 0.5, 1.0, alpha=0.1, beta=0.1)
    assert rewards == pytest.approx((-0.1, 0.02 / 3, 0.02 / 3 + 0.05 + 1))
    assert sum(rewards) == pytest.approx(0.9633, abs=5e-5)


@given(st.lists(NUMBERS, min_size=1, max_size=10), st.floats(0, 1), NUMBERS, st.floats(0, 2), st.floats(0, 2))
def test_all_steps_together_earn_the_weighted_parts(
    process: list[float], speed: float, perf: float, alpha: float, beta: float
) -> None:
    rewards = compose(process, speed, perf, alpha=alpha, beta=beta)
    assert math.fsum(rewards) == pytest.approx(alpha * math.fsum(process) + beta * speed + perf, abs=1e-12)
    assert rewards[:-1] == tuple(alpha * value for value in process[:-1])


def test_an_episode_without_steps_is_paid_nothing() -> None:
    assert compose((), 1.0, 1.0, alpha=1.0, beta=1.0) == ()


@given(st.integers(1, 50))
def test_more_steps_earn_no_more_credit(num_steps: int) -> None:
    rules = (StructureRule(0.2),)
    measures = [{"structured_step": 1.0}] * num_steps
    assert math.fsum(process_rewards(rules, measures, "shared")) == pytest.approx(0.2)
    assert math.fsum(process_rewards(rules, measures, "full")) == pytest.approx(0.2 * num_steps)


@given(MEASURES, st.integers(1, 10))
def test_faultless_steps_neither_dilute_penalties_nor_add_credit(
    measures: list[dict[str, float]], num_more: int
) -> None:
    more = [*measures, *[{"structured_step": 1.0}] * num_more]
    penalties = [
        math.fsum(min(0.0, value) for value in process_rewards(RULES[:-1], keep_penalties(rows), "shared"))
        for rows in (measures, more)
    ]
    assert penalties[0] == penalties[1]
    credit = math.fsum(process_rewards(RULES[-1:], keep_credit(more), "shared"))
    assert 0.0 <= credit <= RULES[-1].weight * (1 + 1e-12)


def keep_penalties(measures: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in step.items() if name != "structured_step"} for step in measures]


def keep_credit(measures: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in step.items() if name == "structured_step"} for step in measures]
