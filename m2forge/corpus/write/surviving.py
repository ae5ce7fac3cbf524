"""The surviving documents of a build, joined over the tables of two stages: scanned documents and their tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from m2forge.corpus.manifest import Split
from m2forge.corpus.token_set import Int64Array
from m2forge.corpus.write.document_table import Stretches, Table, Tables
from m2forge.corpus.write.tokenise import draw

_OPEN_PARTS = 64


@dataclass(frozen=True, slots=True)
class SurvivingPart:
    """The surviving documents of one part, one entry each."""

    index: int
    scanned: Table
    row: Int64Array
    """Row of each document in the scanned table."""
    domain: npt.NDArray[np.uint8]
    is_held_out: npt.NDArray[np.bool_]
    tokens: Stretches[np.unsignedinteger]


class Survivors:
    def __init__(
        self,
        scanned: Tables,
        tokenised: Tables,
        dtype: np.dtype[np.unsignedinteger],
        domains: tuple[str, ...],
        held_out: float,
        seed: int,
    ) -> None:
        self.domains = domains
        self._scanned = scanned
        self._tokenised = tokenised
        self._dtype = dtype
        self._held_out = held_out
        self._seed = seed
        self.part = lru_cache(_OPEN_PARTS)(self._part)

    def parts(self) -> Iterator[SurvivingPart]:
        for index in range(len(self._scanned.parts)):
            yield self._part(index)

    def splits(self, part: SurvivingPart) -> Iterator[tuple[Split, npt.NDArray[np.bool_]]]:
        yield "train", ~part.is_held_out
        yield "held_out", part.is_held_out

    def _part(self, index: int) -> SurvivingPart:
        scanned, tokenised = self._scanned.parts[index], self._tokenised.parts[index]
        row = tokenised.column("row", np.int64).astype(np.int64)
        hashes = scanned.column("hash", np.uint64)[row]
        return SurvivingPart(
            index=index,
            scanned=scanned,
            row=row,
            domain=scanned.column("domain", np.uint8)[row].astype(np.uint8),
            is_held_out=draw(hashes, self._seed, "held_out") < self._held_out,
            tokens=tokenised.stretches("tokens", self._dtype),
        )


def gather(
    stretches: Stretches[np.unsignedinteger], rows: Int64Array
) -> tuple[npt.NDArray[np.unsignedinteger], Int64Array]:
    """The chosen stretches concatenated, and their lengths."""
    start, end = stretches.offsets[rows], stretches.offsets[rows + 1]
    parts = [stretches.data[a:b] for a, b in zip(start.tolist(), end.tolist(), strict=True)]
    return np.concatenate(parts) if parts else stretches.data[:0], end - start
