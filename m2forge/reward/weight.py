"""Loss weights of samples: the factor of each of a sample's token terms in the loss.

    token_mean     w_i = 1 / Σ_j |o_j|                  every token of the batch counts equally: CISPO as defined
    episode_mean   w_i = 1 / (E · Σ_{j in e(i)} |o_j|)   every episode counts equally, whatever its number of samples

|o_i| is the number of sampled tokens of sample i, e(i) its episode, E the number of episodes with any token. Either way
Σ_i w_i·|o_i| = 1, so the loss of a batch is the plain sum of weighted terms, however they are split into packs or
ranks. The batch is that of the whole optimizer step.

Two episodes, of 10 + 30 and of 60 tokens: token_mean gives all three samples 1/100; episode_mean gives 1/80, 1/80 and
1/120, so that each episode has 1/2 in total.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from m2forge.errors import RecordError
from m2forge.reward.config import Weighting

WeightArray = npt.NDArray[np.float64]


def token_mean(num_tokens: Sequence[int], episodes: Sequence[int]) -> WeightArray:
    """A weight per sample, given its sampled tokens and the index of its episode."""
    counts, _ = _checked(num_tokens, episodes)
    return np.full(counts.size, 1.0 / max(1, int(counts.sum())))


def episode_mean(num_tokens: Sequence[int], episodes: Sequence[int]) -> WeightArray:
    """A weight per sample, given its sampled tokens and the index of its episode."""
    counts, owners = _checked(num_tokens, episodes)
    totals = np.bincount(owners, counts)
    num_episodes = max(1, np.count_nonzero(totals))
    # An episode with only empty completions has no token term, so any finite weight works.
    weights: WeightArray = 1.0 / (num_episodes * np.maximum(totals[owners], 1.0))
    return weights


WEIGHTINGS: Mapping[Weighting, Callable[[Sequence[int], Sequence[int]], WeightArray]] = {
    "token_mean": token_mean,
    "episode_mean": episode_mean,
}


def _checked(num_tokens: Sequence[int], episodes: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    if len(num_tokens) != len(episodes):
        raise RecordError(f"weights: episodes: expected one per sample, {len(num_tokens)}, received {len(episodes)}")
    counts, owners = np.asarray(num_tokens, np.int64), np.asarray(episodes, np.int64)
    for name, values in (("num_tokens", counts), ("episodes", owners)):
        if values.size and values.min() < 0:
            raise RecordError(f"weights: {name}: expected 0 or more, received {int(values.min())}")
    return counts, owners
