"""The importance ratio of a sampled token: its probability under the current policy over that when it was sampled.

    r = π(token) / π_old(token) = exp( min(logp − old, MAX_LOG_RATIO) )

A ratio that far from 1 means that the old logprob belongs to another policy. The bound prevents an infinity that, times
0, becomes NaN; it is not a clip: cispo clips far below it, ppo_clip only where A > 0.
"""

from torch import Tensor

MAX_LOG_RATIO = 20.0


def importance_ratio(logp_M: Tensor, old_M: Tensor) -> Tensor:
    return (logp_M - old_M).clamp(max=MAX_LOG_RATIO).exp()
