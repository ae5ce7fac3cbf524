"""CISPO: every token keeps its gradient; only the weight of that gradient is clipped.

    term = − sg( min(r, max_ratio) ) · A · logp,    r = π / π_old of the token

    value = − min(r, max_ratio) · A · logp
    slope = − min(r, max_ratio) · A

sg: no gradient flows through the ratio. There is no lower bound and no KL term. The loss of a step is the mean of the
terms over all its sampled tokens, unless samples are weighted otherwise.
"""

from torch import Tensor

from m2forge.train.loss.ratio import importance_ratio


def cispo(logp_M: Tensor, old_M: Tensor, advantage_M: Tensor, max_ratio: float) -> tuple[Tensor, Tensor]:
    slope_M = -importance_ratio(logp_M, old_M).clamp(max=max_ratio) * advantage_M
    return slope_M * logp_M, slope_M
