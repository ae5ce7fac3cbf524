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
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from m2forge.errors import ConfigError, RecordError
from m2forge.records import Episode, JsonValue, Reward, Verdict, VerdictReason
from m2forge.reward.config import RewardConfig, SpeedConfig, SpeedShape
from m2forge.reward.rule import Rule, Step, episode_time_s, make_rules, measure

MAX_TASKS = 4096


@dataclass(frozen=True, slots=True)
class Attempt:
    """An episode with the data needed to reward it."""

    episode: Episode
    steps: tuple[Step, ...]
    """Parsed steps, one per call."""
    verdict: Verdict

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps))
        _require_one_per_call(self.episode, "steps", len(self.steps))
        if isinstance(self.verdict.reward, tuple):
            _require_one_per_call(self.episode, "verdict.reward", len(self.verdict.reward))
        try:
            json.dumps(self.verdict.evidence, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RecordError(f"Episode {self.episode.id}: evidence: expected JSON values only ({error})") from error

    @property
    def perf(self) -> float:
        return self.verdict.perf

    def function_rewards(self) -> list[float]:
        """The reward of `reward.function` at each step; that of the episode is paid at the last one."""
        reward, num_steps = self.verdict.reward, len(self.steps)
        if isinstance(reward, tuple):
            return list(reward)
        return [0.0] * (num_steps - 1) + [reward or 0.0] if num_steps else []


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
        return _shuffled(judged) if self._config.shuffled else judged

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
        total_process = math.fsum(process)
        total = config.alpha * total_process + config.beta * earned + attempt.perf
        rewards = compose(process, earned, attempt.perf, alpha=config.alpha, beta=config.beta)
        evidence: dict[str, JsonValue] = {
            "verifier": attempt.verdict.evidence,
            "rules": _steps_of_rules(measures),
            "time_s": time_s,
            "base_s": base_s,
        }
        if attempt.verdict.criteria:
            evidence["criteria"] = dict(attempt.verdict.criteria)
        if attempt.verdict.reason is not VerdictReason.JUDGED:
            evidence["reason"] = str(attempt.verdict.reason)
        if config.function is not None:
            own = attempt.function_rewards()
            evidence["function"] = math.fsum(own)
            is_added = config.mode == "add"
            rewards = tuple(is_added * reward + one for reward, one in zip(rewards, own, strict=True))
            total = is_added * total + math.fsum(own)
        reward = Reward(
            process=total_process,
            speed=earned,
            perf=attempt.perf,
            total=total,
            evidence=evidence,
        )
        return Judged(replace(episode, reward=reward), rewards)

    def _measure(self, episode: Episode, index: int, step: Step) -> dict[str, float]:
        measures = measure(self._rules, step)
        for name, value in measures.items():
            if not 0.0 <= value <= 1.0:
                where = f"Episode {episode.id}: call {index}: rule {name}"
                raise RecordError(f"{where}: expected a measure from 0 to 1, received {value!r}")
        return measures


def _shuffled(group: Sequence[Judged]) -> list[Judged]:
    """Permute the rewards within the group at random, deterministically per group, and pay them at the last step.

    All parts of the rewards are permuted, those of the rules too: any part left with its attempt would be a signal.
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
    measured: dict[str, list[JsonValue]] = {}
    for index, step in enumerate(measures):
        for name, value in step.items():
            measured.setdefault(name, []).append([index, value])
    return measured


def _require_one_per_call(episode: Episode, name: str, count: int) -> None:
    if count != len(episode.calls):
        raise RecordError(
            f"Episode {episode.id}: {name}: expected one per call, {len(episode.calls)}, received {count}"
        )


def _require_finite(episode: Episode, name: str, value: float) -> None:
    if not math.isfinite(value):
        raise RecordError(f"Episode {episode.id}: {name}: expected a finite number, received {value!r}")


# -- the reward of every step ------------------------------------------------------------------------------------------


def process_rewards(
    rules: Sequence[Rule], measures: Sequence[Mapping[str, float]], credit: Literal["shared", "full"]
) -> list[float]:
    """process_t of every step, from its rule measures by name."""
    share = 1.0 / max(1, len(measures)) if credit == "shared" else 1.0
    pay = {rule.name: rule.weight * (share if rule.weight > 0 else 1.0) for rule in rules}
    return [sum(pay[name] * value for name, value in step.items()) for step in measures]


def compose(process: Sequence[float], speed: float, perf: float, *, alpha: float, beta: float) -> tuple[float, ...]:
    """Composes the reward of every step of an episode from its three parts.

        r_t = α·process_t + β·speed_t + perf_t                                    t = 1 … n

        process_t = Σ_{w<0} w·m_t + Σ_{w>0} w·m_t / n          m_t: measures of the rules at step t, w their weights
        speed_t   = h(T / T_base)   at the last step of an attempt that was completed and passed, else 0
        perf_t    = perf            at the last step, else 0

    Speed is paid once, and a fast failure earns none. A credit is divided by the number of steps, so that together they
    earn at most w and taking more steps does not pay; with credit = "full" it is not divided. A penalty is never
    divided.

    α = β = 0.1, perf 1, speed 0.5, three steps, the first malformed (w = −1), the others well-structured (w = 0.2, so
    0.2 / 3 each): r = (−0.1, 0.02 / 3, 0.02 / 3 + 0.05 + 1), 0.9633 in total.

    r_t of every step. `speed` is 0 for an attempt that did not pass. An episode without steps has no rewards.
    """
    rewards = [alpha * value for value in process]
    if rewards:
        rewards[-1] += beta * speed + perf
    return tuple(rewards)


# -- speed -------------------------------------------------------------------------------------------------------------


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
    """The speed reward h(x): x = T / T_base is the wall-clock time of an attempt over the baseline time of its task.

        linear       h(x) = max(0, 1 − x / 2c)
        exponential  h(x) = 2^(−x / c)
        reciprocal   h(x) = 1 / (1 + x / c)
        step         h(x) = 1 if x ≤ c else 0

    c is `half_ratio`. Every h is non-increasing in x, from h(0) = 1 towards 0 and never below, so a slow solution is
    never penalized. At x = c the first three give 1/2, and

        c = 1         h(1/2)     h(1)       h(2)       h(4)
        linear        0.75       0.5        0          0
        exponential   0.7071     0.5        0.25       0.0625
        reciprocal    0.6667     0.5        0.3333     0.2
        step          1          1          0          0

    h(time_s / base_s).
    """
    if not (math.isfinite(time_s) and time_s >= 0):
        raise RecordError(f"speed: time_s: expected a finite number of at least 0, received {time_s!r}")
    if not (math.isfinite(base_s) and base_s > 0):
        raise RecordError(f"speed: base_s: expected a finite number above 0, received {base_s!r}")
    return SHAPES[shape](time_s / base_s / half_ratio)


# -- baseline times ----------------------------------------------------------------------------------------------------


class BaseTimes:
    """T_base of each task: the moving median of the times of its latest passing attempts.

    In: the times of attempts that completed and passed. Out: a baseline time per task that follows the policy: as
    attempts become faster, so does the baseline. It depends only on the sequence of times, and its state is JSON: an
    object created from it continues exactly. Only the `max_tasks` most recently updated tasks have a baseline, so that
    memory stays bounded with endless new tasks. Thread-safe.
    """

    def __init__(
        self,
        config: SpeedConfig,
        state: Mapping[str, Sequence[float]] | None = None,
        *,
        max_tasks: int = MAX_TASKS,
    ) -> None:
        """`state`: from an earlier `state()`. If the window is smaller now, the oldest times are dropped."""
        self._config, self._max_tasks = config, max_tasks
        self._lock = threading.Lock()
        self._times_s: dict[str, deque[float]] = {}
        """Times by task, the most recently updated task last."""
        for task_id, times_s in (state or {}).items():
            self.add(task_id, times_s)

    def base_s(self, task_id: str, group_times_s: Sequence[float] = ()) -> float | None:
        """The baseline time of a task; for one without passing attempts so far, the median of `group_times_s`, the
        passing attempts of the current group; None if there are none of those either."""
        with self._lock:
            times_s = list(self._times_s.get(task_id, ())) or group_times_s
        return max(statistics.median(times_s), self._config.min_base_s) if times_s else None

    def add(self, task_id: str, times_s: Iterable[float]) -> None:
        """Add the times of passing attempts; the first are evicted first."""
        times_s = list(times_s)
        for time_s in times_s:
            if not (math.isfinite(time_s) and time_s >= 0):
                raise RecordError(
                    f"baseline time of task {task_id}: expected finite times of at least 0 s, received {time_s!r}"
                )
        if not times_s:
            return
        with self._lock:
            known = self._times_s.pop(task_id, None) or deque(maxlen=self._config.window)
            known.extend(times_s)
            self._times_s[task_id] = known
            while len(self._times_s) > self._max_tasks:
                del self._times_s[next(iter(self._times_s))]

    def state(self) -> dict[str, list[float]]:
        with self._lock:
            return {task_id: list(times_s) for task_id, times_s in self._times_s.items()}
