"""Packs for training, read from a corpus folder by memory map.

What flows out is an endless sequence of packs of exactly `pack_tokens` tokens. Each token set (a domain's documents)
gives its pieces, spans of at most `context` tokens of one document, in a pseudo-random order, every piece once per
epoch; sets alternate so that tokens follow the mixture. Pieces are laid end to end; one that does not fit is cut and
its rest opens the next pack. A token's target is the next one of its document, also where a cut falls between them;
only the last token of a document has none.

The sequence is a function of corpus, context, seed, split and shares. A reader made with another's `state` goes on
exactly where that one stood.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import ValidationError

from m2forge.config import Config
from m2forge.corpus.manifest import Kind, Manifest, Split, TokenSet, read_manifest
from m2forge.corpus.mixture import set_shares
from m2forge.corpus.piece import Spans
from m2forge.corpus.shard import ShardView, TokenArray
from m2forge.corpus.stream import Merged, Stream, merge
from m2forge.errors import ConfigError, DataError
from m2forge.records import NO_TARGET, JsonValue, Pack

_PACKS_AHEAD = 8
"""Pieces are looked up and merged for this many packs at a time: the fixed cost of an array operation is shared."""

_NONE = np.zeros(0, np.int64)


class Cut(Config):
    """A piece of which part has been given."""

    stream: str
    piece: int
    offset: int


class ReaderState(Config):
    """Where a reader stands, and for which reading that holds. A few hundred bytes of JSON."""

    corpus: str
    """Fingerprint of the corpus."""
    context: int
    seed: int
    split: Literal["train", "held_out"]
    shares: Mapping[str, float]
    """Of each stream, as resolved from mixture and long share."""
    pieces: Mapping[str, int]
    """Taken from each stream."""
    tokens: Mapping[str, int]
    """In the pieces taken from each stream."""
    cut: Cut | None
    """The piece, already counted as taken, whose rest opens the next pack."""
    num_packs: int

    def to_json(self) -> dict[str, JsonValue]:
        return dict(self.model_dump(mode="json"))

    @classmethod
    def from_json(cls, data: Mapping[str, JsonValue]) -> "ReaderState":
        try:
            return cls.model_validate(data)
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
    ) -> None:
        if context < 1 or pack_tokens < 1:
            raise ConfigError(f"context and pack_tokens must be at least 1, received {context} and {pack_tokens}")
        manifest = read_manifest(folder)
        self.manifest = manifest
        self.domains = tuple(sorted({token_set.domain for token_set in manifest.sets}))
        self.num_tokens = sum(s.num_tokens for s in manifest.sets if s.split == split and s.kind is Kind.PLAIN)
        """Tokens of the split, each document counted once."""
        self._pack_tokens = pack_tokens
        shares = set_shares(manifest, mixture, split, long_share)
        self._streams = [
            _open(folder, manifest, token_set, self.domains, share, context, seed) for token_set, share in shares
        ]
        # The shards of all streams in one list, so that a span names its shard by one number.
        self._shards: list[ShardView] = [shard for stream in self._streams for shard in stream.shards]
        self._first_shard = np.cumsum([0, *(len(stream.shards) for stream in self._streams)])[:-1]
        self._tags = np.array([stream.tag for stream in self._streams], np.int32)
        self._made_for = ReaderState(
            corpus=manifest.fingerprint,
            context=context,
            seed=seed,
            split=split,
            shares={stream.name: stream.share for stream in self._streams},
            pieces={},
            tokens={},
            cut=None,
            num_packs=0,
        )
        self.num_packs = 0
        """Given or skipped so far, those before `state` included."""
        self._cut: Cut | None = None
        self._rest = self._plan = Merged(_NONE, Spans(_NONE, _NONE, _NONE, _NONE))
        if state is not None:
            self._seek(state)

    def next_pack(self) -> Pack:
        """The next `pack_tokens` tokens."""
        return self._read(self._advance())

    def skip_packs(self, count: int) -> None:
        """Pass over packs without reading their tokens: those that other processes train on."""
        for _ in range(count):
            self._advance()

    def state(self) -> ReaderState:
        """Where the reader stands: after the last pack given."""
        return self._made_for.model_copy(
            update={
                "pieces": {stream.name: stream.num_pieces for stream in self._streams},
                "tokens": {stream.name: stream.num_tokens for stream in self._streams},
                "cut": self._cut,
                "num_packs": self.num_packs,
            }
        )

    def _seek(self, state: ReaderState) -> None:
        for name in ("corpus", "context", "seed", "split", "shares"):
            received, expected = getattr(state, name), getattr(self._made_for, name)
            if received != expected:
                raise ConfigError(
                    f"the reader's state was made for {name} {received!r}, this reader has {expected!r}; "
                    "resume with what it was made for, or start without a state"
                )
        for stream in self._streams:
            stream.seek(state.pieces[stream.name], state.tokens[stream.name])
        self._cut, self.num_packs = state.cut, state.num_packs
        if state.cut is not None:
            index = [stream.name for stream in self._streams].index(state.cut.stream)
            whole = Merged(np.array([index]), self._streams[index].piece(state.cut.piece))
            self._rest = whole.cut(state.cut.offset)[1]

    def _advance(self) -> Merged:
        """Take one pack's spans: the rest of a cut piece, then whole pieces, the last one cut to fit."""
        taken = self._rest
        missing = self._pack_tokens - taken.num_tokens
        if missing > 0:
            taken = taken + self._take(missing)
        given, self._rest = taken.cut(self._pack_tokens)
        if not len(self._rest.stream):
            self._cut = None
        elif missing > 0:
            owner = self._streams[int(self._rest.stream[0])]
            self._cut = Cut(stream=owner.name, piece=owner.num_pieces - 1, offset=int(given.spans.length[-1]))
        elif self._cut is not None:
            self._cut = self._cut.model_copy(update={"offset": self._cut.offset + self._pack_tokens})
        self.num_packs += 1
        return given

    def _take(self, num_tokens: int) -> Merged:
        """The next whole pieces, the last of which brings them to `num_tokens` or more."""
        if self._plan.num_tokens < num_tokens:
            self._plan = merge(self._streams, num_tokens + (_PACKS_AHEAD - 1) * self._pack_tokens)
        count = int(np.searchsorted(np.cumsum(self._plan.spans.length), num_tokens, side="left")) + 1
        taken, self._plan = self._plan[:count], self._plan[count:]
        counts = np.bincount(taken.stream, minlength=len(self._streams)).tolist()
        tokens = np.bincount(taken.stream, weights=taken.spans.length, minlength=len(self._streams)).tolist()
        for stream, num_pieces, num_taken in zip(self._streams, counts, tokens, strict=True):
            stream.take(num_pieces, int(num_taken))
        return taken

    def _read(self, given: Merged) -> Pack:
        stream, spans = given.stream, given.spans
        shard = spans.shard + self._first_shard[stream]
        end = np.cumsum(spans.length)
        place = np.arange(self._pack_tokens) + np.repeat(spans.start - end + spans.length, spans.length)
        tokens = np.empty(self._pack_tokens, np.int32)
        after = np.full(len(spans), NO_TARGET, np.int32)
        for index in np.unique(shard).tolist():
            source: TokenArray = self._shards[index].tokens
            mine = shard == index
            here = np.repeat(mine, spans.length)
            tokens[here] = source[place[here]]
            cut = mine & (spans.left > 0)
            after[cut] = source[(spans.start + spans.length)[cut]]
        targets = np.empty(self._pack_tokens, np.int32)
        targets[:-1] = tokens[1:]
        targets[end - 1] = after
        return Pack(tokens=tokens, targets=targets, lengths=spans.length.astype(np.int32), tags=self._tags[stream])


def _open(
    folder: Path, manifest: Manifest, token_set: TokenSet, domains: Sequence[str], share: float, context: int, seed: int
) -> Stream:
    shards = [ShardView(folder, shard, manifest.token_bytes) for shard in token_set.shards]
    name = f"{token_set.split}/{token_set.kind.value}-{token_set.domain}"
    return Stream(name, domains.index(token_set.domain), share, shards, context, seed)
