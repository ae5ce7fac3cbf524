"""Needle retrieval: facts hidden in a haystack, some of them queried at the end.

needle        one fact, queried
multi-key     several facts, one queried: the others are distractors of the same form
multi-query   several facts, several queried; each answer counts on its own
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from m2forge.evaluate.haystack import Filler, Insert, filler_tokens, lay
from m2forge.evaluate.sample import Sample
from m2forge.evaluate.wording import Wording, compose, num_ids


@dataclass(frozen=True, slots=True)
class NeedleTask:
    wording: Wording
    filler: Filler
    num_needles: int = 1
    num_queries: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_queries <= self.num_needles:
            raise ValueError(f"{self.num_queries} queries of {self.num_needles} needles: expected 1 to all of them")

    def sample(self, rng: np.random.Generator, size: int, depth: float | None = None) -> Sample:
        """`depth`: depth of the first queried fact; all others have random depths."""
        keys = self.wording.draw(rng, "key", self.num_needles)
        values = self.wording.draw(rng, "value", self.num_needles)
        depths: list[float] = rng.random(self.num_needles).tolist()
        if depth is not None:
            depths[0] = depth
        needles = [self.wording.needle(key, value) for key, value in zip(keys, values, strict=True)]
        head = self.wording.needle_head()
        tail = self.wording.needle_tail(keys[: self.num_queries], values[: self.num_queries])
        num_fixed = len(head) + sum(map(len, needles)) + num_ids(tail)
        filling = self.filler.draw(rng, filler_tokens(size, num_fixed, f"num_needles = {self.num_needles}"))
        haystack = lay(filling, _inserts(needles, depths))
        asked = depths[0] if self.num_queries == 1 else None
        return compose([*head, *haystack.tolist()], tail, size=size, depth=asked)


def _inserts(needles: Sequence[Sequence[int]], depths: Sequence[float]) -> list[Insert]:
    return [Insert(needle, depth) for needle, depth in zip(needles, depths, strict=True)]
