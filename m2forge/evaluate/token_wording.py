"""Tasks in bare token ids: a few reserved markers, a small alphabet of symbols for terms, the rest filler.

    needle      NEEDLE key IS value END        …        ASK key IS value
    hop         SET x1 IS v END … SET x2 IS x1 END …    ASK v IS x1 x2
    words       LIST w w w w …                          ASK LIST w w
    shots       SHOT x IS y                    …        SHOT x IS y

Several questions of one sample follow each other, each after the correct answer to the previous one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from m2forge.errors import ConfigError
from m2forge.evaluate.wording import Piece, Term, TermKind, answer_piece
from m2forge.records import IntArray

LEAST_SYMBOLS = 8


class Marker(IntEnum):
    """Index into `Alphabet.markers`."""

    NEEDLE = 0
    IS = 1
    END = 2
    ASK = 3
    SET = 4
    LIST = 5
    SHOT = 6


@dataclass(frozen=True, slots=True, eq=False)
class Alphabet:
    markers: tuple[int, ...]
    """One id per `Marker`, used for nothing else."""
    symbols: IntArray
    """Ids that keys, values, variables, inputs and labels are made of."""
    filler: IntArray
    """All other ids."""


def make_alphabet(
    vocab_size: int, *, first_id: int = 0, num_symbols: int = 256, marker_ids: Sequence[int] = ()
) -> Alphabet:
    """Allocate ids from `first_id` on. Markers are the last ids of the vocabulary unless `marker_ids` gives others,
    such as special tokens that no text contains; symbols are at most half of the rest."""
    markers = tuple(marker_ids) or tuple(range(vocab_size - len(Marker), vocab_size))
    if len(set(markers)) != len(Marker) or not all(0 <= marker < vocab_size for marker in markers):
        raise ConfigError(f"marker_ids {list(markers)}: expected {len(Marker)} different ids below {vocab_size}")
    free = np.setdiff1d(np.arange(first_id, vocab_size, dtype=np.int32), np.array(markers, np.int32))
    num_symbols = min(num_symbols, len(free) // 2)
    if num_symbols < LEAST_SYMBOLS:
        raise ConfigError(
            f"ids from {first_id} to {vocab_size - 1} leave {num_symbols} symbols beside the markers, fewer than "
            f"{LEAST_SYMBOLS}; lower first_id or raise num_symbols"
        )
    return Alphabet(markers, free[:num_symbols], free[num_symbols:])


@dataclass(frozen=True, slots=True)
class TokenWording:
    alphabet: Alphabet
    key_tokens: int = 2
    value_tokens: int = 2

    def draw(self, rng: np.random.Generator, kind: TermKind, count: int) -> list[Term]:
        symbols = self.alphabet.symbols
        if kind == "word":
            # Lists are long: their words may be any id except a marker.
            symbols = np.concatenate((symbols, self.alphabet.filler))
        width = {"key": self.key_tokens, "value": self.value_tokens}.get(kind, 1)
        if count > len(symbols) ** width:
            raise ConfigError(
                f"{count} different terms of {width} tokens cannot be drawn from {len(symbols)} symbols; "
                "raise num_symbols or ask for fewer"
            )
        return [Term(tuple(symbols[list(digits)].tolist())) for digits in _distinct(rng, len(symbols), width, count)]

    def needle(self, key: Term, value: Term) -> Sequence[int]:
        return self._marked(Marker.NEEDLE, key.ids, Marker.IS, value.ids, Marker.END)

    def needle_head(self) -> Sequence[int]:
        return ()

    def needle_tail(self, keys: Sequence[Term], values: Sequence[Term]) -> list[Piece]:
        pieces = []
        for key, value in zip(keys, values, strict=True):
            pieces += [Piece(self._marked(Marker.ASK, key.ids, Marker.IS)), answer_piece(value)]
        return pieces

    def assignment(self, variable: Term, source: Term) -> Sequence[int]:
        return self._marked(Marker.SET, variable.ids, Marker.IS, source.ids, Marker.END)

    def chain_head(self) -> Sequence[int]:
        return ()

    def chain_tail(self, value: Term, variables: Sequence[Term]) -> list[Piece]:
        return [Piece(self._marked(Marker.ASK, value.ids, Marker.IS)), *map(answer_piece, variables)]

    def word_item(self, number: int, word: Term) -> Sequence[int]:
        return word.ids

    def words_head(self) -> Sequence[int]:
        return self._marked(Marker.LIST)

    def words_tail(self, words: Sequence[Term]) -> list[Piece]:
        return [Piece(self._marked(Marker.ASK, Marker.LIST)), *map(answer_piece, words)]

    def shots_head(self) -> Sequence[int]:
        return ()

    def shot(self, given: Term, label: Term) -> list[Piece]:
        return [Piece(self._marked(Marker.SHOT, given.ids, Marker.IS)), answer_piece(label)]

    def _marked(self, *parts: Marker | tuple[int, ...]) -> tuple[int, ...]:
        ids: list[int] = []
        for part in parts:
            ids += (self.alphabet.markers[part],) if isinstance(part, Marker) else part
        return tuple(ids)


def _distinct(rng: np.random.Generator, base: int, width: int, count: int) -> list[tuple[int, ...]]:
    """`count` distinct rows of `width` digits below `base`."""
    if base**width <= 4 * count:
        numbers = rng.permutation(base**width)[:count]
        return [tuple(int(number) // base**place % base for place in range(width)) for number in numbers]
    # There are too many rows to enumerate, and collisions are rare.
    rows: dict[tuple[int, ...], None] = {}
    while len(rows) < count:
        rows[tuple(rng.integers(base, size=width).tolist())] = None
    return list(rows)
