"""Step rewards in, an advantage and a loss weight for every completion call out.

    G_it = Σ_{p≥t} γ^(p−t) r_ip                 reward to go of call t of episode i; R_i = G_i1 is the episode's return
    A_it = (G_it − B_i) / s

    leave_one_out     B_i = mean of R_j over the other episodes j of the group
    group_mean        B_i = mean of R_j over all episodes of the group
    trajectory_mean   B_i = mean of G_it over the calls t of the episode itself

    s = 1, or max(min_std, the sample standard deviation of R_j over the group, or over the batch)

leave_one_out is unbiased, since B_i does not depend on episode i; for a group of G its advantages are G / (G − 1) times
those of group_mean. trajectory_mean needs no group and only ranks the calls within an episode: with γ = 1, a reward
paid only at the end gives advantage 0. The only episode of a group has, by default, advantage 0. An episode without
calls has no sample and says nothing about the policy: every mean leaves it out.

Three attempts of one call with rewards 1, 0 and 0.5, leave_one_out: B = (0.25, 0.75, 0.5), A = (0.75, −0.75, 0).
One attempt with r = (0.1, 0, 1), γ = 0.5: G = (0.35, 0.5, 1); trajectory_mean: B = 0.6167.

The loss weight is the factor of each of a sample's token terms in the loss:

    token_mean     w_i = 1 / Σ_j |o_j|                  every token of the batch counts equally: CISPO as defined
    episode_mean   w_i = 1 / (E · Σ_{j in e(i)} |o_j|)   every episode counts equally, whatever its number of samples

|o_i| is the number of sampled tokens of sample i, e(i) its episode, E the number of episodes with any token. Either way
Σ_i w_i·|o_i| = 1, so the loss of a batch is the plain sum of weighted terms, however they are split into packs or
ranks. The batch is that of the optimizer step.

Two episodes, of 10 + 30 and of 60 tokens: token_mean gives all three samples 1/100; episode_mean gives 1/80, 1/80 and
1/120, so that each episode has 1/2 in total.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from m2forge.errors import RecordError
from m2forge.records import CallRole
from m2forge.reward.config import AdvantageConfig, Baseline, Weighting
from m2forge.reward.judge import Judged

WeightArray = npt.NDArray[np.float64]
ReturnArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Advantage:
    """Advantage and loss weight of one sample, a call of an episode."""

    episode: int
    """Index of the episode in the batch, with its groups concatenated."""
    call: int
    """Index among the episode's calls."""
    value: float
    """Â: the advantage of each of its sampled tokens."""
    weight: float
    """Factor of each of its token terms in the loss; over the sampled tokens of the batch it sums to 1."""

    def __post_init__(self) -> None:
        for name in ("value", "weight"):
            if not math.isfinite(getattr(self, name)):
                raise RecordError(
                    f"Advantage of episode {self.episode}, call {self.call}: {name}: expected a finite number, "
                    f"received {getattr(self, name)!r}"
                )


def assign_advantages(groups: Sequence[Sequence[Judged]], config: AdvantageConfig) -> list[Advantage]:
    """One advantage per call, in episode order. `groups` is the whole batch of an optimizer step."""
    for group in groups:
        tasks = sorted({judged.episode.task.id for judged in group})
        if len(tasks) > 1:
            raise RecordError(f"advantages: expected groups of attempts at one task, received one with {tasks}")
    # A sum that overflows yields an advantage that `Advantage` refuses by name below.
    with np.errstate(over="ignore", invalid="ignore"):
        values = episode_advantages([[judged.step_rewards for judged in group] for group in groups], config)
    episodes = [judged.episode for group in groups for judged in group]
    pairs = [(index, call) for index, episode in enumerate(episodes) for call in range(len(episode.calls))]
    num_tokens = [episodes[index].calls[call].response_ids.size for index, call in pairs]
    weights = WEIGHTINGS[config.weighting](num_tokens, [index for index, _ in pairs])
    return [
        Advantage(index, call, float(values[index][call]), float(weight))
        for (index, call), weight in zip(pairs, weights, strict=True)
    ]


def episode_advantages(groups: Sequence[Sequence[Sequence[float]]], config: AdvantageConfig) -> list[ReturnArray]:
    """A_it of every episode, with groups concatenated, from the step rewards of each episode of each group."""
    to_go = [[reward_to_go(rewards, config.gamma) for rewards in group] for group in groups]
    batch = [g for group in to_go for g in group]
    batch_scale = _std(batch, config) if config.normalisation == "batch_std" else 1.0
    advantages = []
    for group in to_go:
        scale = _std(group, config) if config.normalisation == "group_std" else batch_scale
        baselines = episode_baselines(group, config.baseline)
        for g, baseline in zip(group, baselines, strict=True):
            if baseline is not None:
                advantages.append((g - baseline) / scale)
            elif config.single == "zero_baseline":
                advantages.append(g / scale)
            else:
                advantages.append(np.zeros_like(g))
    return advantages


def trained_calls(roles: Sequence[str], num_calls: int, config: AdvantageConfig) -> list[int]:
    """Indices of an episode's calls that are trained. `roles`: their roles in order; calls beyond them are main."""
    skipped = {
        role
        for role, is_trained in ((CallRole.SIDE, config.side_calls), (CallRole.SUB_AGENT, config.sub_agents))
        if not is_trained
    }
    return [call for call in range(num_calls) if call >= len(roles) or roles[call] not in skipped]


def select_rewards(rewards: Sequence[float], calls: Sequence[int]) -> list[float]:
    """Step rewards of the selected calls. That of another call goes to the nearest selected one before it, else to the
    first, so that the sum stays: a side call may be the last, where the verifier's score is paid."""
    selected = [0.0] * len(calls)
    for call, reward in enumerate(rewards):
        if calls:
            selected[max(0, bisect_right(calls, call) - 1)] += reward
    return selected


def reward_to_go(rewards: Sequence[float], gamma: float) -> ReturnArray:
    """G_t of every step of an episode."""
    to_go = np.zeros(len(rewards))
    later = 0.0
    for step in reversed(range(len(rewards))):
        if not math.isfinite(rewards[step]):
            raise RecordError(f"reward of step {step}: expected a finite number, received {rewards[step]!r}")
        later = rewards[step] + gamma * later
        to_go[step] = later
    return to_go


def episode_baselines(to_go: Sequence[ReturnArray], kind: Baseline) -> list[float | None]:
    """B_i of every episode of a group; None if there is nothing to compare it with."""
    if kind == "trajectory_mean":
        return [float(g.mean()) if g.size else None for g in to_go]
    returns = _returns(to_go)
    if returns.size < 2:
        return [None] * len(to_go)
    total = float(returns.sum())
    if kind == "group_mean":
        return [total / returns.size] * len(to_go)
    return [(total - float(g[0])) / (returns.size - 1) if g.size else None for g in to_go]


def _returns(to_go: Sequence[ReturnArray]) -> ReturnArray:
    return np.array([g[0] for g in to_go if g.size])


def _std(to_go: Sequence[ReturnArray], config: AdvantageConfig) -> float:
    """Standard deviation of the returns, at least `min_std`; 1 if there are fewer than two."""
    returns = _returns(to_go)
    return max(config.min_std, float(returns.std(ddof=1))) if returns.size > 1 else 1.0


def token_mean(num_tokens: Sequence[int], episodes: Sequence[int]) -> WeightArray:
    """A weight per sample, given its sampled tokens and the index of its episode."""
    counts, _ = _require_counts(num_tokens, episodes)
    return np.full(counts.size, 1.0 / max(1, int(counts.sum())))


def episode_mean(num_tokens: Sequence[int], episodes: Sequence[int]) -> WeightArray:
    """A weight per sample, given its sampled tokens and the index of its episode."""
    counts, owners = _require_counts(num_tokens, episodes)
    totals = np.bincount(owners, counts)
    num_episodes = max(1, np.count_nonzero(totals))
    # An episode with only empty completions has no token term, so any finite weight works.
    weights: WeightArray = 1.0 / (num_episodes * np.maximum(totals[owners], 1.0))
    return weights


WEIGHTINGS: Mapping[Weighting, Callable[[Sequence[int], Sequence[int]], WeightArray]] = {
    "token_mean": token_mean,
    "episode_mean": episode_mean,
}


def _require_counts(
    num_tokens: Sequence[int], episodes: Sequence[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    if len(num_tokens) != len(episodes):
        raise RecordError(f"weights: episodes: expected one per sample, {len(num_tokens)}, received {len(episodes)}")
    counts, owners = np.asarray(num_tokens, np.int64), np.asarray(episodes, np.int64)
    for name, values in (("num_tokens", counts), ("episodes", owners)):
        if values.size and values.min() < 0:
            raise RecordError(f"weights: {name}: expected 0 or more, received {int(values.min())}")
    return counts, owners
