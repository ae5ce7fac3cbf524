"""Attempts at one task in, judged episodes out: each with its reward, and the reward of each of its steps.

All attempts of a group are measured against the same baseline time, which is known before the first of them is judged,
so their order changes no reward. A task that nobody has solved yet has none: then it is the median of the passing
attempts at hand. Passing are those that were completed, with a perf of at least `pass_perf`; they become part of the
baseline afterwards.

A perf or a measure that is no finite number, or evidence that is no JSON, is refused with a `RecordError` that names
the episode, and the baseline times stay as they were.
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
    """An episode with what is needed to judge it."""

    episode: Episode
    steps: tuple[Step, ...]
    """One per call."""
    perf: float
    """The verifier's value."""
    evidence: Mapping[str, JsonValue] = field(default_factory=dict)
    """What the verifier saw. JSON values only."""

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
    """An episode with its reward, and r_t of its calls."""

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
        """`rules`: in place of the configured ones. `base_times`: the state of an earlier judge, to go on from."""
        self._config = config
        self._rules = make_rules(config.rules) if rules is None else tuple(rules)
        names = [rule.name for rule in self._rules]
        if len(set(names)) < len(names):
            raise ConfigError(f"rules: expected a different name for each, received {names}")
        self._base_times = BaseTimes(config.speed, base_times)

    def judge(self, attempts: Sequence[Attempt]) -> list[Judged]:
        """Judge attempts at one task together, and let the passing ones move its baseline time."""
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
        """JSON for a checkpoint: a judge made with it goes on exactly."""
        return self._base_times.state()

    def _passed(self, attempt: Attempt) -> bool:
        """Completed, by at least one step, and solved."""
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
    """With one another's rewards, paid at the last step: at random, but the same whenever this group is judged.

    Whole rewards change hands, those of the rules too: what stayed with its attempt would still teach.
    """
    rewards = [judged.episode.reward for judged in group]
    random.Random("/".join(judged.episode.id for judged in group)).shuffle(rewards)
    return [_paid(judged, reward) for judged, reward in zip(group, rewards, strict=True)]


def _paid(judged: Judged, reward: Reward | None) -> Judged:
    """With this reward instead of its own. The evidence stays."""
    episode = judged.episode
    assert reward is not None
    assert episode.reward is not None
    paid = replace(episode, reward=replace(reward, evidence=episode.reward.evidence))
    return Judged(paid, compose([0.0] * len(episode.calls), 0.0, reward.total, alpha=0.0, beta=0.0))


def _steps_of_rules(measures: Sequence[Mapping[str, float]]) -> dict[str, list[JsonValue]]:
    """For every rule that applied anywhere: index of the step and measure."""
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
