"""Bytes that this process receives from others in torch's collectives, for tests and benchmarks."""

from typing import Any

import torch
import torch.distributed as dist

TRAVELS = {
    # Newer versions of torch have other names for the collectives of FSDP2.
    "all_gather_single": 1,
    "all_gather_into_tensor": 1,
    "reduce_scatter_single": 1,
    "reduce_scatter_tensor": 1,
    "all_to_all_single": 1,
    "all_reduce": 2,
}
"""Times that (R - 1) / R of a collective's largest tensor reaches each of R ranks: a sum is scattered and gathered."""


class Received:
    """Counts while it is entered; `least`: collectives of smaller tensors, such as counts and norms, are left out."""

    def __init__(self, least: int) -> None:
        self.num_bytes, self._least = 0.0, least

    def __enter__(self) -> "Received":
        self._real = {name: getattr(dist, name) for name in TRAVELS if hasattr(dist, name)}
        for name, function in self._real.items():
            setattr(dist, name, self._counting(name, function))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._real.items():
            setattr(dist, name, function)

    def _counting(self, name: str, function: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            given = [*args, *options.values()]
            whole = max(tensor.nbytes for tensor in given if isinstance(tensor, torch.Tensor))
            groups = [each for each in given if isinstance(each, dist.ProcessGroup)]
            num_ranks = groups[0].size() if groups else dist.get_world_size()
            if whole >= self._least:
                self.num_bytes += TRAVELS[name] * whole * (num_ranks - 1) / num_ranks
            return function(*args, **options)

        return run
