"""The mean over trials and its 95% confidence interval, clustered by task.

Trials of one task resemble each other, so the interval comes from the sums of the tasks' residuals. With trials y of G
tasks, N in all, of which task g has those in C(g):

    mean     = Σ y / N
    variance = G / (G - 1) · Σ_g (Σ_{i in C(g)} (y_i - mean))² / N²
    margin   = z · sqrt(variance), z = 1.96
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z = 1.959964
"""The 97.5% quantile of the standard normal distribution."""


@dataclass(frozen=True, slots=True)
class Mean:
    value: float
    margin: float
    """Half the width of the interval; NaN for a single task, which tells nothing of others."""


def clustered_mean(clusters: Sequence[Sequence[float]]) -> Mean:
    """`clusters`: the values of each task's trials; tasks without any do not count. Raises without a value."""
    clusters = [cluster for cluster in clusters if cluster]
    num = sum(map(len, clusters))
    mean = sum(map(sum, clusters)) / num
    if len(clusters) < 2:
        return Mean(mean, math.nan)
    residuals = [sum(value - mean for value in cluster) for cluster in clusters]
    variance = len(clusters) / (len(clusters) - 1) * sum(residual**2 for residual in residuals) / num**2
    return Mean(mean, Z * math.sqrt(variance))
