"""Common-word extraction (RULER's CWE): a long list in which a few words occur far more often than all others.

    C common words, each `often` times, and as many others, each `seldom` times, as fill the length; shuffled

RULER's counts are 30 and 3, or 6 and 1 below 4096 tokens. If the vocabulary is too small for that many different words,
all are repeated more often, in the same ratio. The answer is the set of common words, in order of first occurrence in
the list if an order is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from m2forge.errors import ConfigError
from m2forge.evaluate.prompts.scored_sample import Sample
from m2forge.evaluate.prompts.wording import Term, Wording, compose, num_ids

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
