"""How a task is expressed in tokens: the only part that differs between synthetic ids and natural language.

Tasks use terms (a key, its value, a variable, a word, a label) and call a wording to draw and phrase them.
`TokenWording` needs no language, so that a model trained for minutes can be evaluated; `TextWording` writes English
through a tokenizer, following RULER with our own sentences.

Many-shot in-context learning shows examples of a mapping invented for the sample, then one input to apply it to. Every
input is an invented symbol that maps to a random label. Inputs cycle in random order, so k examples show min(k,
num_inputs) of them, and the queried input is one that was shown: chance is 1 / num_labels, and the answer can always be
known.

In bare token ids a task has a few reserved markers, a small alphabet of symbols for terms, and filler:

    needle      NEEDLE key IS value END        …        ASK key IS value
    hop         SET x1 IS v END … SET x2 IS x1 END …    ASK v IS x1 x2
    words       LIST w w w w …                          ASK LIST w w
    shots       SHOT x IS y                    …        SHOT x IS y

Several questions of one sample follow each other, each after the correct answer to the previous one.

In English every piece is encoded separately and starts with a space or a line break, where pre-tokenizers split anyway:
ids can be counted and cut exactly, and an answer has the same tokens as in running text.
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import product
from typing import Literal, Protocol

import numpy as np

from m2forge.errors import ConfigError
from m2forge.evaluate.prompts.scored_sample import Sample
from m2forge.records import IntArray

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

    def shot(self, example: Term, label: Term) -> list[Piece]:
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


@dataclass(frozen=True, slots=True)
class ShotTask:
    wording: Wording
    num_inputs: int = 16
    num_labels: int = 4

    def sample(self, rng: np.random.Generator, size: int, depth: float | None = None) -> Sample:
        """`size`: number of examples. `depth` is not used."""
        inputs = self.wording.draw(rng, "input", self.num_inputs)
        labels = self.wording.draw(rng, "label", self.num_labels)
        label_of = rng.integers(self.num_labels, size=self.num_inputs)
        rounds = -(-size // self.num_inputs)
        order = np.concatenate([rng.permutation(self.num_inputs) for _ in range(rounds)])[:size].tolist()
        prompt = list(self.wording.shots_head())
        for index in order:
            for piece in self.wording.shot(inputs[index], labels[label_of[index]]):
                prompt += piece.ids
        query = int(rng.choice(order))
        return compose(prompt, self.wording.shot(inputs[query], labels[label_of[query]]), size=size)


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

    def shot(self, example: Term, label: Term) -> list[Piece]:
        return [Piece(self._marked(Marker.SHOT, example.ids, Marker.IS)), answer_piece(label)]

    def _marked(self, *parts: Marker | tuple[int, ...]) -> tuple[int, ...]:
        ids: list[int] = []
        for part in parts:
            ids += (self.alphabet.markers[part],) if isinstance(part, Marker) else part
        return tuple(ids)


def _distinct(rng: np.random.Generator, base: int, width: int, count: int) -> list[tuple[int, ...]]:
    """`count` distinct rows of `width` digits below `base`."""
    if base**width <= 4 * count:
        numbers = rng.permutation(base**width)[:count]
        return [tuple(int(number) // base**digit % base for digit in range(width)) for number in numbers]
    # There are too many rows to enumerate, and collisions are rare.
    rows: dict[tuple[int, ...], None] = {}
    while len(rows) < count:
        rows[tuple(rng.integers(base, size=width).tolist())] = None
    return list(rows)


ADJECTIVES = (
    *("amber", "ancient", "bitter", "bold", "brave", "bright", "calm", "clever", "cold", "crooked", "curious", "dark"),
    *("early", "eager", "empty", "faint", "gentle", "golden", "grand", "green", "hollow", "humble", "icy", "idle"),
    *("jolly", "keen", "late", "lively", "lonely", "lucky", "mild", "misty", "narrow", "noble", "odd", "pale"),
    *("plain", "proud", "quick", "quiet", "rapid", "rough", "royal", "rusty", "silent", "silver", "slow", "smooth"),
)
NOUNS = (
    *("anchor", "apple", "arrow", "barrel", "basket", "beacon", "bridge", "candle", "canyon", "castle", "cedar"),
    *("comet", "copper", "desert", "dragon", "eagle", "engine", "falcon", "feather", "forest", "garden", "glacier"),
    *("hammer", "harbor", "island", "jacket", "kettle", "ladder", "lantern", "marble", "meadow", "mirror", "needle"),
    *("ocean", "orchard", "palace", "pepper", "planet", "rabbit", "ribbon", "saddle", "shadow", "temple", "thunder"),
)
COLOURS = ("red", "blue", "green", "black", "white", "yellow", "orange", "purple")
NUM_DIGITS = 7
VARIABLE_LETTERS = 5
SYLLABLES = tuple(map("".join, product("bdfgklmnprstvz", "aeiou")))
WORD_SYLLABLES = 3
"""All invented words have equal length, so that none is part of another."""


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class TextWording:
    encoder: Encoder
    begin_ids: tuple[int, ...] = ()
    """Ids that start a document for this model, such as its BOS token."""

    def draw(self, rng: np.random.Generator, kind: TermKind, count: int) -> list[Term]:
        texts: dict[str, None] = {}
        if kind == "label":
            if count > len(COLOURS):
                raise ConfigError(f"{count} labels: text knows {len(COLOURS)}; ask for fewer")
            texts = dict.fromkeys(COLOURS[index] for index in rng.permutation(len(COLOURS))[:count])
        elif kind == "key" and count > len(ADJECTIVES) * len(NOUNS) // 2:
            raise ConfigError(f"{count} needles: text knows {len(ADJECTIVES) * len(NOUNS) // 2} keys; ask for fewer")
        while len(texts) < count:
            texts[_text(rng, kind)] = None
        return [Term(tuple(self._encode(f" {text}")), text) for text in texts]

    def needle(self, key: Term, value: Term) -> Sequence[int]:
        return self._encode(f" The secret number of {key.text} is {value.text}.")

    def needle_head(self) -> Sequence[int]:
        return self._head(
            "Secret numbers are hidden in the text below. Remember them: a question follows at the end.\n"
        )

    def needle_tail(self, keys: Sequence[Term], values: Sequence[Term]) -> list[Piece]:
        names = _listed([key.text for key in keys])
        what, verb = ("number", "is") if len(keys) == 1 else ("numbers", "are")
        question = f"\nQuestion: What {verb} the secret {what} of {names}?\nAnswer: The secret {what} of {names} {verb}"
        return [Piece(self._encode(question)), *self._answers(values)]

    def assignment(self, variable: Term, source: Term) -> Sequence[int]:
        value = source.text if source.text.isdecimal() else f"VAR {source.text}"
        return self._encode(f" VAR {variable.text} = {value}.")

    def chain_head(self) -> Sequence[int]:
        return self._head("Variables are assigned in the text below, some of them from others. Keep track of them.\n")

    def chain_tail(self, value: Term, variables: Sequence[Term]) -> list[Piece]:
        question = f"\nQuestion: Which {len(variables)} variables hold the value {value.text}?"
        return [Piece(self._encode(f"{question}\nAnswer: The variables are")), *self._answers(variables)]

    def word_item(self, number: int, word: Term) -> Sequence[int]:
        return *self._encode(f" {number}."), *word.ids

    def words_head(self) -> Sequence[int]:
        return self._head("In the numbered list below some words occur far more often than others. Remember those.\n")

    def words_tail(self, words: Sequence[Term]) -> list[Piece]:
        question = f"\nQuestion: Which {len(words)} words occur most often in the list?"
        return [Piece(self._encode(f"{question}\nAnswer: The commonest words are")), *self._answers(words)]

    def shots_head(self) -> Sequence[int]:
        return self.begin_ids

    def shot(self, example: Term, label: Term) -> list[Piece]:
        return [Piece(self._encode(f"\n\nInput: {example.text}\nLabel:")), answer_piece(label)]

    def _answers(self, terms: Sequence[Term]) -> list[Piece]:
        pieces = [answer_piece(terms[0])]
        for term in terms[1:]:
            pieces += [Piece(self._encode(",")), answer_piece(term)]
        return pieces

    def _head(self, text: str) -> Sequence[int]:
        return *self.begin_ids, *self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return self.encoder.encode(text)


def _text(rng: np.random.Generator, kind: TermKind) -> str:
    match kind:
        case "key":
            return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
        case "value":
            return str(rng.integers(10 ** (NUM_DIGITS - 1), 10**NUM_DIGITS))
        case "variable":
            return "".join(rng.choice(list(string.ascii_uppercase), VARIABLE_LETTERS))
        case _:
            return "".join(rng.choice(SYLLABLES, WORD_SYLLABLES))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
