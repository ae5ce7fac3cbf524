"""Pieces of a token set: spans of at most `context` tokens of one document, computed on demand."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m2forge.corpus.shard import ShardView

Int64Array = npt.NDArray[np.int64]


class Piece(NamedTuple):
    """The next tokens to read of a document. It is read from `first` to its end, then from its start to `first`."""

    number: int
    """Index of the document in its stream's order, counted over all epochs."""
    shard: int
    """Index of the shard in the set."""
    begin: int
    """Index of the document's first token in the shard."""
    size: int
    """Length of the document in tokens."""
    first: int
    """Index of the document's token at which reading started."""
    taken: int
    """Tokens of the document read before this piece."""
    length: int
    """Tokens of the piece; 0 if the document has been read."""

    @property
    def offset(self) -> int:
        """Index of the piece's first token in the document."""
        return (self.first + self.taken) % self.size


def piece_at(number: int, shard: int, begin: int, size: int, first: int, taken: int, context: int) -> Piece:
    """The piece that follows after `taken` tokens."""
    end = size if first + taken < size else size + first
    return Piece(number, shard, begin, size, first, taken, min(context, end - first - taken))


class DocumentTable:
    """Finds the documents of one token set by index."""

    def __init__(self, shards: Sequence[ShardView]) -> None:
        self._shards = shards
        self._first_document = np.cumsum([0, *(shard.num_documents for shard in shards)], dtype=np.int64)
        self.num_documents = int(self._first_document[-1])

    def find(self, document: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """(shard, first token in it, number of tokens) of each document."""
        shard = np.searchsorted(self._first_document, document, side="right") - 1
        start, end = np.empty_like(document), np.empty_like(document)
        for index in np.unique(shard).tolist():
            rows = np.flatnonzero(shard == index)
            local = document[rows] - self._first_document[index]
            offsets = self._shards[index].offsets
            start[rows], end[rows] = offsets[local], offsets[local + 1]
        return shard, start, end - start
