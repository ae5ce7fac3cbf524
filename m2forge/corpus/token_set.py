"""A token set on disk: document tokens in the shards of a corpus folder, written once, memory-mapped for reading.

Documents are written as they arrive: memory does not grow with the number of documents, in writing or reading. The
output depends only on the documents and their order. A reader takes a document in pieces, spans of at most `context`
tokens that are computed on demand.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m2forge.corpus.manifest import Kind, Manifest, Shard, Split, TokenSet, write_manifest
from m2forge.errors import ConfigError, DataError
from m2forge.records import IntArray

DEFAULT_SHARD_TOKENS = 1 << 28
"""A shard is closed once it holds this many tokens; a document never spans two shards."""

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
OffsetArray = npt.NDArray[np.uint64]
SetKey = tuple[Split, Kind, str]


class ShardWriter:
    """One shard being written: `add` documents, then `close`."""

    def __init__(self, folder: Path, name: str, token_bytes: int) -> None:
        self.name = name
        self.num_documents = 0
        self.num_tokens = 0
        self._dtype = np.dtype(f"<u{token_bytes}")
        stem = folder / name
        stem.parent.mkdir(parents=True, exist_ok=True)
        self._tokens = stem.with_name(f"{stem.name}.bin").open("wb", buffering=1 << 20)
        self._offsets = stem.with_name(f"{stem.name}.idx").open("wb", buffering=1 << 16)
        self._offsets.write(bytes(8))
        self._digests = (hashlib.sha256(), hashlib.sha256(bytes(8)))

    def add(self, tokens: npt.NDArray[np.integer], lengths: npt.NDArray[np.integer]) -> None:
        """Append concatenated documents."""
        ends = np.cumsum(lengths, dtype=np.uint64) + np.uint64(self.num_tokens)
        for file, digest, data in zip(
            (self._tokens, self._offsets),
            self._digests,
            (tokens.astype(self._dtype, copy=False).tobytes(), ends.astype("<u8", copy=False).tobytes()),
            strict=True,
        ):
            file.write(data)
            digest.update(data)
        self.num_documents += len(lengths)
        self.num_tokens += len(tokens)

    def close(self) -> Shard:
        self._tokens.close()
        self._offsets.close()
        whole = hashlib.sha256(b"".join(digest.digest() for digest in self._digests)).hexdigest()
        return Shard(name=self.name, num_documents=self.num_documents, num_tokens=self.num_tokens, sha256=whole)


class CorpusWriter:
    """Fills a folder with shards, one token set per split, kind and domain, and writes the manifest last.

    `with CorpusWriter(folder, vocab_size=…) as writer:` then `add` and finally `finish`. The folder is usually a
    staged one, since without `finish` it has no manifest and no reader opens it.
    """

    def __init__(self, folder: Path, *, vocab_size: int, shard_tokens: int = DEFAULT_SHARD_TOKENS) -> None:
        self.token_bytes: int = 2 if vocab_size <= 1 << 16 else 4
        self._folder = folder
        self._vocab_size = vocab_size
        self._shard_tokens = shard_tokens
        self._open: dict[SetKey, ShardWriter] = {}
        self._closed: dict[SetKey, list[Shard]] = {}

    def __enter__(self) -> "CorpusWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for key in list(self._open):
            self._close(key)

    def add(
        self, domain: str, tokens: Sequence[int] | npt.NDArray[np.integer], *, split: Split, kind: Kind = Kind.PLAIN
    ) -> None:
        """Append one document of at least one token."""
        array = np.asarray(tokens)
        self.add_many(domain, array, np.array([len(array)]), split=split, kind=kind)

    def add_many(
        self,
        domain: str,
        tokens: npt.NDArray[np.integer],
        lengths: npt.NDArray[np.integer],
        *,
        split: Split,
        kind: Kind = Kind.PLAIN,
    ) -> None:
        """Append concatenated documents."""
        if not len(lengths):
            return
        if int(np.min(lengths)) < 1 or int(np.sum(lengths)) != len(tokens):
            raise DataError(f"{domain}: lengths of documents must be at least 1 and sum to {len(tokens)} tokens")
        if int(np.min(tokens)) < 0 or int(np.max(tokens)) >= self._vocab_size:
            raise DataError(f"{domain}: token ids must lie in 0 … {self._vocab_size - 1}, found {int(np.max(tokens))}")
        key = (split, kind, domain)
        if key not in self._open:
            name = f"{split}/{kind.value}-{domain}-{len(self._closed.get(key, ())):05d}"
            self._open[key] = ShardWriter(self._folder, name, self.token_bytes)
        self._open[key].add(tokens, lengths)
        if self._open[key].num_tokens >= self._shard_tokens:
            self._close(key)

    def num_tokens(self, split: Split, kind: Kind = Kind.PLAIN) -> dict[str, int]:
        """Tokens written so far, by domain."""
        counts: dict[str, int] = {}
        for key in sorted({*self._open, *self._closed}):
            if key[:2] == (split, kind):
                open_tokens = self._open[key].num_tokens if key in self._open else 0
                counts[key[2]] = open_tokens + sum(shard.num_tokens for shard in self._closed.get(key, ()))
        return counts

    def finish(
        self, mixture: Mapping[str, float] | None = None, *, tokenizer: str = "", end_of_text_id: int | None = None
    ) -> Manifest:
        """Close all shards and write the manifest. Without a mixture, shares are proportional to tokens."""
        for key in list(self._open):
            self._close(key)
        shares = dict(mixture) if mixture is not None else {k: float(v) for k, v in self.num_tokens("train").items()}
        total = sum(shares.values())
        if total <= 0:
            raise ConfigError("the corpus has no training document; give it more, or lower thresholds and shares")
        sets = [
            TokenSet(domain=key[2], split=key[0], kind=key[1], shards=tuple(self._closed[key]))
            for key in sorted(self._closed)
        ]
        content = json.dumps([token_set.model_dump(mode="json") for token_set in sets], sort_keys=True)
        manifest = Manifest(
            fingerprint=hashlib.sha256(content.encode()).hexdigest(),
            tokenizer=tokenizer,
            vocab_size=self._vocab_size,
            token_bytes=2 if self.token_bytes == 2 else 4,
            end_of_text_id=end_of_text_id,
            mixture={name: share / total for name, share in sorted(shares.items())},
            sets=tuple(sets),
        )
        write_manifest(self._folder, manifest)
        return manifest

    def _close(self, key: SetKey) -> None:
        self._closed.setdefault(key, []).append(self._open.pop(key).close())


class ShardView:
    """One memory-mapped shard."""

    def __init__(self, folder: Path, shard: Shard, token_bytes: int) -> None:
        self.num_documents = shard.num_documents
        self.tokens: TokenArray = _mapped(folder / f"{shard.name}.bin", f"<u{token_bytes}")
        self.offsets: OffsetArray = _mapped(folder / f"{shard.name}.idx", "<u8")

    def document(self, index: int) -> IntArray:
        """The tokens of one document."""
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        return self.tokens[start:end].astype(np.int32)


def _mapped(path: Path, dtype: str) -> npt.NDArray[np.unsignedinteger]:
    # As a plain array: slicing a memmap object is several times slower.
    return np.asarray(np.memmap(path, dtype=np.dtype(dtype), mode="r"))


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
