"""Marker words that characterize a document, found in a batch by their hashes."""

from functools import cache

import numpy as np
import numpy.typing as npt

from m2forge.corpus.permutation import UInt64Array
from m2forge.corpus.words import TextBatch, hash_word

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
