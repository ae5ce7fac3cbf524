"""The importance ratio of a sampled token: how much likelier it is under the network now than when it was sampled.

    r = π(token) / π_old(token) = exp( min(logp − old, MAX_LOG_RATIO) )

A ratio that far from 1 means that the old log-probability is of another policy. The bound is there so that no infinity
appears and, times 0, becomes NaN; it is no clip: cispo clips long before it, ppo_clip does so only where A > 0.
"""

from torch import Tensor

MAX_LOG_RATIO = 20.0


def importance_ratio(logp_M: Tensor, old_M: Tensor) -> Tensor:
    return (logp_M - old_M).clamp(max=MAX_LOG_RATIO).exp()
