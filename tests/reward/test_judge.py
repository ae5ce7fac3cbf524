"""Judging a group: what each attempt earns, that order does not matter, and that baselines move only for passes."""

import json
import math
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.config import build
from m2forge.errors import ConfigError, RecordError
from m2forge.records import FinishReason, Reward, Verdict
from m2forge.reward.config import RewardConfig, RulesConfig, SpeedConfig
from m2forge.reward.judge import Attempt, Judge, Judged
from m2forge.reward.rule import Step, StructureRule
from m2forge.text.parser import ProblemKind
from tests.reward.sample import LS, attempt, call, episode, step

CONFIG = RewardConfig()
MALFORMED = step(ProblemKind.MALFORMED_CALL)
GOOD = step(calls=(LS,))


def only(judged: list[Judged]) -> Judged:
    (one,) = judged
    return one


def reward_of(judged: Judged) -> Reward:
    assert judged.episode.reward is not None
    return judged.episode.reward


def total(judged: Judged) -> float:
    return reward_of(judged).total


def test_an_episode_by_hand() -> None:
    judge = Judge(CONFIG, base_times={"t": [10.0]})
    judged = only(judge.judge([attempt(time_s=10.0, steps=(MALFORMED, GOOD, GOOD))]))
    assert judged.step_rewards == pytest.approx((-0.1, 0.02 / 3, 0.02 / 3 + 0.05 + 1))
    reward = judged.episode.reward
    assert reward is not None
    assert reward.process == pytest.approx(-1 + 0.4 / 3)
    assert (reward.speed, reward.perf) == (0.5, 1.0)
    assert reward.total == pytest.approx(math.fsum(judged.step_rewards))
    assert reward.evidence == {
        "verifier": {},
        "rules": {"malformed_call": [[0, 1.0]], "structured_step": [[1, 1.0], [2, 1.0]]},
        "time_s": 10.0,
        "base_s": 10.0,
    }


def test_speed_is_paid_once_at_the_last_step() -> None:
    config = RewardConfig(alpha=0.0, beta=1.0)
    judged = only(Judge(config, base_times={"t": [10.0]}).judge([attempt(time_s=5.0, steps=(GOOD,) * 3)]))
    assert judged.step_rewards == pytest.approx((0.0, 0.0, 1 + 1 / 1.5))


@given(st.floats(0, 1e6), st.floats(0, 0.999), st.floats(0.1, 1e6), st.floats(0, 10))
def test_a_fast_failure_earns_nothing_by_it(time_s: float, perf: float, base_s: float, beta: float) -> None:
    config = RewardConfig(alpha=0.0, beta=beta)
    judged = only(Judge(config, base_times={"t": [base_s]}).judge([attempt(time_s=time_s, perf=perf)]))
    assert judged.episode.reward is not None
    assert judged.episode.reward.speed == 0.0
    assert judged.step_rewards == (perf,)


def test_a_failed_attempt_earns_no_speed_reward_and_no_baseline() -> None:
    judge = Judge(CONFIG)
    judged = only(judge.judge([attempt(time_s=1.0, failure="crashed")]))
    assert judged.episode.reward is not None
    assert judged.episode.reward.speed == 0.0
    assert judge.base_times() == {}


def test_the_pass_mark_is_configured() -> None:
    config = RewardConfig(pass_perf=0.5)
    high, low = Judge(config).judge([attempt("a", perf=0.5), attempt("b", perf=0.49)])
    assert high.episode.reward is not None
    assert low.episode.reward is not None
    assert (high.episode.reward.speed, low.episode.reward.speed) == (0.5, 0.0)


def test_a_control_deals_the_rewards_of_a_group_at_random() -> None:
    """Those of the rules too: the attempts that solve nothing call badly, and lose no more by it than others do."""
    solved = [attempt(f"s{n}", steps=(GOOD, GOOD)) for n in range(2)]
    failed = [attempt(f"f{n}", perf=0.0, steps=(MALFORMED, GOOD, MALFORMED)) for n in range(6)]
    totals = [total(one) for one in Judge(CONFIG).judge(solved + failed)]
    earned = 0.0
    for round in range(50):
        group = [replace(one, episode=replace(one.episode, id=f"{round}-{n}")) for n, one in enumerate(solved + failed)]
        judged = Judge(RewardConfig(shuffled=True)).judge(group)
        assert judged == Judge(RewardConfig(shuffled=True)).judge(group)
        assert sorted(map(total, judged)) == sorted(totals)
        for one in judged:
            assert one.step_rewards == (*[0.0] * (len(one.episode.calls) - 1), total(one))
        earned += sum(total(one) for one in judged[:2])
    # A quarter of the group earns a quarter of what there is.
    assert earned / 50 == pytest.approx(sum(totals) / 4, abs=0.25)
    assert sum(totals[:2]) > sum(totals) / 4 + 1


def test_a_control_keeps_evidence_and_baseline_times_in_place() -> None:
    group = [attempt("a", time_s=4.0), *[attempt(f"{n}", time_s=9.0, perf=0.0) for n in range(7)]]
    plain, control = Judge(CONFIG), Judge(RewardConfig(shuffled=True))
    pairs = list(zip(plain.judge(group), control.judge(group), strict=True))
    assert [reward_of(one).evidence for one, _ in pairs] == [reward_of(other).evidence for _, other in pairs]
    assert plain.base_times() == control.base_times() == {"t": [4.0]}


def test_an_unknown_task_is_measured_by_its_passing_attempts() -> None:
    attempts = [
        attempt("a", time_s=4.0),
        attempt("b", time_s=8.0),
        attempt("c", time_s=12.0),
        attempt("d", time_s=1.0, perf=0.0),
    ]
    judge = Judge(RewardConfig(speed=SpeedConfig(shape="linear")))
    speeds = [one.episode.reward.speed for one in judge.judge(attempts) if one.episode.reward is not None]
    assert speeds == [0.75, 0.5, 0.25, 0.0]
    assert judge.base_times() == {"t": [4.0, 8.0, 12.0]}


TIMES_AND_PERFS = st.lists(st.tuples(st.floats(0, 100), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=6)


@given(TIMES_AND_PERFS, st.randoms(use_true_random=False))
def test_the_order_of_a_group_changes_no_reward(pairs: list[tuple[float, float]], random: Random) -> None:
    attempts = [attempt(f"e{n}", time_s=time_s, perf=perf) for n, (time_s, perf) in enumerate(pairs)]
    shuffled = random.sample(attempts, len(attempts))
    first, second = (
        {one.episode.id: one.step_rewards for one in Judge(CONFIG).judge(group)} for group in (attempts, shuffled)
    )
    assert first == second


@given(st.lists(TIMES_AND_PERFS, min_size=2, max_size=5), st.integers(1, 4))
def test_a_resumed_judge_goes_on_exactly(groups: list[list[tuple[float, float]]], cut: int) -> None:
    batches = [[attempt(f"e{n}", time_s=t, perf=p) for n, (t, p) in enumerate(pairs)] for pairs in groups]
    judge = Judge(CONFIG)
    whole = [judge.judge(batch) for batch in batches]
    first = Judge(CONFIG)
    resumed = [first.judge(batch) for batch in batches[:cut]]
    second = Judge(CONFIG, base_times=json.loads(json.dumps(first.base_times())))
    resumed += [second.judge(batch) for batch in batches[cut:]]
    assert resumed == whole
    assert second.base_times() == judge.base_times()


def test_the_baseline_follows_the_policy() -> None:
    judge = Judge(RewardConfig(speed=SpeedConfig(window=2)))
    for time_s in (8.0, 4.0, 4.0):
        judge.judge([attempt(time_s=time_s)])
    judged = only(judge.judge([attempt(time_s=4.0)]))
    assert judged.episode.reward is not None
    assert judged.episode.reward.speed == 0.5


def test_an_episode_without_steps_keeps_its_verdict_alone() -> None:
    judge = Judge(CONFIG)
    judged = only(judge.judge([attempt(steps=(), perf=1.0)]))
    assert judged.step_rewards == ()
    assert judged.episode.reward is not None
    assert (judged.episode.reward.speed, judged.episode.reward.total) == (0.0, 1.0)
    assert judge.base_times() == {}


def test_no_attempts_are_no_judgement() -> None:
    assert Judge(CONFIG).judge([]) == []


def test_an_aborted_step_is_neither_punished_nor_paid() -> None:
    aborted = step(ProblemKind.UNCLOSED_CALL, finish_reason=FinishReason.ABORT)
    assert only(Judge(CONFIG).judge([attempt(steps=(aborted,), perf=0.0)])).step_rewards == (0.0,)


def test_parallel_calls_are_timed_once() -> None:
    calls = (call(1, 100.0, 103.0), call(1, 100.0, 104.0), call(1, 101.0, 106.0))
    parallel = Attempt(episode("e", calls), (GOOD,) * 3, Verdict(1.0))
    judge = Judge(CONFIG)
    judge.judge([parallel])
    assert judge.base_times() == {"t": [6.0]}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_perf_that_is_no_number_is_refused_by_name(bad: float) -> None:
    with pytest.raises(RecordError, match="Verdict: perf: expected a number from 0 to 1"):
        attempt("broken", perf=bad)


def test_evidence_that_is_no_json_is_refused_by_name() -> None:
    with pytest.raises(RecordError, match="Episode broken: evidence: expected JSON values only"):
        Attempt(episode("broken"), (), Verdict(1.0, {"score": math.nan}))
    kept = only(Judge(CONFIG).judge([Attempt(episode("e"), (), Verdict(1.0, {"tests": [1, 2]}))]))
    assert kept.episode.reward is not None
    assert kept.episode.reward.evidence["verifier"] == {"tests": [1, 2]}


@dataclass(frozen=True)
class BrokenRule:
    value: float
    name: str = "broken_rule"
    weight: float = -1.0

    def measure(self, step: Step) -> float:
        return self.value


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.5, 1.5])
def test_a_rule_with_an_invalid_measure_is_refused_by_name(bad: float) -> None:
    judge = Judge(CONFIG, rules=(BrokenRule(bad),))
    with pytest.raises(RecordError, match="Episode e: call 0: rule broken_rule: expected a measure from 0 to 1"):
        judge.judge([attempt()])
    assert judge.base_times() == {}


def test_rules_of_ones_own_take_the_place_of_the_configured_ones() -> None:
    judge = Judge(CONFIG, rules=(BrokenRule(0.5, "half"),))
    assert only(judge.judge([attempt(perf=0.0, steps=(MALFORMED,))])).step_rewards == (-0.05,)
    with pytest.raises(ConfigError, match="a different name for each"):
        Judge(CONFIG, rules=(StructureRule(0.1), StructureRule(0.2)))


def test_attempts_at_two_tasks_are_refused() -> None:
    with pytest.raises(RecordError, match=r"one task, received \['t', 'u'\]"):
        Judge(CONFIG).judge([attempt("a"), attempt("b", task="u")])


def test_steps_are_one_per_call() -> None:
    with pytest.raises(RecordError, match="Episode e: steps: expected one per call, 0, received 1"):
        Attempt(episode("e"), (GOOD,), Verdict(1.0))


def test_without_rules_and_speed_the_reward_is_the_verdict() -> None:
    config = RewardConfig(alpha=0.0, beta=0.0, rules=RulesConfig())
    assert only(Judge(config).judge([attempt(perf=0.25, steps=(MALFORMED, GOOD))])).step_rewards == (0.0, 0.25)


@pytest.mark.parametrize(
    ("mode", "reward", "rewards", "total"),
    [
        ("replace", 0.3, (0.0, 0.3), 0.3),
        ("replace", (0.5, -0.25), (0.5, -0.25), 0.25),
        ("add", 0.3, (-0.1, 1.3), 1.2),
        ("add", (0.5, -0.25), (0.4, 0.75), 1.15),
        ("replace", None, (0.0, 0.0), 0.0),
    ],
)
def test_a_reward_function_replaces_or_adds(
    mode: Literal["replace", "add"], reward: float | tuple[float, ...] | None, rewards: tuple[float, ...], total: float
) -> None:
    rules = RulesConfig(malformed_call=-1.0, structured_step=0.0)
    config = RewardConfig(alpha=0.1, beta=0.0, rules=rules, function="my_reward.py:score", mode=mode)
    judged = only(Judge(config).judge([attempt(steps=(MALFORMED, GOOD), reward=reward)]))
    assert judged.step_rewards == pytest.approx(rewards)
    assert judged.episode.reward is not None
    assert judged.episode.reward.total == pytest.approx(total)
    assert judged.episode.reward.perf == 1.0
    assert judged.episode.reward.evidence["function"] == pytest.approx(sum(np.atleast_1d(reward or 0.0)))


def test_rewards_of_a_function_are_one_per_call() -> None:
    with pytest.raises(RecordError, match=r"Episode e: verdict.reward: expected one per call, 1, received 2"):
        attempt(reward=(1.0, 2.0))


def test_replacing_without_a_function_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'set reward.function = "FILE.py:NAME"'):
        build(RewardConfig, {"mode": "replace"})
