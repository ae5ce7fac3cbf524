"""Context parallelism: the ranks of a group share a pack; each holds a contiguous slice of about equal length.

    q, k, v of a rank's tokens → all-to-all → those of all tokens, some heads → attention → all-to-all → its tokens

Attention alone needs other tokens, and the MTP modules, whose input is the state of the token before. Every rank
attends over all tokens with 1 / R of the query heads, so all ranks see equally many keys, whatever the documents or
trees: no rank waits for another's longer paths. The key/value heads are divided too, up to one for each rank; beyond
that, ranks whose query heads share a key/value head receive the same keys and values.

A rank's losses, expert loads and gradients are those of its tokens, so all add up over the ranks like those of packs.

Shapes: R ranks of the group, N tokens, M loss edges, H query heads, G key/value heads, K head dimension.
"""

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from m2forge.model.config import WindowConfig
from m2forge.model.plan import Attend, AttentionPlan, LayeredAttend
from m2forge.train.all_to_all import Route
from m2forge.train.batch import BatchT


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share packs, this one included."""

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return self.group.size()

    def split(self, batch: BatchT) -> BatchT:
        """This rank's part of a batch that all ranks of the group hold. Syncs with the host."""
        rank, num_tokens = self.group.rank(), batch.tokens_N.shape[0]
        bounds = [num_tokens * index // self.size for index in range(self.size + 1)]
        start, end = bounds[rank], bounds[rank + 1]
        (edge_M,) = ((batch.position_M >= start) & (batch.position_M < end)).nonzero(as_tuple=True)
        changes: dict[str, Any] = {
            field.name: getattr(batch, field.name).index_select(0, edge_M)
            for field in fields(batch)
            if field.name.endswith("_M") and getattr(batch, field.name) is not None
        }
        changes["position_M"] = changes["position_M"] - start
        for name in ("tokens_N", "experts_NLK"):
            if getattr(batch, name, None) is not None:
                changes[name] = getattr(batch, name)[start:end]
        plan = ContextPlan(batch.plan, self.group, tuple(bounds), edge_M, batch.position_M.shape[0])
        return replace(batch, plan=plan, **changes)

    def join_edges(self, value_M: Tensor, plan: AttentionPlan) -> Tensor:
        """The values of all edges of a batch, from those of each rank's part; those of a blank batch, which is not
        split, are none."""
        if not isinstance(plan, ContextPlan):
            return value_M
        every_M = value_M.new_zeros(plan.num_edges).index_copy(0, plan.edge_M, value_M)
        dist.all_reduce(every_M, group=self.group)
        return every_M


class ContextPlan:
    """The attention plan of one rank's tokens, over the plan of all."""

    def __init__(
        self, whole: AttentionPlan, group: dist.ProcessGroup, bounds: tuple[int, ...], edge_M: Tensor, num_edges: int
    ) -> None:
        """`bounds`: the first token of each rank, and the end. `edge_M`: this rank's edges among the `num_edges` of
        the batch."""
        self.whole, self.edge_M, self.num_edges = whole, edge_M, num_edges
        num_R = [end - start for start, end in pairwise(bounds)]
        rank = group.rank()
        self._own = slice(bounds[rank], bounds[rank + 1])
        self._route = Route(group, [num_R[rank]] * group.size(), num_R)
        self.position_N = whole.position_N[self._own]
        self.count_N = None if whole.count_N is None else whole.count_N[self._own]

    def bind(self, window: WindowConfig | None) -> Attend:
        return ContextAttend(self.whole.bind(window), self._route)

    def to_parent(self, x_ND: Tensor) -> Tensor:
        every_ND: Tensor = self._route.send(x_ND.repeat(self._route.group.size(), 1))
        return self.whole.to_parent(every_ND)[self._own]


@dataclass(frozen=True)
class ContextAttend:
    attend: Attend
    """Over all tokens."""
    route: Route
    """Route that sends every rank one row per local token."""

    def at_layer(self, layer: int) -> "ContextAttend":
        return replace(self, attend=self.attend.at_layer(layer)) if isinstance(self.attend, LayeredAttend) else self

    def __call__(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        """Takes and returns this rank's tokens."""
        num_ranks = self.route.group.size()
        q, k, v = (_by_rank(x, num_ranks) for x in (q_NHK, k_NGK, v_NGK))
        received = self.route.send(torch.cat((q, k, v), dim=2).flatten(0, 1))
        heads = (x.contiguous() for x in received.split((q.shape[2], k.shape[2], v.shape[2]), dim=1))
        mixed_NHK: Tensor = self.route.back().send(self.attend(*heads))
        return mixed_NHK.view(num_ranks, -1, *mixed_NHK.shape[1:]).transpose(0, 1).flatten(1, 2)


def _by_rank(x_NHK: Tensor, num_ranks: int) -> Tensor:
    """(R, N, heads of the rank, K)"""
    copies = max(1, num_ranks // x_NHK.shape[1])
    if copies > 1:
        x_NHK = x_NHK.repeat_interleave(copies, dim=1)
    x_NRHK: Tensor = x_NHK.unflatten(1, (num_ranks, -1))
    return x_NRHK.transpose(0, 1)
