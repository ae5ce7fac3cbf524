"""The endless stream of one token set's pieces, and several streams merged at fixed shares.

A stream gives every piece once per epoch, in an order drawn anew for each epoch from the seed. Streams are merged by
fair queueing: a piece's time is (tokens its stream gave before it + half its length) ÷ share, and the next piece is
the one with the least time, the first of equals. So the tokens given by each stream stay within a piece or so of
share × total, and what comes next depends only on how many pieces and tokens each stream has given: that is the whole
position.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from m2forge.corpus.permutation import mix, shuffled
from m2forge.corpus.piece import Int64Array, PieceTable, Spans, join
from m2forge.corpus.shard import ShardView

_EPOCH_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIN_AHEAD = 16


class Stream:
    """Pieces of one token set in the order of reading. `num_pieces` and `num_tokens` count what was taken."""

    def __init__(self, name: str, tag: int, share: float, shards: Sequence[ShardView], context: int, seed: int) -> None:
        self.name = name
        self.tag = tag
        self.share = share
        self.shards = shards
        self.num_pieces = 0
        self.num_tokens = 0
        self._table = PieceTable(shards, context)
        self._mean_length = sum(shard.tokens.size for shard in shards) / self._table.num_pieces
        self._key = np.uint64(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little"))
        self._ahead = self._find(0, 0)

    def seek(self, num_pieces: int, num_tokens: int) -> None:
        """Go to where this many pieces and tokens have been taken."""
        self.num_pieces, self.num_tokens = num_pieces, num_tokens
        self._ahead = self._find(0, 0)

    def take(self, num_pieces: int, num_tokens: int) -> None:
        """The next pieces, which hold `num_tokens`, are used."""
        self.num_pieces += num_pieces
        self.num_tokens += num_tokens
        self._ahead = self._ahead[num_pieces:]

    def ahead(self) -> Spans:
        """Pieces to come, as many as have been looked up."""
        return self._ahead

    def extend(self, num_tokens: int) -> None:
        """Look up more pieces, about as many as hold `num_tokens`."""
        count = _MIN_AHEAD + int(num_tokens / self._mean_length)
        self._ahead = join([self._ahead, self._find(self.num_pieces + len(self._ahead), count)])

    def piece(self, number: int) -> Spans:
        """The piece that was or will be given after `number` others."""
        return self._find(number, 1)

    def _find(self, first: int, count: int) -> Spans:
        position = np.arange(first, first + count, dtype=np.uint64)
        size = np.uint64(self._table.num_pieces)
        keys = mix(self._key + (position // size) * _EPOCH_STEP)
        return self._table.find(shuffled(position % size, self._table.num_pieces, keys).astype(np.int64))


@dataclass(frozen=True, slots=True)
class Merged:
    """Pieces of several streams in the order of reading."""

    stream: Int64Array
    """Index of the stream each comes from."""
    spans: Spans

    @property
    def num_tokens(self) -> int:
        return int(self.spans.length.sum())

    def __getitem__(self, chosen: slice) -> "Merged":
        return Merged(self.stream[chosen], self.spans[chosen])

    def __add__(self, other: "Merged") -> "Merged":
        return Merged(np.concatenate([self.stream, other.stream]), join([self.spans, other.spans]))

    def cut(self, num_tokens: int) -> tuple["Merged", "Merged"]:
        """The first `num_tokens` tokens and the rest, which lies within the last piece."""
        excess = self.num_tokens - num_tokens
        if excess == 0:
            return self, self[len(self.stream) :]
        shard, start, length, left = self.spans.shard, self.spans.start, self.spans.length, self.spans.left
        kept = length[-1:] - excess
        head = Spans(shard, start, np.append(length[:-1], kept), np.append(left[:-1], left[-1:] + excess))
        tail = Spans(shard[-1:], start[-1:] + kept, length[-1:] - kept, left[-1:])
        return Merged(self.stream, head), Merged(self.stream[-1:], tail)


def merge(streams: Sequence[Stream], num_tokens: int) -> Merged:
    """The next pieces of all streams, at least `num_tokens` tokens of them. Nothing is taken yet."""
    while True:
        times, end_time = [], []
        for stream in streams:
            length = stream.ahead().length
            given = stream.num_tokens + np.cumsum(length)
            times.append((given - length / 2) / stream.share)
            end_time.append((given[-1] if given.size else stream.num_tokens) / stream.share)
        # Beyond the first stream to run out of known pieces nothing can be said.
        first_out = int(np.argmin(end_time))
        num_known = [int(np.searchsorted(time, end_time[first_out], side="right")) for time in times]
        known = [stream.ahead()[:count] for stream, count in zip(streams, num_known, strict=True)]
        if sum(int(spans.length.sum()) for spans in known) >= num_tokens:
            break
        streams[first_out].extend(round(num_tokens * streams[first_out].share))
    owner = np.repeat(np.arange(len(streams)), num_known)
    order = np.lexsort((owner, np.concatenate([time[:count] for time, count in zip(times, num_known, strict=True)])))
    return Merged(owner[order], join(known)[order])
