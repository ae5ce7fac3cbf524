"""The pieces of a token set, spans of at most `context` tokens of one document. No list of them is kept."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m2forge.corpus.shard import ShardView

Int64Array = npt.NDArray[np.int64]


class Piece(NamedTuple):
    """The next tokens to read of a document."""

    number: int
    """Of the document in its stream's order of reading, counted over all epochs."""
    shard: int
    """Which shard of the set."""
    start: int
    """First token of the piece in the shard."""
    length: int
    taken: int
    """Tokens of the document before the piece."""
    left: int
    """Tokens of the document after the piece: 0 for one that ends its document."""

    def after(self, context: int) -> "Piece":
        """The piece that follows, where `left` is above 0."""
        length = min(context, self.left)
        taken = self.taken + self.length
        return Piece(self.number, self.shard, self.start + self.length, length, taken, self.left - length)


class DocumentTable:
    """Finds the documents of one token set by number."""

    def __init__(self, shards: Sequence[ShardView]) -> None:
        self._shards = shards
        self._first_document = np.cumsum([0, *(shard.num_documents for shard in shards)], dtype=np.int64)
        self.num_documents = int(self._first_document[-1])

    def find(self, document: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """(shard, first token in it, end in it) of each document."""
        shard = np.searchsorted(self._first_document, document, side="right") - 1
        start, end = np.empty_like(document), np.empty_like(document)
        for index in np.unique(shard).tolist():
            rows = np.flatnonzero(shard == index)
            local = document[rows] - self._first_document[index]
            offsets = self._shards[index].offsets
            start[rows], end[rows] = offsets[local], offsets[local + 1]
        return shard, start, end
