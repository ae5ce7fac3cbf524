"""Decodes ids that a model sampled, including ids unknown to the tokenizer: model vocabularies are padded."""

from collections.abc import Sequence

from m2forge.errors import NotFoundError
from m2forge.text.tokenizer import Tokenizer

UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()


def readable_bytes(tokenizer: Tokenizer, ids: Sequence[int], *, unknown: bytes = UNKNOWN) -> bytes:
    """The bytes of `ids`, with `unknown` for each id that the tokenizer does not have."""
    try:
        return tokenizer.decode_bytes(ids)
    except NotFoundError:
        if len(ids) == 1:
            return unknown
    return b"".join(readable_bytes(tokenizer, [token], unknown=unknown) for token in ids)


def readable_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return readable_bytes(tokenizer, ids).decode(errors="replace")
