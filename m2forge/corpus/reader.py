"""Packs for training, read from a memory-mapped corpus folder.

The output is an endless sequence of packs of at most `pack_tokens` tokens. Each token set (a domain's documents) yields
its documents in a pseudo-random order, each once per epoch; sets are interleaved so that tokens follow the mixture. A
document longer than `context` is read in pieces of `context` tokens; a piece is never cut, so a pack may be a little
shorter than `pack_tokens`. A token's target is the next token of its document, even across pieces; only the last token
of a document has none.

The sequence is a function of corpus, context, pack_tokens, seed, split and shares. A reader created with another's
`state` resumes exactly there. A reader created `after` another continues with the documents that the other left
unread, with its own context and mixture.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import ValidationError

from m2forge.config import Config
from m2forge.corpus.manifest import Kind, Split, TokenSet, read_manifest
from m2forge.corpus.mixture import set_shares
from m2forge.corpus.shard import ShardView, TokenArray
from m2forge.corpus.stream import Chosen, Stream, StreamPosition, fill
from m2forge.errors import ConfigError, DataError
from m2forge.records import NO_TARGET, JsonValue, Pack


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
                "the reader's state counts pieces in the order of an earlier version, which this version cannot go on "
                "with; start a run of another name from the checkpoint's model folder"
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
        self._made_for = ReaderState(
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
        came_from = state or after
        self._documents = dict(came_from.documents) if came_from else {}
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
        return self._read(self._fill(self._made_for.pack_tokens))

    def packs(self, num_packs: int, num_tokens: int) -> Iterator[Pack]:
        """At most `num_packs` packs with at most `num_tokens` tokens in total; ends early if no piece fits the rest."""
        for _ in range(num_packs):
            chosen = self._fill(min(num_tokens, self._made_for.pack_tokens))
            if not chosen:
                return
            num_tokens -= sum(piece.length for _, piece in chosen)
            yield self._read(chosen)

    def state(self) -> ReaderState:
        """The reader's position after the last pack returned."""
        return self._made_for.model_copy(
            update={
                "tokens": {stream.name: stream.num_tokens for stream in self._streams},
                "documents": self._documents | {stream.name: stream.position() for stream in self._streams},
            }
        )

    def _require_same(self, state: ReaderState, names: Sequence[str]) -> None:
        for name in names:
            received, expected = getattr(state, name), getattr(self._made_for, name)
            if received != expected:
                raise ConfigError(
                    f"the reader's state was made for {name} {received!r}, this reader has {expected!r}; "
                    "resume with what it was made for, or start without a state"
                )

    def _fill(self, num_tokens: int) -> list[Chosen]:
        return fill(self._streams, num_tokens, self._made_for.context)

    def _read(self, chosen: Sequence[Chosen]) -> Pack:
        stream = np.array([index for index, _ in chosen])
        shard, begin, size, offset, length = np.array(
            [(piece.shard, piece.begin, piece.size, piece.offset, piece.length) for _, piece in chosen], np.int64
        ).T
        shard, start = shard + self._first_shard[stream], begin + offset
        end = np.cumsum(length)
        place = np.arange(end[-1]) + np.repeat(start - end + length, length)
        tokens = np.empty(end[-1], np.int32)
        after = np.full(len(chosen), NO_TARGET, np.int32)
        for index in np.unique(shard).tolist():
            source: TokenArray = self._shards[index].tokens
            mine = shard == index
            here = np.repeat(mine, length)
            tokens[here] = source[place[here]]
            cut = mine & (offset + length < size)
            after[cut] = source[(start + length)[cut]]
        targets = np.empty_like(tokens)
        targets[:-1] = tokens[1:]
        targets[end - 1] = after
        return Pack(tokens=tokens, targets=targets, lengths=length.astype(np.int32), tags=self._tags[stream])


def _name(token_set: TokenSet) -> str:
    return f"{token_set.split}/{token_set.kind.value}-{token_set.domain}"
