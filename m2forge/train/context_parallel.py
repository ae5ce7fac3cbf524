"""Context parallelism: the ranks of a group share a pack; each holds some of its tokens, about equally many.

    q, k, v of a rank's tokens → all-to-all → more tokens, fewer heads → attention → all-to-all → its tokens

Attention alone needs other tokens, and the MTP modules, whose input is the state of the token before.

The heads are divided into P parts (`config.head_parts`), if possible one for each rank. Then every rank attends over
all tokens with its query heads, so all see equally many keys, whatever the documents or trees: no rank waits for
another's longer paths. Ranks whose query heads share a key/value head receive the same keys and values.

Otherwise R / P ranks share a part, and divide the queries: each receives the keys and values of all tokens, and queries
of some. Chunks of tokens are dealt so that the ranks have equally many, and see about equally many keys. A rank's own
tokens are among those, so queries travel between the P ranks that divide the heads alone. Gradients of keys and values
return to the rank of their token, and add up there.

A rank's losses, expert loads and gradients are those of its tokens, so all add up over the ranks like those of packs.

Shapes: R ranks of the group, P parts of the heads, N tokens, Q queries of this rank, C chunks, M loss edges, H query
heads, G key/value heads, K head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from m2forge.model.config import ModelConfig, WindowConfig
from m2forge.model.plan import Attend, AttentionPlan, LayeredAttend, SharedPlan
from m2forge.train.all_to_all import Route
from m2forge.train.batch import BatchT

CHUNK = 128
"""Tokens of a chunk, or a few more: a block of FlexAttention's masks."""
MIN_CHUNKS = 16
"""Least number of chunks of a rank; they are shorter in short packs, down to one token."""


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share packs, this one included."""

    group: dist.ProcessGroup
    parts: dist.ProcessGroup
    """Ranks of the group that attend with the same queries, one for each part of the heads."""
    network: ModelConfig

    @property
    def size(self) -> int:
        return self.group.size()

    def split(self, batch: BatchT) -> BatchT:
        """This rank's part of a batch that all ranks of the group hold. Syncs with the host."""
        share = self._share(batch.plan)
        local_N = torch.full_like(batch.tokens_N, -1)
        local_N[share.own_N] = torch.arange(share.own_N.shape[0], device=local_N.device)
        (edge_M,) = (local_N[batch.position_M] >= 0).nonzero(as_tuple=True)
        changes: dict[str, Any] = {
            field.name: getattr(batch, field.name).index_select(0, edge_M)
            for field in fields(batch)
            if field.name.endswith("_M") and getattr(batch, field.name) is not None
        }
        changes["position_M"] = local_N[changes["position_M"]]
        for name in ("tokens_N", "experts_NLK"):
            if getattr(batch, name, None) is not None:
                changes[name] = getattr(batch, name)[share.own_N]
        plan = ContextPlan(batch.plan, share, edge_M, batch.position_M.shape[0])
        return replace(batch, plan=plan, **changes)

    def _share(self, plan: AttentionPlan) -> "Share":
        num_tokens, num_ranks, rank = plan.position_N.shape[0], self.group.size(), self.group.rank()
        num_parts = self.parts.size()
        if num_parts == num_ranks:
            bounds = [num_tokens * index // num_ranks for index in range(num_ranks + 1)]
            num_R = np.diff(bounds).tolist()
            route = Route(self.group, [num_R[rank]] * num_ranks, num_R)
            own_N = torch.arange(bounds[rank], bounds[rank + 1], device=plan.position_N.device)
            return Share(route, route, own_N, None, None)
        num_sharing = num_ranks // num_parts
        position_N = plan.position_N.cpu().numpy()
        work_N = np.sum([num_visible(position_N, window) for window in self._windows()], axis=0)
        queries = deal_queries(work_N, num_sharing, num_ranks)
        by_part = [np.array_split(query_Q, num_parts) for query_Q in queries]
        own_R = [by_part[other % num_sharing][other // num_sharing] for other in range(num_ranks)]
        num_R = [own_N.size for own_N in own_R]
        tokens = (own_R[rank], queries[rank % num_sharing], np.concatenate(own_R).argsort())
        return Share(
            Route(self.group, [num_R[rank]] * num_ranks, num_R),
            Route(self.parts, [num_R[rank]] * num_parts, num_R[rank % num_sharing :: num_sharing]),
            *(torch.from_numpy(index).to(plan.position_N.device) for index in tokens),
        )

    def _windows(self) -> list[WindowConfig | None]:
        """The window of each layer."""
        window = self.network.attention.window
        layers = range(self.network.num_layers)
        return [window if self.network.is_windowed(layer) else None for layer in layers]

    def join_edges(self, value_M: Tensor, plan: AttentionPlan) -> Tensor:
        """The values of all edges of a batch, from those of each rank's part; those of a blank batch, which is not
        split, are none."""
        if not isinstance(plan, ContextPlan):
            return value_M
        every_M = value_M.new_zeros(plan.num_edges).index_copy(0, plan.edge_M, value_M)
        dist.all_reduce(every_M, group=self.group)
        return every_M


def num_visible(position_N: npt.NDArray[np.int64], window: WindowConfig | None) -> npt.NDArray[np.int64]:
    """Number of keys that each token sees."""
    num_N = position_N + 1
    return num_N if window is None else np.minimum(num_N, window.size + window.num_sinks)


def deal_queries(work_N: npt.NDArray[np.int64], num_sharing: int, num_ranks: int) -> list[npt.NDArray[np.int64]]:
    """The tokens of each rank that shares a part of the heads, ascending: as many chunks for each, with about equal
    sums of `work_N`. `num_ranks`: those of all parts; each will have a token if there are as many."""
    num_tokens = work_N.size
    chunk = max(1, min(CHUNK, num_tokens // (MIN_CHUNKS * num_ranks)))
    num_rounds = num_tokens // (chunk * num_sharing)
    num_chunks = num_rounds * num_sharing
    bounds = num_tokens * np.arange(num_chunks + 1) // num_chunks
    work_C = np.add.reduceat(work_N, bounds[:-1])
    total, rank_C = np.zeros(num_sharing, np.int64), np.empty(num_chunks, np.int64)
    for chunks in np.argsort(-work_C, kind="stable").reshape(num_rounds, num_sharing):
        # The chunk with most work goes to the rank with least so far.
        ranks = np.argsort(total, kind="stable")
        rank_C[chunks] = ranks
        total[ranks] += work_C[chunks]
    rank_N = rank_C.repeat(np.diff(bounds))
    return [np.flatnonzero(rank_N == rank) for rank in range(num_sharing)]


@dataclass(frozen=True)
class Share:
    """This rank's tokens, and what it receives of others."""

    to_all: Route
    """Route that sends every rank one row per own token."""
    to_parts: Route
    """The same to one rank of each part of the heads."""
    own_N: Tensor
    """Tokens of this rank."""
    query_Q: Tensor | None
    """Tokens whose queries this rank receives, ascending; None: all."""
    order_N: Tensor | None
    """Index of each token among the rows received from all ranks; None: they are in order."""

    def gather(self, rows: Tensor) -> Tensor:
        """Sends `rows`, sorted by rank, to all; returns those received, in the order of tokens."""
        received = self.to_all.send(rows)
        return received if self.order_N is None else received.index_select(0, self.order_N)


class ContextPlan:
    """The attention plan of one rank's tokens, over the plan of all."""

    def __init__(self, whole: AttentionPlan, share: Share, edge_M: Tensor, num_edges: int) -> None:
        """`edge_M`: this rank's edges among the `num_edges` of the batch."""
        self.whole, self.share, self.edge_M, self.num_edges = whole, share, edge_M, num_edges
        self.position_N = whole.position_N[share.own_N]
        self.count_N = None if whole.count_N is None else whole.count_N[share.own_N]

    def bind(self, window: WindowConfig | None) -> Attend:
        share = self.share
        if share.query_Q is None:
            return ContextAttend(self.whole.bind(window), share)
        assert isinstance(self.whole, SharedPlan)
        return ContextAttend(self.whole.bind_queries(window, share.query_Q), share)

    def to_parent(self, x_ND: Tensor) -> Tensor:
        every_ND = self.share.gather(x_ND.repeat(self.share.to_all.group.size(), 1))
        return self.whole.to_parent(every_ND).index_select(0, self.share.own_N)


@dataclass(frozen=True)
class ContextAttend:
    attend: Attend
    """Attention of the queries that this rank receives, over all tokens."""
    share: Share

    def at_layer(self, layer: int) -> "ContextAttend":
        return replace(self, attend=self.attend.at_layer(layer)) if isinstance(self.attend, LayeredAttend) else self

    def __call__(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        """Takes and returns this rank's tokens."""
        share, num_ranks, num_parts = self.share, self.share.to_all.group.size(), self.share.to_parts.group.size()
        kv_parts = min(num_parts, k_NGK.shape[1])
        kv = [_by_rank(x_NGK, kv_parts, num_ranks // kv_parts) for x_NGK in (k_NGK, v_NGK)]
        if num_parts == num_ranks:
            q, k, v = _exchange(share.gather, _by_rank(q_NHK, num_parts, 1), *kv)
        else:
            k, v = _exchange(share.gather, *kv)
            (q,) = (q_NHK,) if num_parts == 1 else _exchange(share.to_parts.send, _by_rank(q_NHK, num_parts, 1))
        mixed_NHK: Tensor = self.attend(q, k, v)
        if num_parts == 1:
            return mixed_NHK
        mixed_NHK = share.to_parts.back().send(mixed_NHK)
        return mixed_NHK.view(num_parts, -1, *mixed_NHK.shape[1:]).transpose(0, 1).flatten(1, 2)


def _by_rank(x_NHK: Tensor, num_parts: int, num_copies: int) -> Tensor:
    """(R, N, heads of the rank, K): each part of the heads goes to `num_copies` ranks."""
    x_NPHK: Tensor = x_NHK.unflatten(1, (num_parts, -1))
    return x_NPHK.transpose(0, 1)[:, None].expand(-1, num_copies, -1, -1, -1).flatten(0, 1)


def _exchange(send: Callable[[Tensor], Tensor], *x_RNHK: Tensor) -> tuple[Tensor, ...]:
    """Sends the heads of several tensors together: each collective costs a rendezvous. What returns are views, whose
    tokens are as far apart as those of all heads: attention takes them as they are."""
    received: Tensor = send(torch.cat(x_RNHK, dim=2).flatten(0, 1))
    heads: tuple[Tensor, ...] = received.split([x.shape[2] for x in x_RNHK], dim=1)
    return heads
