"""Encoded trajectories on disk, memory-mapped: `StoreWriter` fills a folder, `Store` opens it.

    tokens.bin      uint32 per token, documents concatenated; the highest bit is the loss mask
    offsets.npy     int64, start of each document, and the end of the last
    variants.npy    int32 [trajectory, draw]: the document used for the trajectory in the epochs of that draw
    sources.npy     int32 per trajectory: index of its source
    hashes.npy      uint64 per trajectory: hash of its conversation; only in a store of held-out trajectories
    meta.json       key of the input, fingerprint of the result, report

Trajectories whose prompt has parts to drop have several variants; the others have one document for all draws.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from m2forge.errors import DataError
from m2forge.files import write_atomic
from m2forge.records import IntArray
from m2forge.sft.encode import BoolArray, Encoded
from m2forge.sft.report import Report

META = "meta.json"
TOKENS = "tokens.bin"
TRAINED_BIT = 1 << 31


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
        """`documents`: index of a document for each draw. `conversation`: hash to store, for all trajectories or none
        of them."""
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
