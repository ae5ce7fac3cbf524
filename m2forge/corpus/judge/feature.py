"""Per-document counts, used by quality and domain rules.

Every feature is a sum over the text, so a long document's features are the sums over its windows. One row per document,
one column per member of `Feature`.

Marker words that characterize a domain are found in a batch by their hashes.
"""

from enum import IntEnum, auto
from functools import cache

import numpy as np
import numpy.typing as npt

from m2forge.corpus.judge.words import Shingles, TextBatch, hash_word
from m2forge.corpus.permutation import UInt64Array

MARKERS: dict[str, str] = {
    "stop": "the be to of and that have with this is are was for it as on at by from or not in which",
    "boilerplate": "lorem ipsum javascript cookie cookies copyright login signup subscribe newsletter",
    "code": "def return import class function const var let void int self elif struct public static include null "
    "nullptr fn impl println printf endif",
    "maths": "theorem lemma proof corollary equation equations polynomial integral derivative matrix eigenvalue frac "
    "mathbb mathcal sqrt forall modulo prime algebra geometry calculus velocity electron molecule enzyme protein "
    "quantum thermodynamics voltage",
    "academic": "abstract references doi arxiv et al hypothesis methodology keywords supplementary journal proceedings "
    "citation bibliography",
    "books": "chapter prologue epilogue isbn novel preface",
    "qa": "question answer questions answers asked answered q a",
}
"""Words of each group, in lower case."""


class MarkerTable:
    """Finds marker words. A lookup in a table of 2^16 flags rules out nearly all other words."""

    def __init__(self) -> None:
        entries = sorted(
            (hash_word(word), group) for group, name in enumerate(MARKERS) for word in MARKERS[name].split()
        )
        self._hash: UInt64Array = np.array([value for value, _ in entries], np.uint64)
        self._group = np.array([group for _, group in entries])
        self._maybe = np.zeros(1 << 16, bool)
        self._maybe[(self._hash & np.uint64(0xFFFF)).astype(np.int64)] = True

    def count(self, batch: TextBatch) -> npt.NDArray[np.float64]:
        """How often each group occurs: one row per document, columns as in `MARKERS`."""
        maybe = np.flatnonzero(self._maybe[batch.word_hash & np.uint64(0xFFFF)])
        values = batch.word_hash[maybe]
        row = np.minimum(np.searchsorted(self._hash, values), len(self._hash) - 1)
        found = self._hash[row] == values
        cell = batch.word_document[maybe[found]] * len(MARKERS) + self._group[row[found]]
        counts = np.bincount(cell, minlength=batch.num_documents * len(MARKERS))
        return counts.reshape(batch.num_documents, len(MARKERS)).astype(np.float64)


@cache
def marker_table() -> MarkerTable:
    return MarkerTable()


FeatureArray = npt.NDArray[np.float64]

LONG_WORD_BYTES = 100
"""Words longer than this are data, not words."""
LONG_LINE_BYTES = 1000


class Feature(IntEnum):
    NUM_BYTES = 0
    LETTERS = auto()
    """Bytes of letters; all non-ASCII bytes count as letters."""
    DIGITS = auto()
    SYMBOLS = auto()
    """Bytes of characters that are frequent in code."""
    HASHES = auto()
    """Bytes that are #."""
    WORDS = auto()
    WORD_BYTES = auto()
    LETTER_WORDS = auto()
    """Words that begin with a letter, an underscore or a non-ASCII byte."""
    LONG_WORD_BYTES = auto()
    """Bytes in words longer than LONG_WORD_BYTES."""
    LINES = auto()
    """Non-empty lines; all line features count these only."""
    LINE_BYTES = auto()
    LONG_LINE_BYTES = auto()
    """Bytes in lines longer than LONG_LINE_BYTES."""
    STOPPED_LINES = auto()
    """Lines that end with sentence punctuation."""
    BULLET_LINES = auto()
    ELLIPSIS_LINES = auto()
    REPEATED_LINES = auto()
    """Lines that occurred earlier in the document."""
    SHINGLES = auto()
    REPEATED_SHINGLES = auto()
    """Shingles that occurred earlier in the document."""
    STOP = auto()
    """From here on: number of words in each group of MARKERS, in its order."""
    BOILERPLATE = auto()
    CODE = auto()
    MATHS = auto()
    ACADEMIC = auto()
    BOOKS = auto()
    QA = auto()


assert [name.upper() for name in MARKERS] == [feature.name for feature in Feature][Feature.STOP :]

_OTHER, _LETTER, _DIGIT, _SYMBOL, _HASH = range(5)
_NUM_CLASSES = 5


def _class_table() -> bytes:
    table = bytearray(256)
    for byte in range(256):
        character = chr(byte)
        if byte >= 0x80 or character.isalpha():
            table[byte] = _LETTER
        elif character.isdigit():
            table[byte] = _DIGIT
        elif character in "{}()[];=<>+*/&|^%$@\\~`_":
            table[byte] = _SYMBOL
    table[ord("#")] = _HASH
    return bytes(table)


_CLASS = _class_table()
_STOPS, _BULLETS = np.zeros(256, bool), np.zeros(256, bool)
_STOPS[list(b'.!?"')] = True
_BULLETS[list(b"-*+")] = True
_NEWLINE, _DOT = ord("\n"), ord(".")


def count_features(batch: TextBatch, found: Shingles) -> FeatureArray:
    features = np.zeros((batch.num_documents, len(Feature)))
    _count_bytes(batch, features)
    _count_words(batch, features)
    _count_lines(batch, features)
    features[:, Feature.SHINGLES] = batch.per_document(found.document)
    features[:, Feature.REPEATED_SHINGLES] = _repeated(found.document, found.hash, batch)
    features[:, Feature.STOP :] = marker_table().count(batch)
    return features


def _count_bytes(batch: TextBatch, features: FeatureArray) -> None:
    sizes = np.diff(batch.document_start)
    classes = np.frombuffer(batch.data.tobytes().translate(_CLASS), np.uint8)
    cell = np.repeat(np.arange(batch.num_documents, dtype=np.int32) * _NUM_CLASSES, sizes)
    cell += classes
    counts = np.bincount(cell, minlength=batch.num_documents * _NUM_CLASSES).reshape(-1, _NUM_CLASSES)
    features[:, Feature.NUM_BYTES] = sizes - 1
    features[:, Feature.LETTERS : Feature.HASHES + 1] = counts[:, _LETTER : _HASH + 1]


def _count_words(batch: TextBatch, features: FeatureArray) -> None:
    owner, length = batch.word_document, batch.word_end - batch.word_start
    first = batch.data[batch.word_start]
    features[:, Feature.WORDS] = batch.per_document(owner)
    features[:, Feature.WORD_BYTES] = batch.per_document(owner, length)
    features[:, Feature.LETTER_WORDS] = batch.per_document(owner[first >= ord("A")])
    is_long = length > LONG_WORD_BYTES
    features[:, Feature.LONG_WORD_BYTES] = batch.per_document(owner[is_long], length[is_long])


def _count_lines(batch: TextBatch, features: FeatureArray) -> None:
    filled = np.flatnonzero(batch.line_end > batch.line_start)
    owner, start, end = batch.line_document[filled], batch.line_start[filled], batch.line_end[filled]
    length = end - start
    last, first, second = batch.data[end - 1], batch.data[start], batch.data[start + 1]
    is_long = length > LONG_LINE_BYTES
    dots = (last == _DOT) & (length >= 3) & (batch.data[end - 2] == _DOT) & (batch.data[end - 3] == _DOT)
    features[:, Feature.LINES] = batch.per_document(owner)
    features[:, Feature.LINE_BYTES] = batch.per_document(owner, length)
    features[:, Feature.LONG_LINE_BYTES] = batch.per_document(owner[is_long], length[is_long])
    features[:, Feature.STOPPED_LINES] = batch.per_document(owner[_STOPS[last]])
    features[:, Feature.BULLET_LINES] = batch.per_document(owner[_BULLETS[first] & (second == ord(" "))])
    features[:, Feature.ELLIPSIS_LINES] = batch.per_document(owner[dots])
    features[:, Feature.REPEATED_LINES] = _repeated(owner, batch.line_hash[filled], batch)


def _repeated(owner: npt.NDArray[np.int64], hashes: npt.NDArray[np.uint64], batch: TextBatch) -> FeatureArray:
    """How many entries of each document occurred earlier in it."""
    # The document index in the upper bits groups each document's entries; 40 bits of hash distinguish them.
    keys = np.sort((owner.astype(np.uint64) << np.uint64(40)) | (hashes >> np.uint64(24)))
    again = keys[1:][keys[1:] == keys[:-1]]
    return batch.per_document((again >> np.uint64(40)).astype(np.int64))
