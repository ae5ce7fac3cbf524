"""A rendered conversation before and after tokenization.

A format writes segments: special tokens by name, and plain text. Each segment is encoded separately, so a conversation
can be split between any two segments without changing its ids, and nothing inside a text can become a special token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from m2forge.text.tokenizer import Tokenizer


class Segment(NamedTuple):
    text: str
    special: bool
    """Whether `text` is the name of a special token."""
    trained: bool
    """Whether the assistant sampled this, or would have."""


@dataclass(slots=True)
class Rendered:
    """A conversation, or a piece of one, as token ids."""

    ids: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    """Loss mask: for each id whether the assistant sampled it, or would have: thinking, content, calls and the end
    marker, but never the generation prompt."""


@cache
def mark(text: str, *, trained: bool = False) -> Segment:
    """A special token."""
    return Segment(text, special=True, trained=trained)


def plain(text: str, *, trained: bool = False) -> Segment:
    return Segment(text, special=False, trained=trained)


def encode_segments(segments: Sequence[Segment], tokenizer: Tokenizer) -> Rendered:
    texts = list({segment.text: None for segment in segments if not segment.special})
    ids_of_text = dict(zip(texts, tokenizer.encode_batch(texts), strict=True))
    rendered = Rendered()
    for segment in segments:
        ids = [tokenizer.special(segment.text)] if segment.special else ids_of_text[segment.text]
        rendered.ids += ids
        rendered.trained += [segment.trained] * len(ids)
    return rendered
