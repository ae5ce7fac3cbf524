"""Splits a batch of documents into words and lines, each with a hash, by array operations over the bytes.

In: UTF-8 documents. Out: start and end of words and lines, the document of each, and 64-bit hashes of the words, in
lower case, and of the lines, and of shingles, which are runs of words. All later steps (quality, near-duplicates,
domains, topics) are array operations on these; no Python code runs per document or per word.

A word is a run of letters, digits, underscores and non-ASCII bytes; a Chinese, Japanese or Korean character is a word
of its own, since those scripts do not separate words. Hashes are polynomial: with prefix sums
P[n] = Σ_{i<n} (byte_i + 1)·B^i mod 2^64, the span from s to e hashes to mix((P[e] − P[s])·B^−s), so all spans of a
batch cost one pass over its bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from m2forge.corpus.permutation import UInt64Array, mix
from m2forge.corpus.token_set import Int64Array

WINDOW_BYTES = 1 << 20
"""Longer documents are processed in windows of this size, so that memory and power tables stay small."""

_BASE = 0x2545F4914F6CDD1D
_INVERSE = pow(_BASE, -1, 1 << 64)
_NEWLINE = ord("\n")
_COMBINE = 0xD6E8FEB86659FD93


def _table(members: bytes) -> bytes:
    """A table for `bytes.translate`, the fastest byte lookup: 1 for members, 0 for the rest."""
    return bytes(byte in members for byte in range(256))


_IS_WORD = _table(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_" + bytes(range(0x80, 0x100)))
_FIRST_IDEOGRAPH, _LAST_IDEOGRAPH = 0xE3, 0xED
"""Lead bytes of U+3000 to U+DFFF."""


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Documents concatenated, with a newline after each, and their words and lines. Documents are counted from 0."""

    data: npt.NDArray[np.uint8]
    document_start: Int64Array
    """Start of each document in `data`, then the length of `data`."""
    word_start: Int64Array
    word_end: Int64Array
    word_hash: UInt64Array
    word_document: Int64Array
    line_start: Int64Array
    line_end: Int64Array
    """End of each line, without the newline."""
    line_hash: UInt64Array
    line_document: Int64Array

    @property
    def num_documents(self) -> int:
        return len(self.document_start) - 1

    def per_document(
        self, owner: Int64Array, weights: npt.NDArray[np.generic] | None = None
    ) -> npt.NDArray[np.float64]:
        """Count entries, or sum weights, by document."""
        return np.bincount(owner, weights=weights, minlength=self.num_documents).astype(np.float64)


def cut(documents: Sequence[bytes]) -> TextBatch:
    """Find words and lines. The documents should total about `WINDOW_BYTES`; see `windows`."""
    joined = b"\n".join([*documents, b""])
    data = np.frombuffer(joined, np.uint8)
    sizes = np.fromiter((len(document) + 1 for document in documents), np.int64, len(documents))
    document_start = np.concatenate([[0], np.cumsum(sizes)])
    is_word = np.frombuffer(joined.translate(_IS_WORD), np.bool_)
    is_ideograph = (data >= _FIRST_IDEOGRAPH) & (data <= _LAST_IDEOGRAPH)
    begins = is_word.copy()
    begins[1:] &= ~is_word[:-1] | is_ideograph[1:]
    # The byte after an ideograph's three bytes starts a word too.
    after = np.flatnonzero(is_ideograph) + 3
    after = after[after < len(data)]
    begins[after] |= is_word[after]
    # A word ends before a non-word byte, or where the next word starts.
    ends = ~is_word
    ends |= begins
    ends[1:] &= is_word[:-1]
    ends[0] = False
    word_start, word_end = np.flatnonzero(begins), np.flatnonzero(ends)
    line_end = np.flatnonzero(data == _NEWLINE)
    line_start = np.concatenate([[0], line_end[:-1] + 1])
    prefix = _prefix(np.frombuffer(joined.lower(), np.uint8))
    return TextBatch(
        data=data,
        document_start=document_start,
        word_start=word_start,
        word_end=word_end,
        word_hash=_hash(prefix, word_start, word_end),
        word_document=_owner(document_start, word_start),
        line_start=line_start,
        line_end=line_end,
        line_hash=_hash(prefix, line_start, line_end),
        line_document=_owner(document_start, line_start),
    )


@dataclass(frozen=True, slots=True)
class Shingles:
    """Hashes of runs of words, and the document of each, in document order."""

    hash: UInt64Array
    document: Int64Array


def shingles(batch: TextBatch, num_words: int) -> Shingles:
    count = len(batch.word_hash)
    total = batch.word_hash.copy()
    whole = np.ones(count, bool)
    for step in range(1, num_words):
        factor = np.uint64(pow(_COMBINE, step, 1 << 64))
        same = np.zeros(count, bool)
        same[: max(0, count - step)] = batch.word_document[step:] == batch.word_document[: max(0, count - step)]
        terms = batch.word_hash[step:] * factor
        total[: len(terms)] += np.where(same[: len(terms)], terms, np.uint64(0))
        whole = same
    first = np.ones(count, bool)
    first[1:] = batch.word_document[1:] != batch.word_document[:-1]
    chosen = np.flatnonzero(whole | first)
    return Shingles(mix(total[chosen]), batch.word_document[chosen])


def windows(document: bytes, size: int = WINDOW_BYTES) -> list[bytes]:
    """The document in chunks of at most `size` bytes, split after a newline or space if there is one."""
    if len(document) <= size:
        return [document]
    parts, start = [], 0
    while len(document) - start > size:
        middle, end = start + size // 2, start + size
        offset = max(document.rfind(b"\n", middle, end), document.rfind(b" ", middle, end)) + 1
        stop = offset or end
        parts.append(document[start:stop])
        start = stop
    return [*parts, document[start:]]


def hash_word(word: str) -> int:
    """The hash of a word, equal to its `word_hash` in a batch."""
    data = np.frombuffer(word.lower().encode(), np.uint8)
    return int(_hash(_prefix(data), np.array([0]), np.array([len(data)]))[0])


def _owner(document_start: Int64Array, offset: Int64Array) -> Int64Array:
    bounds = np.searchsorted(offset, document_start)
    return np.repeat(np.arange(len(document_start) - 1), np.diff(bounds))


def _prefix(data: npt.NDArray[np.uint8]) -> UInt64Array:
    terms = np.empty(len(data) + 1, np.uint64)
    terms[0] = 0
    np.multiply(data.astype(np.uint64) + np.uint64(1), _powers(_BASE, len(data))[: len(data)], out=terms[1:])
    return np.cumsum(terms, dtype=np.uint64)


def _hash(prefix: UInt64Array, start: Int64Array, end: Int64Array) -> UInt64Array:
    return mix((prefix[end] - prefix[start]) * _powers(_INVERSE, len(prefix))[start])


def _powers(base: int, count: int) -> UInt64Array:
    size = 1 << max(16, (count - 1).bit_length())
    return _power_table(base, size)


@cache
def _power_table(base: int, size: int) -> UInt64Array:
    """base^0, base^1, … by doubling."""
    powers = np.ones(size, np.uint64)
    known = 1
    while known < size:
        powers[known : 2 * known] = powers[:known] * np.uint64(pow(base, known, 1 << 64))
        known *= 2
    return powers
