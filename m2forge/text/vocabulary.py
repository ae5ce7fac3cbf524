"""The contents of a tokenizer, independent of its source, and the alphabet of byte-level vocabularies.

`check_byte_level` validates: a tokenizer that passes splits text into pieces and encodes each of their bytes as one
character, so that the bytes of every token are known and pieces of text can be encoded separately.
"""

import json
from dataclasses import dataclass, field

import tokenizers
from tokenizers import Regex, pre_tokenizers

from m2forge.errors import DataError

WORD_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Merges stop at these boundaries: contractions, words with the character before them, up to three digits, symbols,
newlines, spaces."""

MAX_IDS = 1 << 24


@dataclass(frozen=True, slots=True)
class SpecialNames:
    """Names of special tokens; None if the model has none."""

    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    unk: str | None = None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer of the library with what a model folder stores beside it."""

    core: tokenizers.Tokenizer
    names: SpecialNames = field(default_factory=SpecialNames)
    chat_template: str | None = None
    tool_use_template: str | None = None
    """The chat template for conversations with tools, if it is another one."""
    eos_ids: tuple[int, ...] = ()
    """Ids at which the model's generation config ends a completion."""


def byte_level_split(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Split text at matches of `pattern`, then encode the pieces in the byte alphabet."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def byte_of_sign() -> dict[str, int]:
    """Printable bytes are encoded as themselves, the others as U+0100 and following."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def check_byte_level(core: tokenizers.Tokenizer, origin: str) -> None:
    """Raise unless it is a byte-level BPE that adds nothing to its input text."""
    largest = max(core.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= MAX_IDS:  # the library walks over all ids below it
        raise DataError(
            f"{origin}: it has a token with the id {largest}, and {MAX_IDS - 1} is the largest; fetch it again"
        )
    document = json.loads(core.to_str())
    kind = document["model"]["type"]
    if kind != "BPE":
        raise DataError(f"{origin}: tokenizer model {kind!r} is not supported; known: BPE over bytes")
    parts = document["pre_tokenizer"] or {}
    parts = parts.get("pretokenizers", [parts])
    levels = [part for part in parts if part.get("type") == "ByteLevel"]
    if not levels:
        names = ", ".join(str(part.get("type")) for part in parts)
        raise DataError(f"{origin}: pre-tokenizer {names} is not supported; only vocabularies of bytes (ByteLevel) are")
    if any(level.get("add_prefix_space") for level in levels):
        raise DataError(f"{origin}: its pre-tokenizer adds a space before every text (add_prefix_space), not supported")
    signs = byte_of_sign()
    added = {token["content"] for token in document["added_tokens"]}
    vocabulary = core.get_vocab(with_added_tokens=False)
    strange = [token for token in vocabulary if token not in added and any(sign not in signs for sign in token)]
    if strange:
        raise DataError(f"{origin}: {len(strange)} tokens are not spelt in bytes, such as {strange[0]!r}")
