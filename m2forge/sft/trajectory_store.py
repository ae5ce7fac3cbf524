"""Encoded trajectories on disk, memory-mapped: `StoreWriter` fills a folder, `Store` opens it, `SFTReader` packs it.

    tokens.bin      uint32 per token, documents concatenated; the highest bit is the loss mask
    offsets.npy     int64, start of each document, and the end of the last
    variants.npy    int32 [trajectory, draw]: the document used for the trajectory in the epochs of that draw
    sources.npy     int32 per trajectory: index of its source
    hashes.npy      uint64 per trajectory: hash of its conversation; only in a store of held-out trajectories
    meta.json       key of the input, fingerprint of the result, report

Trajectories whose prompt has parts to drop have several variants; the others have one document for all draws.

`SFTReader` makes an endless sequence of `Pack`s of a `Store`: whole trajectories, reshuffled each epoch. A pack holds
whole documents of one epoch and at most `pack_tokens` tokens, without padding: the oldest queued document, then, first
fit, any other queued one that still fits. No document is carried over to the next epoch, so an epoch shows every
trajectory as often as its source's weight says. The packs are a function of store, seed and `pack_tokens` alone;
`state()` is a position in that sequence, and a reader created with it resumes exactly there. `read_once` reads a store
of held-out trajectories in one pass.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from m2forge.config import Config
from m2forge.errors import ConfigError, DataError
from m2forge.files import write_atomic
from m2forge.records import NO_TARGET, IntArray, JsonValue, Pack
from m2forge.sft.encode import BoolArray, Encoded
from m2forge.sft.report import Report

META = "meta.json"
TOKENS = "tokens.bin"
TRAINED_BIT = 1 << 31
NUM_WAITING = 64
"""Size of the queue from which packs are filled."""


class StoreWriter:
    """Appends documents to a staged folder that is not open for reading."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = (folder / TOKENS).open("xb")
        self._hash = hashlib.blake2b(digest_size=16)
        self._offsets = [0]
        self._variants: list[Sequence[int]] = []
        self._sources: list[int] = []
        self._hashes: list[int] = []

    def add_document(self, encoded: Encoded) -> int:
        """Append a document; returns its index, for `add_trajectory`."""
        words = encoded.ids.astype("<u4") | np.where(encoded.trained, np.uint32(TRAINED_BIT), np.uint32(0))
        data = words.astype("<u4").tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._offsets.append(self._offsets[-1] + len(words))
        return len(self._offsets) - 2

    def add_trajectory(self, source: int, documents: Sequence[int], conversation: int | None = None) -> None:
        """`documents`: index of a document for each draw. `conversation`: hash to store; either all trajectories have
        one or none has."""
        self._variants.append(documents)
        self._sources.append(source)
        if conversation is not None:
            self._hashes.append(conversation)

    @property
    def num_trajectories(self) -> int:
        return len(self._sources)

    def finish(self, key: str, context: int, weights: Sequence[float], report: Report) -> None:
        self._file.close()
        arrays: dict[str, npt.NDArray[np.int32] | npt.NDArray[np.int64] | npt.NDArray[np.uint64]] = {
            "offsets": np.asarray(self._offsets, np.int64),
            "variants": np.asarray(self._variants, np.int32),
            "sources": np.asarray(self._sources, np.int32),
        }
        if self._hashes:
            arrays["hashes"] = np.asarray(self._hashes, np.uint64)
        for name, array in arrays.items():
            np.save(self._folder / f"{name}.npy", array)
            self._hash.update(array.tobytes())
        meta = {
            "key": key,
            "fingerprint": self._hash.hexdigest(),
            "context": context,
            "weights": list(weights),
            "report": report.to_json(),
        }
        write_atomic(self._folder / META, json.dumps(meta, indent=1, ensure_ascii=False))

    def close(self) -> None:
        self._file.close()


class Store:
    """Encoded trajectories; the tokens stay on disk, only the tables are in memory."""

    def __init__(self, folder: Path) -> None:
        try:
            meta = json.loads((folder / META).read_bytes())
            self.offsets: npt.NDArray[np.int64] = np.load(folder / "offsets.npy")
            self.variants: npt.NDArray[np.int32] = np.load(folder / "variants.npy")
            self.sources: npt.NDArray[np.int32] = np.load(folder / "sources.npy")
            hashes = folder / "hashes.npy"
            self.hashes: npt.NDArray[np.uint64] | None = np.load(hashes) if hashes.is_file() else None
            self._words = np.memmap(folder / TOKENS, dtype="<u4", mode="r")
            self.key = str(meta["key"])
            self.fingerprint = str(meta["fingerprint"])
            self.context = int(meta["context"])
            self.weights = tuple(float(weight) for weight in meta["weights"])
            self.report = Report.from_json(meta["report"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{folder}: not a folder of encoded trajectories ({error}); remove it") from error
        if self._words.size != self.offsets[-1]:
            raise DataError(
                f"{folder}: {TOKENS} holds {self._words.size} tokens, expected {self.offsets[-1]}; remove the folder"
            )

    @property
    def num_trajectories(self) -> int:
        return len(self.sources)

    @property
    def num_draws(self) -> int:
        return int(self.variants.shape[1])

    def lengths(self, draw: int) -> npt.NDArray[np.int64]:
        """Length in tokens of each trajectory's document in one draw."""
        documents = self.variants[:, draw]
        return self.offsets[documents + 1] - self.offsets[documents]

    def read(self, documents: Sequence[int]) -> tuple[IntArray, BoolArray]:
        """Ids and loss mask of the documents, concatenated."""
        words = np.concatenate([self._words[self.offsets[n] : self.offsets[n + 1]] for n in documents])
        return (words & (TRAINED_BIT - 1)).astype(np.int32), (words >> 31).astype(np.bool_)

    @classmethod
    def open_if_current(cls, folder: Path, key: str) -> Self | None:
        """The store, if the folder holds one with this `key`."""
        if not (folder / META).is_file():
            return None
        store = cls(folder)
        return store if store.key == key else None


class SFTReaderState(Config):
    """A position in the sequence of packs, and the settings it is valid for."""

    fingerprint: str
    """Fingerprint of the store."""
    seed: int
    pack_tokens: int
    epoch: int
    num_taken: int
    """Documents of the epoch's order that are packed or queued."""
    waiting: tuple[int, ...]
    """Indices in the epoch's order of the queued documents."""

    def to_json(self) -> dict[str, JsonValue]:
        return dict(self.model_dump(mode="json"))

    @classmethod
    def from_json(cls, data: Mapping[str, JsonValue]) -> "SFTReaderState":
        try:
            return cls.model_validate_json(json.dumps(data))
        except ValidationError as error:
            raise DataError(f"not the state of a reader of trajectories: {error}") from error


class SFTReader:
    def __init__(
        self,
        store: Store,
        *,
        pack_tokens: int,
        seed: int,
        state: SFTReaderState | None = None,
    ) -> None:
        if pack_tokens < store.context:
            raise ConfigError(f"pack_tokens is {pack_tokens}; a pack must hold the context, {store.context} tokens")
        self._store = store
        self._pack_tokens = pack_tokens
        self._seed = seed
        if state is None:
            self._epoch = _Epoch(store, seed, 0)
            return
        expected = {"fingerprint": store.fingerprint, "seed": seed, "pack_tokens": pack_tokens}
        for name, value in expected.items():
            if getattr(state, name) != value:
                raise DataError(
                    f"the reader's state was saved with {name} {getattr(state, name)!r}, and here it is {value!r}; "
                    "resume with the same data and settings or start another run"
                )
        self._epoch = _Epoch(store, seed, state.epoch, state.num_taken, state.waiting)

    @property
    def epoch(self) -> int:
        """Epoch of the pack that `next_pack` returns next."""
        self._leave_finished_epochs()
        return self._epoch.number

    def next_pack(self) -> Pack:
        self._leave_finished_epochs()
        trajectories = self._epoch.take(self._pack_tokens)
        return _make_pack(self._store, trajectories, self._epoch.number % self._store.num_draws)

    def num_packs(self, epoch: int) -> int:
        """Number of packs in an epoch."""
        counted = _Epoch(self._store, self._seed, epoch)
        num_packs = 0
        while not counted.is_done:
            counted.take(self._pack_tokens)
            num_packs += 1
        return num_packs

    def state(self) -> SFTReaderState:
        return SFTReaderState(
            fingerprint=self._store.fingerprint,
            seed=self._seed,
            pack_tokens=self._pack_tokens,
            epoch=self._epoch.number,
            num_taken=self._epoch.num_taken,
            waiting=tuple(self._epoch.waiting),
        )

    def _leave_finished_epochs(self) -> None:
        while self._epoch.is_done:
            self._epoch = _Epoch(self._store, self._seed, self._epoch.number + 1)


class _Epoch:
    """The order of one epoch and the packing progress."""

    def __init__(self, store: Store, seed: int, number: int, num_taken: int = 0, waiting: Sequence[int] = ()) -> None:
        self.number = number
        self.num_taken = num_taken
        self.waiting = list(waiting)
        self._order = _shuffle(store, seed, number)
        self._lengths = store.lengths(number % store.num_draws)[self._order]
        self._fill()

    @property
    def is_done(self) -> bool:
        return not self.waiting

    def take(self, num_tokens: int) -> IntArray:
        """The trajectories of one pack of at most `num_tokens` tokens."""
        chosen = []
        index = 0
        while index < len(self.waiting):
            length = int(self._lengths[self.waiting[index]])
            if length <= num_tokens:
                num_tokens -= length
                chosen.append(self.waiting.pop(index))
                self._fill()
            else:
                index += 1
        return self._order[chosen]

    def _fill(self) -> None:
        num_missing = min(NUM_WAITING - len(self.waiting), len(self._order) - self.num_taken)
        self.waiting += range(self.num_taken, self.num_taken + num_missing)
        self.num_taken += num_missing


def read_once(store: Store, pack_tokens: int, num_tokens: int) -> Iterator[Pack]:
    """Packs of the trajectories with the lowest conversation hashes, each once with its first prompt, at most
    `num_tokens` tokens but at least one trajectory. They do not depend on the order of the sources."""
    if store.hashes is None:
        raise DataError("the store has no conversation hashes; encode it as held-out trajectories")
    order, lengths = np.argsort(store.hashes, kind="stable"), store.lengths(0)
    num_read = max(1, int(np.searchsorted(np.cumsum(lengths[order]), num_tokens, side="right")))
    chosen: list[int] = []
    num_chosen = 0
    for trajectory in order[:num_read].tolist():
        if chosen and num_chosen + int(lengths[trajectory]) > pack_tokens:
            yield _make_pack(store, np.asarray(chosen, np.int32), 0)
            chosen, num_chosen = [], 0
        chosen.append(trajectory)
        num_chosen += int(lengths[trajectory])
    yield _make_pack(store, np.asarray(chosen, np.int32), 0)


def _make_pack(store: Store, trajectories: IntArray, draw: int) -> Pack:
    documents = store.variants[trajectories, draw]
    lengths = (store.offsets[documents + 1] - store.offsets[documents]).tolist()
    tokens, trained = store.read(documents.tolist())
    targets = np.full(len(tokens), NO_TARGET, np.int32)
    targets[:-1][trained[1:]] = tokens[1:][trained[1:]]
    targets[np.cumsum(lengths) - 1] = NO_TARGET
    return Pack(tokens, targets, np.asarray(lengths, np.int32), store.sources[trajectories])


def _shuffle(store: Store, seed: int, epoch: int) -> npt.NDArray[np.int32]:
    """Trajectories in the order of one epoch, each repeated according to its source's weight."""
    generator = np.random.default_rng([seed, epoch])
    num_full, fraction = np.divmod(np.asarray(store.weights)[store.sources], 1.0)
    num_shown = num_full.astype(np.int64) + (generator.random(store.num_trajectories) < fraction)
    return generator.permutation(np.repeat(np.arange(store.num_trajectories, dtype=np.int32), num_shown))
