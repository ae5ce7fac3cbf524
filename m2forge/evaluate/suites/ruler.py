"""The tasks of RULER: needles and chains of assignments in a haystack, and common words in a long list.

A haystack is an exact number of filler tokens, with needles inserted at given depths. A filler returns tokens and the
offsets at which something may be inserted without breaking them: anywhere in random ids, between sentences in text.
`lay` puts each insert at the offset nearest to its depth.

Needle retrieval hides facts in a haystack and queries some of them at the end:

    needle        one fact, queried
    multi-key     several facts, one queried: the others are distractors of the same form
    multi-query   several facts, several queried; each answer counts on its own

Multi-hop tracing (RULER's variable tracking) scatters chains of assignments over a haystack:

    x1 = value … x2 = x1 … x3 = x2 …      which variables hold the value?

The assignments of a chain occur in order. Every chain has its own value; the question asks for one of them, and the
answer is the set of its variables, in chain order if an order is needed.

Common-word extraction (RULER's CWE) asks for the few words of a list that occur far more often than all others:

    C common words, each `often` times, and as many others, each `seldom` times, as fill the length; shuffled

RULER's counts are 30 and 3, or 6 and 1 below 4096 tokens. If the vocabulary is too small for that many different words,
all are repeated more often, in the same ratio. The answer is the set of common words, in order of first occurrence in
the list if an order is needed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from m2forge.errors import ConfigError
from m2forge.evaluate.prompts.scored_sample import Sample
from m2forge.evaluate.prompts.wording import Encoder, Term, Wording, compose, num_ids
from m2forge.records import IntArray

NOISE = (
    "The river runs quietly past the old mill.",
    "Clouds gather over the hills in the afternoon.",
    "A bell rings somewhere and then it is still.",
    "The road goes on between the fields.",
    "Nobody has closed the gate since spring.",
)
"""Meaningless sentences, for a haystack without a text file."""


@dataclass(frozen=True, slots=True, eq=False)
class Filling:
    ids: IntArray
    positions: IntArray
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
        positions = np.array(sorted({max(0, end - cut) for end in ends}), np.int32)
        ids = np.concatenate(parts)[cut:] if parts else np.zeros(0, np.int32)
        return Filling(ids, positions)


def noise_filler(encoder: Encoder) -> SentenceFiller:
    return text_filler(encoder, " ".join(NOISE))


def text_filler(encoder: Encoder, text: str) -> SentenceFiller:
    """The sentences of `text`, as running text."""
    sentences = [sentence for sentence in re.split(r"(?<=[.!?])\s+", text) if sentence.strip()]
    ids = (np.array(encoder.encode(f" {sentence.strip()}"), np.int32) for sentence in sentences)
    encoded = tuple(sentence for sentence in ids if len(sentence))
    if not encoded:
        raise ConfigError("the haystack's text holds no sentence; give a file with text")
    return SentenceFiller(encoded)


@dataclass(frozen=True, slots=True)
class Insert:
    ids: Sequence[int]
    depth: float


def lay(filling: Filling, inserts: Sequence[Insert]) -> IntArray:
    """The filling with every insert at the offset nearest to depth × its length.

    Inserts with the same offset keep the given order.
    """
    wanted = [insert.depth * len(filling.ids) for insert in inserts]
    positions = [int(filling.positions[np.abs(filling.positions - want).argmin()]) for want in wanted]
    parts: list[IntArray] = []
    cursor = 0
    for index in sorted(range(len(inserts)), key=lambda index: positions[index]):
        parts += [filling.ids[cursor : positions[index]], np.asarray(inserts[index].ids, np.int32)]
        cursor = positions[index]
    return np.concatenate([*parts, filling.ids[cursor:]]).astype(np.int32)


def filler_tokens(size: int, num_fixed: int, what: str) -> int:
    """Tokens left for filler in a sample of `size` tokens with `num_fixed` others."""
    if size < num_fixed:
        raise ConfigError(f"length {size}: {what} needs at least {num_fixed} tokens; give longer lengths")
    return size - num_fixed


def _everywhere(num_tokens: int) -> IntArray:
    return np.arange(num_tokens + 1, dtype=np.int32)


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
        queried_depth = depths[0] if self.num_queries == 1 else None
        return compose([*head, *haystack.tolist()], tail, size=size, depth=queried_depth)


def _inserts(needles: Sequence[Sequence[int]], depths: Sequence[float]) -> list[Insert]:
    return [Insert(needle, depth) for needle, depth in zip(needles, depths, strict=True)]


@dataclass(frozen=True, slots=True)
class HopTask:
    wording: Wording
    filler: Filler
    num_chains: int = 1
    num_hops: int = 4
    """Assignments from one variable to the next; a chain has one variable more."""

    def sample(self, rng: np.random.Generator, size: int, depth: float | None = None) -> Sample:
        """The chains are at random depths: `depth` is not used."""
        per_chain = self.num_hops + 1
        values = self.wording.draw(rng, "value", self.num_chains)
        variables = self.wording.draw(rng, "variable", self.num_chains * per_chain)
        inserts: list[Insert] = []
        for chain, value in enumerate(values):
            members = variables[chain * per_chain : (chain + 1) * per_chain]
            sources = [value, *members[:-1]]
            depths = np.sort(rng.random(per_chain)).tolist()
            for variable, source, depth in zip(members, sources, depths, strict=True):
                inserts.append(Insert(self.wording.assignment(variable, source), depth))
        head = self.wording.chain_head()
        tail = self.wording.chain_tail(values[0], variables[:per_chain])
        num_fixed = len(head) + sum(len(insert.ids) for insert in inserts) + num_ids(tail)
        filling = self.filler.draw(rng, filler_tokens(size, num_fixed, f"a task of {len(inserts)} assignments"))
        haystack = lay(filling, inserts)
        return compose([*head, *haystack.tolist()], tail, size=size)


SHORT = 4096


@dataclass(frozen=True, slots=True)
class WordCountTask:
    wording: Wording
    num_common: int = 10
    max_words: int = 1 << 20
    """Number of different words that the wording can draw."""

    def sample(self, rng: np.random.Generator, size: int, depth: float | None = None) -> Sample:
        """At most `size` tokens: the list holds whole items. `depth` is not used."""
        head = self.wording.words_head()
        # The tail's length depends on which words are common, not on their order.
        common = self.wording.draw(rng, "word", self.num_common)
        budget = size - len(head) - num_ids(self.wording.words_tail(common))
        num_items = self._num_items(budget, common)
        often, seldom = self._counts(size, num_items)
        num_others = num_items - often * self.num_common
        different = self._others(rng, common, -(-num_others // seldom))
        others = [word for word in different for _ in range(seldom)][:num_others]
        words = [word for word in common for _ in range(often)] + others
        shuffled = [words[index] for index in rng.permutation(len(words)).tolist()]
        items = self._fitted(rng, shuffled, set(common), budget)
        by_appearance = sorted(common, key=shuffled.index)
        return compose([*head, *items], self.wording.words_tail(by_appearance), size=size)

    def _num_items(self, budget: int, common: Sequence[Term]) -> int:
        """Approximate number of items that fit, estimated from the common words and evenly spaced item numbers."""
        num_items = max(1, budget)
        for _ in range(4):
            numbers = np.linspace(1, num_items, 16).astype(int).tolist()
            lengths = [len(self.wording.word_item(number, word)) for number in numbers for word in common]
            num_items = max(1, int(budget * len(lengths) / sum(lengths)))
        return num_items

    def _fitted(self, rng: np.random.Generator, words: list[Term], common: set[Term], budget: int) -> list[int]:
        """The ids of the list, after removing random uncommon words from `words` until it fits."""
        while True:
            items = [self.wording.word_item(number, word) for number, word in enumerate(words, start=1)]
            over = sum(map(len, items)) - budget
            if over <= 0:
                return [token for item in items for token in item]
            taken = set()
            for index in rng.permutation([index for index, word in enumerate(words) if word not in common]).tolist():
                if over <= 0:
                    break
                over -= len(items[index])
                taken.add(index)
            words[:] = [word for index, word in enumerate(words) if index not in taken]

    def _counts(self, size: int, num_items: int) -> tuple[int, int]:
        often, seldom = (6, 1) if size < SHORT else (30, 3)
        ratio, num_free = often // seldom, self.max_words - self.num_common
        while num_items - often * self.num_common > num_free * seldom:
            seldom += 1
            often = ratio * seldom
        if num_items < 2 * often * self.num_common:
            raise ConfigError(
                f"length {size}: a list of {num_items} words cannot hold {self.num_common} words {often} times each "
                "and as many others; give longer lengths or a smaller num_common"
            )
        return often, seldom

    def _others(self, rng: np.random.Generator, common: Sequence[Term], count: int) -> list[Term]:
        taken = set(common)
        # At most num_common of the drawn words are taken already.
        drawn = self.wording.draw(rng, "word", min(self.max_words, count + len(common)))
        return [word for word in drawn if word not in taken][:count]
