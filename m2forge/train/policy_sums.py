"""What the packs of a step over trees add up, edge by edge, and the figures that come of it.

Sums stay on the device, in float64, until somebody reads the figures; those of several ranks are added first, so every
rank reports the whole step. Figures are means over loss edges, each alike, except the losses, which are weighted as
the step's loss is.

    ratio_share/<bin>   share of edges by importance ratio r = π / π_old
    kl_k3, kl_k1        KL(π_old ‖ π), estimated as the mean of r − 1 − log r, and of − log r
    entropy             of the distribution at the temperature that was sampled at
    version_lag         optimizer steps since a token was sampled

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
"""Between the bins of the histogram."""


@dataclass(frozen=True)
class StepCounts:
    """What a step over trees holds, over all ranks."""

    weight: float
    """Of all edges together."""
    num_edges: float
    num_input_tokens: float
    num_tokens: float
    """Tokens that are computed, padding left out."""
    num_replayed: float = 0.0
    """Of these, tokens that go to experts that were recorded."""


class PolicySums:
    def __init__(self, config: PolicyConfig, num_mtp: int, device: torch.device, version: int | None) -> None:
        """`version`: step of the policy that is trained, where it is known."""
        self.config, self.version = config, version
        self._names = ("loss", *(f"mtp_loss/{depth + 1}" for depth in range(num_mtp)), "entropy", "advantage_mean")
        if version is not None:
            self._names += ("version_lag",)
        if config.loss != "sft":
            self._names += ("ratio_mean", "clipped_share", "kl_k3", "kl_k1", *ratio_names())
        self._sums = torch.zeros(len(self._names), dtype=torch.float64, device=device)
        self._ratio_max = self._sums.new_zeros(())
        self.logp: list[Tensor] = []
        """Of the edges of each pack, as they came."""
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
        # Each rank's largest ratio in a place of its own, so that a sum hands them all round.
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
