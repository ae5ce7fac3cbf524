"""Packs for training, read from a memory-mapped corpus folder.

The output is an endless sequence of packs of at most `pack_tokens` tokens. Each token set (a domain's documents) yields
its documents in a pseudo-random order, each once per epoch; sets are interleaved so that tokens follow the mixture. A
document longer than `context` is read in pieces of `context` tokens; a piece is never cut, so a pack may be a little
shorter than `pack_tokens`. A token's target is the next token of its document, even across pieces; only the last token
of a document has none.

The sequence is a function of corpus, context, pack_tokens, seed, split and shares. A reader created with another's
`state` resumes exactly there. A reader created `after` another continues with the documents that the other left
unread, with its own context and mixture.

A stream of one token set's documents yields every document once per epoch, reshuffled each epoch by the seed. Up to
`LOOKAHEAD` documents of one epoch are open at a time, each queued with its next piece; the rest of a document longer
than the context is queued behind the others, so that its pieces are far apart. Reading starts at a piece chosen by the
seed and wraps around, so that short runs see more than the beginnings of long documents. A position is therefore the
number of documents opened and, for each unfinished one, where reading started and how many of its tokens were taken: it
is valid for any context and any mixture.

A pack is filled in two passes. First by fair queueing: a piece's virtual time is (tokens its stream gave before it +
half its length) ÷ share, and the next piece is the oldest one of the stream with the lowest time, ties by stream order.
Once that piece does not fit, best fit: the longest queued piece that does, of any stream that stays within one context
of its share. So no piece is cut, none starves, and the tokens of each stream stay within about one context of share ×
total.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import ValidationError

from m2forge.config import Config
from m2forge.corpus.manifest import Kind, Split, TokenSet, read_manifest
from m2forge.corpus.mixture import set_shares
from m2forge.corpus.permutation import mix, shuffled
from m2forge.corpus.token_set import DocumentTable, Int64Array, Piece, ShardView, TokenArray, piece_at
from m2forge.errors import ConfigError, DataError
from m2forge.records import NO_TARGET, JsonValue, Pack

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


class ReaderState(Config):
    """The position of a reader, and the settings it is valid for. A few kilobytes of JSON per stream."""

    corpus: str
    """Fingerprint of the corpus."""
    context: int
    pack_tokens: int
    seed: int
    split: Literal["train", "held_out"]
    shares: Mapping[str, float]
    """Share of each stream, resolved from mixture and long share."""
    tokens: Mapping[str, int]
    """Tokens read from each stream since these shares took effect."""
    documents: Mapping[str, StreamPosition]
    """Position of each stream, including streams without a share."""

    def to_json(self) -> dict[str, JsonValue]:
        return dict(self.model_dump(mode="json"))

    @classmethod
    def from_json(cls, data: Mapping[str, JsonValue]) -> "ReaderState":
        if "pieces" in data and "documents" not in data:
            raise DataError(
                "the reader's state counts pieces in the order of an earlier version, which this version cannot resume "
                "from; start a run of another name from the checkpoint's model folder"
            )
        try:
            return cls.model_validate_json(json.dumps(data))
        except ValidationError as error:
            raise DataError(f"not the state of a corpus reader: {error}") from error


class CorpusReader:
    domains: tuple[str, ...]
    """All domains of the corpus; `Pack.tags` index into it, the same for both splits."""

    def __init__(
        self,
        folder: Path,
        *,
        context: int,
        pack_tokens: int,
        seed: int,
        mixture: Mapping[str, float] | None = None,
        split: Split = "train",
        long_share: float = 0.0,
        state: ReaderState | None = None,
        after: ReaderState | None = None,
    ) -> None:
        """`state`: resume from a reader with the same context, pack_tokens and mixture. `after`: continue after a
        reader of the same corpus, seed and split; its unread documents come first."""
        if not 1 <= context <= pack_tokens:
            raise ConfigError(f"pack_tokens ({pack_tokens}) must hold one document of context ({context}), at least 1")
        manifest = read_manifest(folder)
        self.manifest = manifest
        self.domains = tuple(sorted({token_set.domain for token_set in manifest.sets}))
        self.num_tokens = sum(s.num_tokens for s in manifest.sets if s.split == split and s.kind is Kind.PLAIN)
        """Tokens of the split, each document counted once."""
        shares = {
            _name(token_set): (token_set, share)
            for token_set, share in set_shares(manifest, mixture, split, long_share)
        }
        self._expected_state = ReaderState(
            corpus=manifest.fingerprint,
            context=context,
            pack_tokens=pack_tokens,
            seed=seed,
            split=split,
            shares={name: share for name, (_, share) in shares.items()},
            tokens={},
            documents={},
        )
        if state is not None:
            self._require_same(state, ("corpus", "context", "pack_tokens", "seed", "split", "shares"))
        if after is not None:
            self._require_same(after, ("corpus", "seed", "split"))
        previous = state or after
        self._documents = dict(previous.documents) if previous else {}
        self._streams = [
            Stream(
                name,
                self.domains.index(token_set.domain),
                share,
                [ShardView(folder, shard, manifest.token_bytes) for shard in token_set.shards],
                context=context,
                seed=seed,
                position=self._documents.get(name),
            )
            for name, (token_set, share) in shares.items()
        ]
        if state is not None:
            for stream in self._streams:
                stream.num_tokens = state.tokens[stream.name]
        # The shards of all streams in one list, so that one index identifies a piece's shard.
        self._shards: list[ShardView] = [shard for stream in self._streams for shard in stream.shards]
        self._first_shard = np.cumsum([0, *(len(stream.shards) for stream in self._streams)])[:-1]
        self._tags = np.array([stream.tag for stream in self._streams], np.int32)

    def next_pack(self) -> Pack:
        return self._read(self._fill(self._expected_state.pack_tokens))

    def packs(self, num_packs: int, num_tokens: int) -> Iterator[Pack]:
        """At most `num_packs` packs with at most `num_tokens` tokens in total; ends early if no piece fits the rest."""
        for _ in range(num_packs):
            chosen = self._fill(min(num_tokens, self._expected_state.pack_tokens))
            if not chosen:
                return
            num_tokens -= sum(piece.length for _, piece in chosen)
            yield self._read(chosen)

    def state(self) -> ReaderState:
        """The reader's position after the last pack returned."""
        return self._expected_state.model_copy(
            update={
                "tokens": {stream.name: stream.num_tokens for stream in self._streams},
                "documents": self._documents | {stream.name: stream.position() for stream in self._streams},
            }
        )

    def _require_same(self, state: ReaderState, names: Sequence[str]) -> None:
        for name in names:
            received, expected = getattr(state, name), getattr(self._expected_state, name)
            if received != expected:
                raise ConfigError(
                    f"the reader's state was saved with {name} {received!r}, this reader has {expected!r}; "
                    "resume with the saved value, or start without a state"
                )

    def _fill(self, num_tokens: int) -> list[Chosen]:
        return fill(self._streams, num_tokens, self._expected_state.context)

    def _read(self, chosen: Sequence[Chosen]) -> Pack:
        stream = np.array([index for index, _ in chosen])
        shard, begin, size, offset, length = np.array(
            [(piece.shard, piece.begin, piece.size, piece.offset, piece.length) for _, piece in chosen], np.int64
        ).T
        shard, start = shard + self._first_shard[stream], begin + offset
        end = np.cumsum(length)
        source_index = np.arange(end[-1]) + np.repeat(start - end + length, length)
        tokens = np.empty(end[-1], np.int32)
        after = np.full(len(chosen), NO_TARGET, np.int32)
        for index in np.unique(shard).tolist():
            source: TokenArray = self._shards[index].tokens
            mine = shard == index
            here = np.repeat(mine, length)
            tokens[here] = source[source_index[here]]
            cut = mine & (offset + length < size)
            after[cut] = source[(start + length)[cut]]
        targets = np.empty_like(tokens)
        targets[:-1] = tokens[1:]
        targets[end - 1] = after
        return Pack(tokens=tokens, targets=targets, lengths=length.astype(np.int32), tags=self._tags[stream])


def _name(token_set: TokenSet) -> str:
    return f"{token_set.split}/{token_set.kind.value}-{token_set.domain}"
