"""Sums over the packs of a step, and the metrics computed from them; logprobs of the trained tokens.

Sums stay on the device, in float64, until the metrics are read; they are summed over ranks first, so every rank reports
the whole step.

Shapes: M loss edges, B bins, T tags.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from m2forge.records import FloatArray
from m2forge.train.batch import Batch, TreeBatch
from m2forge.train.config import PolicyConfig
from m2forge.train.loss.next_token import NextTokenLoss
from m2forge.train.loss.policy import PolicyLoss, importance_ratio, is_clipped
from m2forge.train.parallel import Ranks
from m2forge.tree.flat import FlatTree
from m2forge.tree.token_tree import Sample, TokenTree

RATIO_BOUNDS = (0.1, 0.5, 0.8, 0.95, 1.05, 1.25, 2.0, 5.0)
"""Boundaries between the histogram's bins."""


# -- a step over trees -------------------------------------------------------------------------------------------------


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
    """Sums over the edges of a step over trees. Metrics are unweighted means over loss edges, except the losses, which
    are weighted like the step's loss.

        ratio_share/<bin>   share of edges by importance ratio r = π / π_old
        kl_k3, kl_k1        KL(π_old ‖ π), estimated as the mean of r − 1 − log r, and of − log r
        entropy             entropy of the distribution at the sampling temperature
        version_lag         off-policy lag: optimizer steps since a token was sampled
    """

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


class TokenLogprobs:
    """Logprobs of the tokens that a step trained, under the policy before the update, as the loss computed them. They
    are copied to the host asynchronously, as one array over all packs, and are complete when the step's report has
    been read, so they cause no host sync.
    """

    def __init__(self, trees: Sequence[TokenTree], packs: Sequence[FlatTree], logp: Sequence[Tensor]) -> None:
        """`logp`: logprobs of each pack's edges."""
        self._trees, self._packs = trees, packs
        every_M = torch.cat(list(logp)).float() if logp else torch.empty(0)
        self._logp_M = every_M.to("cpu", non_blocking=True)

    def read(self) -> list[tuple[Sample, FloatArray]]:
        """Each trained sample with one logprob per sampled token. The device must have finished the step."""
        found: list[tuple[Sample, FloatArray]] = []
        logp_M: FloatArray = self._logp_M.numpy()
        first = 0
        for pack in self._packs:
            for index, (tree, sample) in enumerate(zip(pack.tree_S.tolist(), pack.sample_S.tolist(), strict=True)):
                edges = pack.edges_of(index)
                found.append((self._trees[tree].samples[sample], logp_M[first + edges.start : first + edges.stop]))
            first += pack.num_edges
        return found


# -- a step over rows --------------------------------------------------------------------------------------------------


class RowSums:
    """Sums over the targets of a step over rows. Draft agreement alone is measured on one pack of one rank."""

    def __init__(self, tag_names: Sequence[str], num_mtp: int, device: torch.device) -> None:
        self.tag_names = tuple(tag_names)
        self.num_packs = 0
        self.agreement: list[Tensor] = []
        """Draft agreement of each MTP module, if measured."""
        self._nll_T = torch.zeros(max(1, len(self.tag_names)), dtype=torch.float64, device=device)
        self._edges_T = torch.zeros_like(self._nll_T)
        self._mtp_K = torch.zeros(num_mtp, dtype=torch.float64, device=device)

    def add(self, batch: Batch, loss: NextTokenLoss) -> None:
        self.num_packs += 1
        tag_M = batch.tag_M if self.tag_names else torch.zeros_like(batch.tag_M)
        # One row per tag instead of a scatter: a fixed summation order gives identical bits each time.
        is_tag_TM = tag_M == torch.arange(self._nll_T.shape[0], device=tag_M.device)[:, None]
        self._nll_T += is_tag_TM.double() @ loss.nll_M.double()
        self._edges_T += is_tag_TM.sum(-1)
        if loss.mtp_sums:
            self._mtp_K += torch.stack(loss.mtp_sums)

    def sums(self) -> Tensor:
        """All sums as one vector."""
        return torch.cat((self._nll_T, self._edges_T, self._mtp_K))

    def figures(self, num_edges: float, ranks: Ranks) -> dict[str, Tensor]:
        """`num_edges`: loss edges of the whole step."""
        return self.figures_of(ranks.sum(self.sums()), num_edges)

    def figures_of(self, sums: Tensor, num_edges: float | None = None) -> dict[str, Tensor]:
        """The metrics of a vector as `sums` returns it. `num_edges`: its loss edges, counted if not given."""
        num_tags = self._nll_T.shape[0]
        nll_T, edges_T, mtp_K = sums.split((num_tags, num_tags, self._mtp_K.shape[0]))
        num_edges = float(edges_T.sum()) if num_edges is None else num_edges
        figures = {"loss": nll_T.sum() / max(1.0, num_edges)}
        for index, name in enumerate(self.tag_names):
            figures[f"loss/{name}"] = nll_T[index] / edges_T[index]
        for depth, total in enumerate(mtp_K, start=1):
            figures[f"mtp_loss/{depth}"] = total / max(1.0, num_edges)
        for depth, share in enumerate(self.agreement, start=1):
            figures[f"draft_agreement/{depth}"] = share
        return figures
