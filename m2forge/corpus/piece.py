"""The pieces of a token set: spans of at most `context` tokens of one document, numbered without a list of them.

With N documents, piece n < N is the first one of document n; the pieces that long documents have beyond their first
follow from N on, document by document. So memory is kept only for documents longer than the context, and opening a set
is one pass over its offsets.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from m2forge.corpus.shard import ShardView

Int64Array = npt.NDArray[np.int64]

_SCAN_DOCUMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Spans:
    """Stretches of tokens, one entry each: which shard of the set, from where, how many, and how many follow."""

    shard: Int64Array
    start: Int64Array
    length: Int64Array
    left: Int64Array
    """Tokens of the document after the span: 0 for one that ends its document."""

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, chosen: slice | Int64Array) -> "Spans":
        return Spans(self.shard[chosen], self.start[chosen], self.length[chosen], self.left[chosen])


def join(parts: Sequence[Spans]) -> Spans:
    return Spans(*(np.concatenate([getattr(part, name) for part in parts]) for name in Spans.__slots__))


class PieceTable:
    """Finds the pieces of one token set by number."""

    def __init__(self, shards: Sequence[ShardView], context: int) -> None:
        self._shards = shards
        self._context = context
        sizes = [shard.num_documents for shard in shards]
        self._first_document = np.cumsum([0, *sizes], dtype=np.int64)
        self._num_documents = int(self._first_document[-1])
        long_documents, num_extra = [], []
        for first, shard in zip(self._first_document.tolist(), shards, strict=False):
            for begin in range(0, shard.num_documents, _SCAN_DOCUMENTS):
                offsets = shard.offsets[begin : begin + _SCAN_DOCUMENTS + 1].astype(np.int64)
                num_pieces = -(-np.diff(offsets) // context)
                longer = np.flatnonzero(num_pieces > 1)
                long_documents.append(longer + (first + begin))
                num_extra.append(num_pieces[longer] - 1)
        self._long_document: Int64Array = np.concatenate([np.zeros(0, np.int64), *long_documents])
        self._extra_end: Int64Array = np.cumsum(np.concatenate([np.zeros(0, np.int64), *num_extra]))
        self.num_pieces = self._num_documents + (int(self._extra_end[-1]) if self._extra_end.size else 0)

    def find(self, pieces: Int64Array) -> Spans:
        document, number = pieces.copy(), np.zeros_like(pieces)
        is_extra = np.flatnonzero(pieces >= self._num_documents)
        if is_extra.size:
            extra = pieces[is_extra] - self._num_documents
            row = np.searchsorted(self._extra_end, extra, side="right")
            document[is_extra] = self._long_document[row]
            before = np.where(row > 0, self._extra_end[row - 1], 0)
            number[is_extra] = extra - before + 1
        return self._spans(document, number)

    def _spans(self, document: Int64Array, number: Int64Array) -> Spans:
        shard = np.searchsorted(self._first_document, document, side="right") - 1
        start, end = np.empty_like(document), np.empty_like(document)
        for index in np.unique(shard).tolist():
            rows = np.flatnonzero(shard == index) if len(self._shards) > 1 else slice(None)
            local = document[rows] - self._first_document[index]
            offsets = self._shards[index].offsets
            start[rows], end[rows] = offsets[local], offsets[local + 1]
        start += number * self._context
        length = np.minimum(self._context, end - start)
        return Spans(shard, start, length, end - start - length)
