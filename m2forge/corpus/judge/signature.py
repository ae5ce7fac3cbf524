"""MinHash signatures: short document fingerprints; the share of equal entries estimates Jaccard similarity.

A document is the set of its shingles, runs of `num_words` words; a shorter document is one shingle. Entry i of its
signature is the minimum of h_i over the set, h_i(x) = (x xor s_i)·a_i mod 2^32 with a_i odd. An entry of two signatures
is equal with probability J, the Jaccard similarity of the two sets. With `num_bands` bands of r entries, two documents
have some band with all entries equal, and so become candidates, with probability 1 − (1 − J^r)^bands.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from m2forge.corpus.judge.words import TextBatch
from m2forge.corpus.permutation import UInt64Array, mix
from m2forge.corpus.token_set import Int64Array

SignatureArray = npt.NDArray[np.uint32]

NOTHING = np.uint32(0xFFFFFFFF)
"""Every signature entry of a document without words."""
MEETING_CHANCE = 0.95
_BLOCK = 1 << 13
_COMBINE = 0xD6E8FEB86659FD93


@dataclass(frozen=True, slots=True)
class Shingles:
    """Hashes of runs of words, and the document of each, in document order."""

    hash: UInt64Array
    document: Int64Array


def shingles(batch: TextBatch, num_words: int) -> Shingles:
    count = len(batch.word_hash)
    total = batch.word_hash.copy()
    whole = np.ones(count, bool)
    for step in range(1, num_words):
        factor = np.uint64(pow(_COMBINE, step, 1 << 64))
        same = np.zeros(count, bool)
        same[: max(0, count - step)] = batch.word_document[step:] == batch.word_document[: max(0, count - step)]
        terms = batch.word_hash[step:] * factor
        total[: len(terms)] += np.where(same[: len(terms)], terms, np.uint64(0))
        whole = same
    first = np.ones(count, bool)
    first[1:] = batch.word_document[1:] != batch.word_document[:-1]
    chosen = np.flatnonzero(whole | first)
    return Shingles(mix(total[chosen]), batch.word_document[chosen])


class MinHash:
    """Computes signatures of `num_perm` entries."""

    def __init__(self, num_perm: int) -> None:
        self.num_perm = num_perm
        stream = hashlib.shake_256(b"m2forge minhash").digest(8 * num_perm)
        numbers = np.frombuffer(stream, "<u4").reshape(2, num_perm).astype(np.uint32)
        self._flip = numbers[0]
        self._factor = numbers[1] | np.uint32(1)

    def sign(self, found: Shingles, num_documents: int) -> SignatureArray:
        """Signatures, one row per document."""
        signature = np.full((num_documents, self.num_perm), NOTHING)
        values = (found.hash >> np.uint64(32)).astype(np.uint32)
        # Blocks stay in the CPU cache while all permutations run over them; a document may span several.
        for begin in range(0, len(values), _BLOCK):
            block, owner = values[begin : begin + _BLOCK], found.document[begin : begin + _BLOCK]
            starts = np.flatnonzero(np.concatenate([[True], owner[1:] != owner[:-1]]))
            rows = owner[starts]
            least = np.empty((self.num_perm, len(starts)), np.uint32)
            hashed = np.empty_like(block)
            for row in range(self.num_perm):
                np.bitwise_xor(block, self._flip[row], out=hashed)
                np.multiply(hashed, self._factor[row], out=hashed)
                np.minimum.reduceat(hashed, starts, out=least[row])
            signature[rows] = np.minimum(signature[rows], least.T)
        return signature


def band_keys(signature: SignatureArray, num_bands: int) -> UInt64Array:
    """A 64-bit key per document and band; equal keys mean equal bands, up to hash collisions."""
    num_rows = signature.shape[1] // num_bands
    bands = signature[:, : num_bands * num_rows].reshape(len(signature), num_bands, num_rows)
    key = np.zeros(bands.shape[:2], np.uint64)
    for row in range(num_rows):
        key = mix(key + bands[:, :, row].astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return key


def bands_for(threshold: float, num_perm: int) -> int:
    """The fewest bands for which two documents exactly as similar as the threshold become candidates 19 times of 20.

    Candidates are compared by their full signatures, so a false candidate costs little but a missed pair stays.
    """
    for num_rows in range(num_perm, 1, -1):
        num_bands = num_perm // num_rows
        if 1 - (1 - threshold**num_rows) ** num_bands >= MEETING_CHANCE:
            return num_bands
    return num_perm
