"""Tasks in English through a tokenizer, following RULER with our own sentences.

Every piece is encoded separately and starts with a space or a line break, where pre-tokenizers split anyway: ids can be
counted and cut exactly, and an answer has the same tokens as in running text.
"""

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import numpy as np

from m2forge.errors import ConfigError
from m2forge.evaluate.prompts.wording import Piece, Term, TermKind, answer_piece
from m2forge.evaluate.suites.ruler import SentenceFiller

NOISE = (
    "The river runs quietly past the old mill.",
    "Clouds gather over the hills in the afternoon.",
    "A bell rings somewhere and then it is still.",
    "The road goes on between the fields.",
    "Nobody has closed the gate since spring.",
)
"""Meaningless sentences, for a haystack without a text file."""

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
