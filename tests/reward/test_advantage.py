"""Advantages: by hand, and the identities of reward to go and of the baselines."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import RecordError
from m2forge.reward.advantage import Advantage, assign_advantages, episode_advantages, episode_baselines, reward_to_go
from m2forge.reward.config import AdvantageConfig
from m2forge.reward.judge import Judged
from tests.reward.sample import call, episode, judged

REWARDS = st.lists(st.floats(-10, 10), min_size=1, max_size=12)
GROUPS = st.lists(REWARDS, min_size=2, max_size=8)
CLOSE = 1e-11
"""Absolute: a few dozen float64 sums of numbers up to 120."""
DEFAULT = AdvantageConfig()


def of_group(group: list[list[float]], config: AdvantageConfig = DEFAULT) -> list[list[float]]:
    return [values.tolist() for values in episode_advantages([group], config)]


# -- reward to go -----------------------------------------------------------------------------------------------------


def test_reward_to_go_by_hand() -> None:
    assert reward_to_go((0.1, 0.0, 1.0), 0.5).tolist() == pytest.approx([0.35, 0.5, 1.0])
    assert reward_to_go((), 0.5).tolist() == []


@given(REWARDS)
def test_without_discount_it_is_the_sum_of_what_follows(rewards: list[float]) -> None:
    suffixes = [math.fsum(rewards[step:]) for step in range(len(rewards))]
    assert reward_to_go(rewards, 1.0).tolist() == pytest.approx(suffixes, abs=CLOSE)


@given(REWARDS, st.floats(0, 1))
def test_it_is_the_discounted_sum(rewards: list[float], gamma: float) -> None:
    naive = [
        math.fsum(gamma ** (later - step) * rewards[later] for later in range(step, len(rewards)))
        for step in range(len(rewards))
    ]
    assert reward_to_go(rewards, gamma).tolist() == pytest.approx(naive, abs=CLOSE)


@given(REWARDS)
def test_a_discount_of_zero_sees_the_step_alone(rewards: list[float]) -> None:
    assert reward_to_go(rewards, 0.0).tolist() == rewards


# -- baselines --------------------------------------------------------------------------------------------------------


def test_leave_one_out_by_hand() -> None:
    to_go = [reward_to_go((reward,), 1.0) for reward in (1.0, 0.0, 0.5)]
    assert episode_baselines(to_go, "leave_one_out") == [0.25, 0.75, 0.5]
    assert of_group([[1.0], [0.0], [0.5]]) == [[0.75], [-0.75], [0.0]]


def test_trajectory_mean_by_hand() -> None:
    config = AdvantageConfig(baseline="trajectory_mean", gamma=0.5)
    (values,) = of_group([[0.1, 0.0, 1.0]], config)
    assert episode_baselines([reward_to_go((0.1, 0.0, 1.0), 0.5)], "trajectory_mean") == [
        pytest.approx(0.6167, abs=5e-5)
    ]
    assert values == pytest.approx([0.35 - 1.85 / 3, 0.5 - 1.85 / 3, 1.0 - 1.85 / 3])


@given(GROUPS, st.floats(0, 1))
def test_leave_one_out_advantages_of_first_calls_sum_to_zero(group: list[list[float]], gamma: float) -> None:
    values = of_group(group, AdvantageConfig(gamma=gamma))
    assert math.fsum(episode[0] for episode in values) == pytest.approx(0.0, abs=CLOSE)


@given(GROUPS, st.integers(0, 7), st.floats(-5, 5))
def test_a_leave_one_out_baseline_ignores_its_own_episode(group: list[list[float]], index: int, change: float) -> None:
    index %= len(group)
    changed = [[*rewards[:-1], rewards[-1] + change * (place == index)] for place, rewards in enumerate(group)]
    before, after = (
        episode_baselines([reward_to_go(rewards, 1.0) for rewards in rows], "leave_one_out")
        for rows in (group, changed)
    )
    assert after[index] == pytest.approx(before[index], abs=CLOSE)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8))
def test_leave_one_out_is_the_group_mean_scaled(returns: list[float]) -> None:
    group, size = [[value] for value in returns], len(returns)
    by_mean = of_group(group, AdvantageConfig(baseline="group_mean"))
    for ours, theirs in zip(of_group(group), by_mean, strict=True):
        assert ours[0] == pytest.approx(theirs[0] * size / (size - 1), abs=CLOSE)


@given(GROUPS, st.floats(-5, 5), st.sampled_from(["leave_one_out", "group_mean", "trajectory_mean"]))
def test_a_shift_of_every_final_reward_changes_no_advantage(
    group: list[list[float]], shift: float, baseline: str
) -> None:
    config = replace_config(DEFAULT, baseline=baseline)
    shifted = [[*rewards[:-1], rewards[-1] + shift] for rewards in group]
    for before, after in zip(of_group(group, config), of_group(shifted, config), strict=True):
        assert after == pytest.approx(before, abs=CLOSE)


@given(REWARDS, st.floats(0, 1))
def test_trajectory_mean_advantages_sum_to_zero(rewards: list[float], gamma: float) -> None:
    (values,) = of_group([rewards], AdvantageConfig(baseline="trajectory_mean", gamma=gamma))
    assert math.fsum(values) == pytest.approx(0.0, abs=CLOSE)


def test_an_episode_alone_teaches_nothing_unless_told_to() -> None:
    assert of_group([[0.5, 1.0]]) == [[0.0, 0.0]]
    assert of_group([[0.5, 1.0]], AdvantageConfig(single="zero_baseline")) == [[1.5, 1.0]]
    assert of_group([[0.5, 1.0]], AdvantageConfig(single="zero_baseline", normalisation="group_std")) == [[1.5, 1.0]]


@given(GROUPS)
def test_an_episode_without_steps_changes_nothing_for_the_others(group: list[list[float]]) -> None:
    for normalisation in ("none", "group_std", "batch_std"):
        config = replace_config(DEFAULT, normalisation=normalisation)
        assert of_group([*group, []], config) == [*of_group(group, config), []]


def test_two_attempts_of_which_one_took_no_step_are_one_attempt() -> None:
    assert of_group([[1.0], []]) == [[0.0], []]
    assert of_group([[], []]) == [[], []]
    assert of_group([]) == []


# -- normalisation ----------------------------------------------------------------------------------------------------


def test_the_spread_by_hand() -> None:
    # Returns 1, 0, 0.5: sample standard deviation 0.5.
    group_std = AdvantageConfig(normalisation="group_std")
    assert of_group([[1.0], [0.0], [0.5]], group_std) == [[1.5], [-1.5], [0.0]]
    # Returns 1 and 0: 1 / √2.
    assert of_group([[1.0], [0.0]], group_std) == [[pytest.approx(math.sqrt(2))], [pytest.approx(-math.sqrt(2))]]
    groups = [[[1.0], [0.0]], [[5.0], [3.0]]]
    batch_std = AdvantageConfig(normalisation="batch_std")
    spread = float(np.std([1.0, 0.0, 5.0, 3.0], ddof=1))
    values = [value.tolist() for value in episode_advantages(groups, batch_std)]
    assert values == [[1 / spread], [-1 / spread], [2 / spread], [-2 / spread]]


def test_an_absolute_reward_is_divided_by_the_batch_spread_too() -> None:
    config = AdvantageConfig(normalisation="batch_std", single="zero_baseline")
    spread = float(np.std([4.0, 1.0], ddof=1))
    assert [value.tolist() for value in episode_advantages([[[4.0]], [[1.0]]], config)] == [[4 / spread], [1 / spread]]


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8), st.floats(1.0, 50))
def test_normalised_advantages_ignore_the_unit_of_the_reward(returns: list[float], unit: float) -> None:
    config = AdvantageConfig(normalisation="group_std", min_std=1e-3)
    if np.std(returns, ddof=1) < 1e-2:
        return
    plain, scaled = (of_group([[value * factor] for value in returns], config) for factor in (1.0, unit))
    for first, second in zip(plain, scaled, strict=True):
        assert second == pytest.approx(first, abs=1e-8)


def test_returns_that_are_nearly_alike_are_not_blown_up() -> None:
    values = of_group([[1.0], [1.0 + 1e-9]], AdvantageConfig(normalisation="group_std", min_std=0.1))
    assert abs(values[0][0]) < 1e-7


# -- the whole batch --------------------------------------------------------------------------------------------------


def test_advantages_arrive_call_by_call_with_their_weights() -> None:
    groups = [
        [judged("a", (0.0, 1.0), (10, 30)), judged("b", (), ()), judged("c", (0.0,), (60,))],
        [judged("d", (2.0,), (100,), task="u")],
    ]
    by_token = assign_advantages(groups, DEFAULT)
    assert by_token == [
        Advantage(0, 0, 1.0, 1 / 200),
        Advantage(0, 1, 1.0, 1 / 200),
        Advantage(2, 0, -1.0, 1 / 200),
        Advantage(3, 0, 0.0, 1 / 200),
    ]
    by_episode = assign_advantages(groups, AdvantageConfig(weighting="episode_mean"))
    assert [advantage.value for advantage in by_episode] == [1.0, 1.0, -1.0, 0.0]
    assert [advantage.weight for advantage in by_episode] == [1 / 120, 1 / 120, 1 / 180, 1 / 300]


def test_an_empty_batch_has_no_advantages() -> None:
    assert assign_advantages([], DEFAULT) == []
    assert assign_advantages([[], [judged("a", ())]], DEFAULT) == []


def test_an_empty_action_has_an_advantage_and_no_say() -> None:
    groups = [[judged("a", (0.0, 1.0), (0, 4)), judged("b", (0.0,), (4,))]]
    first = assign_advantages(groups, DEFAULT)[0]
    assert first == Advantage(0, 0, 1.0, 1 / 8)


def test_a_group_of_two_tasks_is_refused() -> None:
    with pytest.raises(RecordError, match=r"one with \['t', 'u'\]"):
        assign_advantages([[judged("a", (1.0,)), judged("b", (1.0,), task="u")]], DEFAULT)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused_by_name(bad: float) -> None:
    with pytest.raises(RecordError, match=r"Episode broken: step_rewards\[1\]: expected a finite number, received"):
        judged("broken", (0.0, bad))
    with pytest.raises(RecordError, match="reward of step 1"):
        reward_to_go((0.0, bad), 1.0)
    with pytest.raises(RecordError, match="Advantage of episode 3, call 2: value"):
        Advantage(3, 2, bad, 1.0)
    with pytest.raises(RecordError, match="Advantage of episode 3, call 2: weight"):
        Advantage(3, 2, 1.0, bad)


def test_a_sum_beyond_all_numbers_is_refused() -> None:
    with pytest.raises(RecordError, match="Episode a: the sum of step_rewards: expected a finite number"):
        judged("a", (1e308, 1e308))
    with pytest.raises(RecordError, match="Advantage of episode 2, call 0: value"):
        assign_advantages([[judged("a", (0.0,))], [judged("b", ())], [judged(id, (1e308,)) for id in "cde"]], DEFAULT)


def test_rewards_are_one_per_call() -> None:
    with pytest.raises(RecordError, match="Episode e: step_rewards: expected one per call, 1, received 2"):
        Judged(episode("e", (call(),)), (1.0, 2.0))


def replace_config(config: AdvantageConfig, **changes: object) -> AdvantageConfig:
    return AdvantageConfig.model_validate({**config.model_dump(), **changes})
