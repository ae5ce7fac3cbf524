"""Haystacks: an exact number of filler tokens, with needles inserted at given depths.

A filler returns tokens and the offsets at which something may be inserted without breaking them: anywhere in random
ids, between sentences in text. `lay` puts each insert at the offset nearest to its depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from m2forge.errors import ConfigError
from m2forge.records import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Filling:
    ids: IntArray
    places: IntArray
    """Offsets into `ids` where something may be inserted: ascending, including 0 and its length."""


class Filler(Protocol):
    def draw(self, rng: np.random.Generator, num_tokens: int) -> Filling: ...


@dataclass(frozen=True, slots=True, eq=False)
class RandomFiller:
    """Independent draws from a pool of ids."""

    pool: IntArray

    def draw(self, rng: np.random.Generator, num_tokens: int) -> Filling:
        return Filling(rng.choice(self.pool, num_tokens).astype(np.int32), _everywhere(num_tokens))


@dataclass(frozen=True, slots=True, eq=False)
class WindowFiller:
    """A random window of one long sequence of ids, such as a corpus; it wraps around at the end."""

    ids: IntArray

    def draw(self, rng: np.random.Generator, num_tokens: int) -> Filling:
        start = int(rng.integers(len(self.ids)))
        return Filling(np.take(self.ids, np.arange(start, start + num_tokens), mode="wrap"), _everywhere(num_tokens))


@dataclass(frozen=True, slots=True, eq=False)
class SentenceFiller:
    """Consecutive sentences from a random one on, wrapping around at the end. The first is truncated at its start, so
    that the number of tokens is exact."""

    sentences: tuple[IntArray, ...]

    def draw(self, rng: np.random.Generator, num_tokens: int) -> Filling:
        start, ends, total = int(rng.integers(len(self.sentences))), [0], 0
        parts: list[IntArray] = []
        while total < num_tokens:
            parts.append(self.sentences[(start + len(parts)) % len(self.sentences)])
            total += len(parts[-1])
            ends.append(total)
        cut = total - num_tokens
        places = np.array(sorted({max(0, end - cut) for end in ends}), np.int32)
        ids = np.concatenate(parts)[cut:] if parts else np.zeros(0, np.int32)
        return Filling(ids, places)


@dataclass(frozen=True, slots=True)
class Insert:
    ids: Sequence[int]
    depth: float


def lay(filling: Filling, inserts: Sequence[Insert]) -> IntArray:
    """The filling with every insert at the offset nearest to depth × its length.

    Inserts with the same offset keep the given order.
    """
    wanted = [insert.depth * len(filling.ids) for insert in inserts]
    places = [int(filling.places[np.abs(filling.places - want).argmin()]) for want in wanted]
    parts: list[IntArray] = []
    cursor = 0
    for index in sorted(range(len(inserts)), key=lambda index: places[index]):
        parts += [filling.ids[cursor : places[index]], np.asarray(inserts[index].ids, np.int32)]
        cursor = places[index]
    return np.concatenate([*parts, filling.ids[cursor:]]).astype(np.int32)


def filler_tokens(size: int, num_fixed: int, what: str) -> int:
    """Tokens left for filler in a sample of `size` tokens with `num_fixed` others."""
    if size < num_fixed:
        raise ConfigError(f"length {size}: {what} needs at least {num_fixed} tokens; give longer lengths")
    return size - num_fixed


def _everywhere(num_tokens: int) -> IntArray:
    return np.arange(num_tokens + 1, dtype=np.int32)
