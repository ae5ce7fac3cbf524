"""Samples: token ids in which some spans are answers, to be predicted from everything before them.

A task (suites/ruler.py) draws samples from a random generator; suites/suite.py scores them. A
task draws new keys, values and filler for every sample, so only the seed separates two sets of samples.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from m2forge.records import IntArray

Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    ids: IntArray
    """Prompt and answers; between two answers there may be given tokens, such as the next question."""
    spans: tuple[Span, ...]
    """[start, stop) of each answer in `ids`, in order."""
    size: int
    """Requested size: tokens of the whole sample or, for many-shot tasks, number of shots."""
    depth: float | None = None
    """Relative position of the queried needle in the haystack, 0 to 1; None if there is no single one."""
    references: tuple[str, ...] = ()
    """The answers as text, for text samples."""

    def __post_init__(self) -> None:
        stops = [0, *(stop for _, stop in self.spans)]
        in_order = all(before <= start < stop for before, (start, stop) in zip(stops[:-1], self.spans, strict=True))
        if not self.spans or not in_order or stops[-1] > len(self.ids) or self.spans[0][0] < 1:
            raise ValueError(f"answers at {self.spans} do not lie in order after the first of {len(self.ids)} tokens")

    @property
    def prompt_ids(self) -> IntArray:
        """The tokens before the first answer."""
        return self.ids[: self.spans[0][0]]

    @property
    def answers(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self.ids[start:stop].tolist()) for start, stop in self.spans)

    @property
    def predicting(self) -> IntArray:
        """Positions whose next token belongs to an answer."""
        return np.concatenate([np.arange(start - 1, stop - 1, dtype=np.int32) for start, stop in self.spans])


class Task(Protocol):
    """Draws samples of one kind. Equal generators give equal samples."""

    def sample(self, rng: np.random.Generator, size: int, depth: float | None = None) -> Sample:
        """A sample of exactly `size` tokens, or at most `size` if the material consists of indivisible items; for
        many-shot tasks, of `size` shots. If `depth` is None, it is drawn."""
        ...
