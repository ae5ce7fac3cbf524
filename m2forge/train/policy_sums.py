"""Accumulates per-edge sums over the packs of a step over trees, and computes its metrics.

Sums stay on the device, in float64, until the metrics are read; they are summed over ranks first, so every rank reports
the whole step. Metrics are unweighted means over loss edges, except the losses, which are weighted like the step's
loss.

    ratio_share/<bin>   share of edges by importance ratio r = π / π_old
    kl_k3, kl_k1        KL(π_old ‖ π), estimated as the mean of r − 1 − log r, and of − log r
    entropy             entropy of the distribution at the sampling temperature
    version_lag         off-policy lag: optimizer steps since a token was sampled

Shapes: M loss edges, B bins.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from m2forge.train.batch import TreeBatch
from m2forge.train.config import PolicyConfig
from m2forge.train.loss.policy import PolicyLoss, is_clipped
from m2forge.train.loss.ratio import importance_ratio
from m2forge.train.parallel import Ranks

RATIO_BOUNDS = (0.1, 0.5, 0.8, 0.95, 1.05, 1.25, 2.0, 5.0)
"""Boundaries between the histogram's bins."""


@dataclass(frozen=True)
class StepCounts:
    """Totals of a step over trees, over all ranks."""

    weight: float
    """Sum of the weights of all edges."""
    num_edges: float
    num_input_tokens: float
    num_tokens: float
    """Tokens computed, without padding."""
    num_replayed: float = 0.0
    """Computed tokens whose recorded routing is replayed."""


class PolicySums:
    def __init__(self, config: PolicyConfig, num_mtp: int, device: torch.device, version: int | None) -> None:
        """`version`: policy version being trained, if known."""
        self.config, self.version = config, version
        self._names = ("loss", *(f"mtp_loss/{depth + 1}" for depth in range(num_mtp)), "entropy", "advantage_mean")
        if version is not None:
            self._names += ("version_lag",)
        if config.loss != "sft":
            self._names += ("ratio_mean", "clipped_share", "kl_k3", "kl_k1", *ratio_names())
        self._sums = torch.zeros(len(self._names), dtype=torch.float64, device=device)
        self._ratio_max = self._sums.new_zeros(())
        self.logp: list[Tensor] = []
        """Logprobs of each pack's edges, in order."""
        self._bounds = torch.tensor(RATIO_BOUNDS, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, batch: TreeBatch, loss: PolicyLoss) -> None:
        self.logp.append(loss.logp_M.detach())
        values = [loss.main, *loss.mtp, loss.entropy_M.sum(), batch.advantage_M.sum()]
        if self.version is not None:
            values.append((self.version - batch.version_M).sum())
        if self.config.loss != "sft":
            values += self._ratio_values(batch, loss)
        self._sums += torch.stack([value.double() for value in values])

    def _ratio_values(self, batch: TreeBatch, loss: PolicyLoss) -> list[Tensor]:
        ratio_M = importance_ratio(loss.logp_M, batch.old_M)
        log_ratio_M = loss.logp_M - batch.old_M
        bin_M = torch.bucketize(ratio_M.double(), self._bounds, right=True)
        count_B = (bin_M == torch.arange(len(RATIO_BOUNDS) + 1, device=bin_M.device)[:, None]).sum(-1)
        if ratio_M.numel():
            self._ratio_max = torch.maximum(self._ratio_max, ratio_M.max().double())
        clipped_M = is_clipped(self.config, ratio_M, batch.advantage_M)
        k3_M = ratio_M - 1 - log_ratio_M
        return [ratio_M.sum(), clipped_M.sum(), k3_M.sum(), -log_ratio_M.sum(), *count_B.unbind()]

    def figures(self, counts: StepCounts, ranks: Ranks) -> dict[str, Tensor]:
        # Each rank writes its largest ratio to its own index, so that a sum gathers them all.
        largest = self._sums.new_zeros(ranks.num_ranks)
        largest[ranks.rank] = self._ratio_max
        sums = ranks.sum(torch.cat((self._sums, largest)))
        figures = {}
        for name, value in zip(self._names, sums[: len(self._names)].unbind(), strict=True):
            is_weighted = name == "loss" or name.startswith("mtp_loss/")
            figures[name] = value if is_weighted else value / counts.num_edges
        if self.config.loss != "sft":
            figures["ratio_max"] = sums[len(self._names) :].max()
        return figures


def ratio_names() -> tuple[str, ...]:
    ends = ("0", *(f"{bound:g}" for bound in RATIO_BOUNDS), "inf")
    return tuple(f"ratio_share/{low}-{high}" for low, high in pairwise(ends))
