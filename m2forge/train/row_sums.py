"""Accumulates per-target sums over the packs of a step over rows, and computes its metrics.

Sums stay on the device, in float64, until the metrics are read; they are summed over ranks first, so every rank reports
the whole step. Draft agreement alone is measured on one pack of one rank.

Shapes: M loss edges, T tags.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from m2forge.train.batch import Batch
from m2forge.train.loss.next_token import NextTokenLoss
from m2forge.train.parallel import Ranks


class RowSums:
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
