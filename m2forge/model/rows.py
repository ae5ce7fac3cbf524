"""Local shards (rows) of a network's tensors, filled from files that hold whole tensors.

A rank holds consecutive rows of each tensor along the first dimension, of stacked experts whole experts, or all rows.
`fill_rows` reads the public tensors that have any of them, and of these only the rows that it needs. `draw_rows` draws
tensor after tensor whole, so that the ranks together have the initial weights that one process has.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from m2forge.model.architecture import Part

CHUNK_BYTES = 1 << 26


class Rows(NamedTuple):
    """What a rank holds of a tensor."""

    tensor: Tensor
    start: int
    """The whole tensor's index of the first row."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    @property
    def stop(self) -> int:
        return self.start + self.tensor.shape[0]

    @property
    def is_whole(self) -> bool:
        return self.tensor.shape[0] == self.shape[0]

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        """Pieces of at most `CHUNK_BYTES`, or of one row, with the whole tensor's index of their first row."""
        size = rows_per_chunk(self.shape, self.tensor.dtype)
        for first in range(0, self.tensor.shape[0], size):
            yield self.start + first, self.tensor[first : first + size]


def rows_per_chunk(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return max(1, CHUNK_BYTES // max(1, torch.Size(shape[1:]).numel() * dtype.itemsize))


def whole(state: Mapping[str, Tensor]) -> dict[str, Rows]:
    """The rows of tensors that are held whole."""
    return {name: Rows(tensor, 0, tuple(tensor.shape)) for name, tensor in state.items()}


@torch.no_grad()
def fill_rows(
    held: Mapping[str, Rows], parts: Iterable[tuple[str, Part]], read: Callable[[str, torch.dtype], Tensor]
) -> None:
    """Copy the public tensors of `parts`, as `read` returns them, into the rows of `held` that they are."""
    for name, part in parts:
        rows = held[part.name]
        if part.expert is not None:
            if rows.start <= part.expert < rows.stop:
                expert = rows.tensor[part.expert - rows.start]
                expert[part.start : part.stop].copy_(read(name, expert.dtype))
            continue
        first = max(rows.start, part.start)
        last = min(rows.stop, rows.shape[0] if part.stop is None else part.stop)
        if first < last:
            target = rows.tensor[first - rows.start : last - rows.start]
            target.copy_(read(name, target.dtype)[first - part.start : last - part.start])


@torch.no_grad()
def draw_rows(held: Mapping[str, Rows], std: float, seed: int) -> None:
    """Draw matrices from a normal distribution of this standard deviation, on the device that holds them whole, or else
    on the CPU; norms become 1 and biases 0."""
    is_whole = all(rows.is_whole for rows in held.values())
    device = next(iter(held.values())).tensor.device if is_whole else torch.device("cpu")
    generator = torch.Generator(device).manual_seed(seed)
    for name, (tensor, start, shape) in held.items():
        if len(shape) == 1:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        elif is_whole:
            tensor.normal_(0.0, std, generator=generator)
        else:
            full = torch.empty(shape, dtype=tensor.dtype, device=device).normal_(0.0, std, generator=generator)
            tensor.copy_(full[start : start + tensor.shape[0]])
