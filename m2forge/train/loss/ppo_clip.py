"""PPO's clipped surrogate, for comparison: a token whose ratio leaves the interval in the direction of its advantage
gets no gradient.

    term = − min( r · A, clip(r, 1 − low, 1 + high) · A ),    r = π / π_old of the token

    value = term
    slope = − r · A  where r · A is the lesser,  else 0
"""

import torch
from torch import Tensor

from m2forge.train.loss.ratio import importance_ratio


def ppo_clip(logp_M: Tensor, old_M: Tensor, advantage_M: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    ratio_M = importance_ratio(logp_M, old_M)
    free_M = ratio_M * advantage_M
    bound_M = ratio_M.clamp(1 - low, 1 + high) * advantage_M
    return -torch.minimum(free_M, bound_M), torch.where(free_M <= bound_M, -free_M, 0.0)
