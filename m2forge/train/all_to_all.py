"""Rows that travel between the ranks of a group, with gradients: rows sorted by rank in, those received out.

All ranks of the group call `make_route` and `Route.send` in the same order, with any number of rows each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Route:
    """How many rows this rank sends to each rank of the group, and receives from it."""

    group: dist.ProcessGroup
    num_sent_R: Sequence[int]
    num_received_R: Sequence[int]

    def send(self, rows: Tensor) -> Tensor:
        """Send `rows`, sorted by rank; returns those received, sorted by rank."""
        received: Tensor = _Send.apply(rows, self)  # type: ignore[no-untyped-call]
        return received

    def back(self) -> "Route":
        return Route(self.group, self.num_received_R, self.num_sent_R)

    def send_detached(self, rows: Tensor) -> Tensor:
        """`send` without gradients."""
        received = rows.new_empty(sum(self.num_received_R), *rows.shape[1:])
        splits = (list(self.num_received_R), list(self.num_sent_R))
        dist.all_to_all_single(received, rows.contiguous(), *splits, group=self.group)
        return received


def make_route(group: dist.ProcessGroup, num_sent_R: Tensor) -> Route:
    """Tells each rank how many rows it receives. Syncs with the host."""
    num_received_R = torch.empty_like(num_sent_R)
    dist.all_to_all_single(num_received_R, num_sent_R, group=group)
    sent, received = torch.stack((num_sent_R, num_received_R)).tolist()
    return Route(group, sent, received)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return route.send_detached(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.route.back().send_detached(grad), None
