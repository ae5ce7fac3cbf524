"""Attempts at one task in, rewarded episodes out: each with its reward and its step rewards.

All attempts of a group are compared with the same baseline time, which is fixed before the first of them is rewarded,
so their order does not matter. For a task that no attempt has solved yet, it is the median of the group's passing
attempts. Attempts pass if they completed with a perf of at least `pass_perf`; they are added to the baseline
afterwards.

A perf or measure that is not finite, or evidence that is not JSON, is refused with a `RecordError` that names the
episode, and the baseline times stay unchanged.
"""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from m2forge.errors import ConfigError, RecordError
from m2forge.records import Episode, JsonValue, Reward
from m2forge.reward.base_time import BaseTimes
from m2forge.reward.composition import compose, process_rewards
from m2forge.reward.config import RewardConfig
from m2forge.reward.rule import Rule, make_rules, measure
from m2forge.reward.speed import speed
from m2forge.reward.step import Step, episode_time_s


@dataclass(frozen=True, slots=True)
class Attempt:
    """An episode with the data needed to reward it."""

    episode: Episode
    steps: tuple[Step, ...]
    """Parsed steps, one per call."""
    perf: float
    """The verifier's score."""
    evidence: Mapping[str, JsonValue] = field(default_factory=dict)
    """The verifier's evidence, as JSON values."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps))
        _require_one_per_call(self.episode, "steps", len(self.steps))
        _require_finite(self.episode, "perf", self.perf)
        try:
            json.dumps(self.evidence, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RecordError(f"Episode {self.episode.id}: evidence: expected JSON values only ({error})") from error


@dataclass(frozen=True, slots=True)
class Judged:
    """An episode with its reward, and r_t of each call."""

    episode: Episode
    step_rewards: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "step_rewards", tuple(self.step_rewards))
        _require_one_per_call(self.episode, "step_rewards", len(self.step_rewards))
        for index, reward in enumerate(self.step_rewards):
            _require_finite(self.episode, f"step_rewards[{index}]", reward)
        _require_finite(self.episode, "the sum of step_rewards", sum(map(abs, self.step_rewards)))


class Judge:
    def __init__(
        self,
        config: RewardConfig,
        *,
        rules: Sequence[Rule] | None = None,
        base_times: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """`rules`: replace the configured ones. `base_times`: state of an earlier judge to resume from."""
        self._config = config
        self._rules = make_rules(config.rules) if rules is None else tuple(rules)
        names = [rule.name for rule in self._rules]
        if len(set(names)) < len(names):
            raise ConfigError(f"rules: expected a different name for each, received {names}")
        self._base_times = BaseTimes(config.speed, base_times)

    def judge(self, attempts: Sequence[Attempt]) -> list[Judged]:
        """Reward the attempts at one task together, then update its baseline time with the passing ones."""
        if not attempts:
            return []
        tasks = sorted({attempt.episode.task.id for attempt in attempts})
        if len(tasks) > 1:
            raise RecordError(f"judge: attempts: expected attempts at one task, received {tasks}")
        times_s = [episode_time_s(attempt.episode) for attempt in attempts if self._passed(attempt)]
        base_s = self._base_times.base_s(tasks[0], times_s)
        judged = [self._judge(attempt, base_s) for attempt in attempts]
        self._base_times.add(tasks[0], times_s)
        return _dealt_anew(judged) if self._config.shuffled else judged

    def base_times(self) -> dict[str, list[float]]:
        """State for a checkpoint, as JSON values: a judge created with it continues exactly."""
        return self._base_times.state()

    def _passed(self, attempt: Attempt) -> bool:
        """Whether the attempt has at least one step, completed, and solved the task."""
        episode = attempt.episode
        return bool(episode.calls) and episode.failure is None and attempt.perf >= self._config.pass_perf

    def _judge(self, attempt: Attempt, base_s: float | None) -> Judged:
        config, episode = self._config, attempt.episode
        measures = [self._measure(episode, index, step) for index, step in enumerate(attempt.steps)]
        process = process_rewards(self._rules, measures, config.credit)
        time_s, earned = episode_time_s(episode), 0.0
        if self._passed(attempt) and base_s is not None:
            earned = speed(config.speed.shape, time_s, base_s, config.speed.half_ratio)
        whole = math.fsum(process)
        reward = Reward(
            process=whole,
            speed=earned,
            perf=attempt.perf,
            total=config.alpha * whole + config.beta * earned + attempt.perf,
            evidence={
                "verifier": attempt.evidence,
                "rules": _steps_of_rules(measures),
                "time_s": time_s,
                "base_s": base_s,
            },
        )
        rewards = compose(process, earned, attempt.perf, alpha=config.alpha, beta=config.beta)
        return Judged(replace(episode, reward=reward), rewards)

    def _measure(self, episode: Episode, index: int, step: Step) -> dict[str, float]:
        measures = measure(self._rules, step)
        for name, value in measures.items():
            if not 0.0 <= value <= 1.0:
                where = f"Episode {episode.id}: call {index}: rule {name}"
                raise RecordError(f"{where}: expected a measure from 0 to 1, received {value!r}")
        return measures


def _dealt_anew(group: Sequence[Judged]) -> list[Judged]:
    """Permute the rewards within the group at random, deterministically per group, and pay them at the last step.

    Whole rewards are permuted, including those of the rules: any part left with its attempt would still be a signal.
    """
    rewards = [judged.episode.reward for judged in group]
    random.Random("/".join(judged.episode.id for judged in group)).shuffle(rewards)
    return [_paid(judged, reward) for judged, reward in zip(group, rewards, strict=True)]


def _paid(judged: Judged, reward: Reward | None) -> Judged:
    """Replace the episode's reward; keeps its evidence."""
    episode = judged.episode
    assert reward is not None
    assert episode.reward is not None
    paid = replace(episode, reward=replace(reward, evidence=episode.reward.evidence))
    return Judged(paid, compose([0.0] * len(episode.calls), 0.0, reward.total, alpha=0.0, beta=0.0))


def _steps_of_rules(measures: Sequence[Mapping[str, float]]) -> dict[str, list[JsonValue]]:
    """Step index and measure wherever a rule applied, by rule."""
    found: dict[str, list[JsonValue]] = {}
    for index, step in enumerate(measures):
        for name, value in step.items():
            found.setdefault(name, []).append([index, value])
    return found


def _require_one_per_call(episode: Episode, name: str, count: int) -> None:
    if count != len(episode.calls):
        raise RecordError(
            f"Episode {episode.id}: {name}: expected one per call, {len(episode.calls)}, received {count}"
        )


def _require_finite(episode: Episode, name: str, value: float) -> None:
    if not math.isfinite(value):
        raise RecordError(f"Episode {episode.id}: {name}: expected a finite number, received {value!r}")
