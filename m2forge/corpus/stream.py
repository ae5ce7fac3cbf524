"""The endless stream of one token set's documents, and packs filled from several streams at fixed shares.

A stream yields every document once per epoch, reshuffled each epoch by the seed. Up to `LOOKAHEAD` documents of one
epoch are open at a time, each queued with its next piece; the rest of a document longer than the context is queued
behind the others, so that its pieces are far apart. Reading starts at a piece chosen by the seed and wraps around, so
that short runs see more than the beginnings of long documents. A position is therefore the number of documents opened
and, for each unfinished one, where reading started and how many of its tokens were taken: it is valid for any context
and any mixture.

A pack is filled in two passes. First by fair queueing: a piece's virtual time is (tokens its stream gave before it +
half its length) ÷ share, and the next piece is the oldest one of the stream with the lowest time, ties by stream order.
Once that piece does not fit, best fit: the longest queued piece that does, of any stream that stays within one context
of its share. So no piece is cut, none starves, and the tokens of each stream stay within about one context of share ×
total.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from m2forge.config import Config
from m2forge.corpus.permutation import mix, shuffled
from m2forge.corpus.piece import DocumentTable, Int64Array, Piece, piece_at
from m2forge.corpus.shard import ShardView
from m2forge.errors import DataError

LOOKAHEAD = 256
"""Documents of a stream that are open at a time."""
_EPOCH_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIND_DOCUMENTS = 1024
"""Documents are looked up this many at a time, to amortize the fixed cost of array operations."""


class StreamPosition(Config):
    """The position of a stream, independent of context and mixture."""

    num_opened: int = 0
    """Documents opened so far, counted over all epochs."""
    unfinished: tuple[tuple[int, int, int], ...] = ()
    """(index in the order, token at which reading started, tokens taken) of each unfinished one, in queue order."""


class Stream:
    """Documents of one token set in reading order."""

    def __init__(
        self,
        name: str,
        tag: int,
        share: float,
        shards: Sequence[ShardView],
        *,
        context: int,
        seed: int,
        position: StreamPosition | None = None,
    ) -> None:
        self.name = name
        self.tag = tag
        self.share = share
        self.shards = shards
        self.num_tokens = 0
        """Tokens taken since the shares took effect."""
        self._context = context
        self._table = DocumentTable(shards)
        self._key = np.uint64(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little"))
        position = position or StreamPosition()
        self._num_opened = position.num_opened
        self._found: list[Piece] = []
        self.waiting: list[Piece] = self._reopen(position.unfinished)
        """The next piece of each open document, oldest first."""
        self._open()

    @property
    def next_time(self) -> float:
        return (self.num_tokens + self.waiting[0].length / 2) / self.share

    def take(self, index: int) -> Piece:
        """Remove the piece at `index` from the queue, and queue what follows it."""
        piece = self.waiting.pop(index)
        self.num_tokens += piece.length
        taken = piece.taken + piece.length
        if taken < piece.size:
            self.waiting.append(piece_at(*piece[:5], taken, self._context))
        else:
            self._open()
        return piece

    def position(self) -> StreamPosition:
        """The current position. Untouched documents at the end of the queue are omitted: `_open` finds them again."""
        num_opened, num_listed = self._num_opened, len(self.waiting)
        while num_listed:
            last = self.waiting[num_listed - 1]
            if last.taken or last.number != num_opened - 1:
                break
            num_listed, num_opened = num_listed - 1, num_opened - 1
        # Where to start an untouched document is chosen on resume, since it depends on the context.
        unfinished = tuple((p.number, p.first if p.taken else 0, p.taken) for p in self.waiting[:num_listed])
        return StreamPosition(num_opened=num_opened, unfinished=unfinished)

    def _open(self) -> None:
        """Open documents until `LOOKAHEAD` are queued. An epoch is finished before the next one is opened."""
        size = self._table.num_documents
        epoch = (self.waiting[0].number if self.waiting else self._num_opened) // size
        missing = min(LOOKAHEAD - len(self.waiting), (epoch + 1) * size - self._num_opened)
        if missing <= 0:
            return
        if len(self._found) < missing:
            next_number = self._num_opened + len(self._found)
            self._found += self._find(np.arange(next_number, next_number + _FIND_DOCUMENTS))
        self.waiting += self._found[:missing]
        del self._found[:missing]
        self._num_opened += missing

    def _reopen(self, unfinished: Sequence[tuple[int, int, int]]) -> list[Piece]:
        if not unfinished:
            return []
        fresh = self._find(np.array([number for number, _, _ in unfinished]))
        pieces = [
            piece_at(*piece[:4], first, taken, self._context) if taken else piece
            for piece, (_, first, taken) in zip(fresh, unfinished, strict=True)
        ]
        for piece in pieces:
            limits = ((piece.number, self._num_opened), (piece.first, piece.size), (piece.taken, piece.size))
            if not all(0 <= value < limit for value, limit in limits):
                raise DataError(f"{self.name}: {unfinished!r} names tokens that its documents do not have")
        return pieces

    def _find(self, number: Int64Array) -> list[Piece]:
        """The first piece of each document."""
        position, size = number.astype(np.uint64), np.uint64(self._table.num_documents)
        keys = mix(self._key + (position // size) * _EPOCH_STEP)
        document = shuffled(position % size, self._table.num_documents, keys)
        shard, begin, num_tokens = self._table.find(document.astype(np.int64))
        num_pieces = -(-num_tokens // self._context)
        first = (mix(keys ^ mix(document)) % num_pieces.astype(np.uint64)).astype(np.int64) * self._context
        rows = np.stack([number, shard, begin, num_tokens, first], 1).tolist()
        return [piece_at(n, where, start, size, at, 0, self._context) for n, where, start, size, at in rows]


class Chosen(NamedTuple):
    """A piece and the index of its stream."""

    stream: int
    piece: Piece


def fill(streams: Sequence[Stream], num_tokens: int, context: int) -> list[Chosen]:
    """Take the pieces of one pack of at most `num_tokens` tokens."""
    chosen: list[Chosen] = []
    room = num_tokens

    def take(stream: int, index: int) -> None:
        nonlocal room
        piece = streams[stream].take(index)
        room -= piece.length
        chosen.append(Chosen(stream, piece))

    everyone = range(len(streams))
    while room:
        stream = min(everyone, key=lambda index: streams[index].next_time)
        if streams[stream].waiting[0].length > room:
            break
        take(stream, 0)
    while room:
        found = _best_fit(streams, room, context)
        if found is None:
            break
        take(*found)
    return chosen


def _best_fit(streams: Sequence[Stream], room: int, context: int) -> tuple[int, int] | None:
    """(stream, index in its queue) of the longest piece that fits and respects the shares."""
    total = sum(stream.num_tokens for stream in streams)
    found, longest = None, 0
    for number, stream in enumerate(streams):
        limit = float(room)
        if stream.share < 1:
            # After taking x the stream may be at most one context ahead: given + x − share · (total + x) ≤ context.
            limit = min(limit, (context + stream.share * total - stream.num_tokens) / (1 - stream.share))
        for index, piece in enumerate(stream.waiting):
            if longest < piece.length <= limit:
                found, longest = (number, index), piece.length
    return found
