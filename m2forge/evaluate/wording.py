"""How a task is expressed in tokens: the only part that differs between synthetic ids and natural language.

Tasks use terms (a key, its value, a variable, a word, a label) and call a wording to draw and phrase them.
token_wording.py needs no language, so that a model trained for minutes can be evaluated; text_wording.py writes English
through a tokenizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from m2forge.evaluate.sample import Sample

TermKind = Literal["key", "value", "variable", "word", "input", "label"]


@dataclass(frozen=True, slots=True)
class Term:
    ids: tuple[int, ...]
    """The ids of the term in an answer."""
    text: str = ""
    """The term as text; empty for token wordings."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a tail: given tokens, or an answer."""

    ids: Sequence[int]
    answer: Term | None = None


def answer_piece(term: Term) -> Piece:
    return Piece(term.ids, term)


class Wording(Protocol):
    def draw(self, rng: np.random.Generator, kind: TermKind, count: int) -> list[Term]:
        """`count` different terms."""
        ...

    def needle(self, key: Term, value: Term) -> Sequence[int]: ...

    def needle_head(self) -> Sequence[int]:
        """The ids before the haystack."""
        ...

    def needle_tail(self, keys: Sequence[Term], values: Sequence[Term]) -> list[Piece]:
        """The question about `keys`, and the answers."""
        ...

    def assignment(self, variable: Term, source: Term) -> Sequence[int]:
        """`source`: a value or another variable."""
        ...

    def chain_head(self) -> Sequence[int]: ...

    def chain_tail(self, value: Term, variables: Sequence[Term]) -> list[Piece]:
        """The question which variables hold `value`, and the answers."""
        ...

    def word_item(self, number: int, word: Term) -> Sequence[int]:
        """An item of a list, numbered from 1."""
        ...

    def words_head(self) -> Sequence[int]: ...

    def words_tail(self, words: Sequence[Term]) -> list[Piece]:
        """The question which words are most common, and the answers."""
        ...

    def shots_head(self) -> Sequence[int]: ...

    def shot(self, given: Term, label: Term) -> list[Piece]:
        """One example; its label is an answer piece."""
        ...


def compose(prompt: Sequence[int], tail: Sequence[Piece], *, size: int, depth: float | None = None) -> Sample:
    """Build the sample from a prompt and a tail with the answers."""
    ids, spans = list(prompt), []
    for piece in tail:
        if piece.answer is not None:
            spans.append((len(ids), len(ids) + len(piece.ids)))
        ids += piece.ids
    texts = tuple(piece.answer.text for piece in tail if piece.answer is not None and piece.answer.text)
    return Sample(np.asarray(ids, np.int32), tuple(spans), size, depth, texts)


def num_ids(tail: Sequence[Piece]) -> int:
    return sum(len(piece.ids) for piece in tail)
