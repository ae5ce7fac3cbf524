"""Find duplicates: exact ones by a 128-bit hash, near-duplicates by MinHash.

In: the scanned tables. Out: for every document whether it is unique, an exact or a near-duplicate; the first of each
set of duplicates survives. Near-duplicates are found band by band: documents are sorted by the band's key, those
with equal keys are compared by their full signatures, and pairs with at least the threshold's similarity are merged.

Memory per document: sorting takes 8 bytes for keys, 8 for the order, 8 for the sorted keys and 4 of scratch, the
union-find 8, the result 1; signatures stay on disk.

A MinHash signature is a short fingerprint of a document; the share of equal entries of two signatures estimates their
Jaccard similarity. A document is the set of its shingles, runs of `num_words` words; a shorter document is one shingle.
Entry i of its signature is the minimum of h_i over the set, h_i(x) = (x xor s_i)·a_i mod 2^32 with a_i odd. An entry of
two signatures is equal with probability J, the Jaccard similarity of the two sets. With `num_bands` bands of r entries,
two documents have some band with all entries equal, and so become candidates, with probability 1 − (1 − J^r)^bands.
"""

import hashlib
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from m2forge.corpus.config import DedupConfig
from m2forge.corpus.judge.words import Shingles
from m2forge.corpus.permutation import UInt64Array, mix
from m2forge.corpus.token_set import Int64Array
from m2forge.corpus.write.document_table import Tables
from m2forge.observe.progress import progress

SignatureArray = npt.NDArray[np.uint32]

NOTHING = np.uint32(0xFFFFFFFF)
"""Every signature entry of a document without words."""
MEETING_CHANCE = 0.95
_BLOCK = 1 << 13
_CHUNK = 1 << 13


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


class Repeat(IntEnum):
    NONE = 0
    EXACT = 1
    NEAR = 2


class Forest:
    """Union-find over integers; the smallest member of a set is its root."""

    def __init__(self, size: int) -> None:
        self._parent = np.arange(size)

    def roots(self, members: Int64Array) -> Int64Array:
        root = self._parent[members]
        while True:
            above = self._parent[root]
            if np.array_equal(above, root):
                break
            root = above
        self._parent[members] = root
        return root

    def join(self, left: Int64Array, right: Int64Array) -> None:
        """Merge the sets of left[n] and right[n], for all n."""
        while len(left):
            left, right = self.roots(left), self.roots(right)
            low, high = np.minimum(left, right), np.maximum(left, right)
            apart = low != high
            left, right = low[apart], high[apart]
            # A root with several lower partners takes the smallest; the others follow in the next round.
            np.minimum.at(self._parent, right, left)


def find_duplicates(tables: Tables, config: DedupConfig, num_bands: int) -> npt.NDArray[np.uint8]:
    """A `Repeat` for every document."""
    count = len(tables)
    repeat = np.full(count, Repeat.NONE, np.uint8)
    if not count:
        return repeat
    forest = Forest(count)
    with progress(int(config.exact) + num_bands, "deduplicate") as bar:
        if config.exact:
            earlier, later = equal_pairs(tables.column("hash", np.uint64))
            same = _rows_equal(tables, earlier, later)
            forest.join(earlier[same], later[same])
            _mark(forest, repeat, Repeat.EXACT)
            bar.advance()
        for band in range(num_bands):
            earlier, later = equal_pairs(tables.column(f"band-{band:03d}", np.uint64))
            _merge_near_duplicates(tables, forest, earlier, later, config)
            bar.advance()
    _mark(forest, repeat, Repeat.NEAR)
    return repeat


def equal_pairs(keys: npt.NDArray[np.generic]) -> tuple[Int64Array, Int64Array]:
    """Pairs of documents with equal keys: each one with the first of its key and with the one before it."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    again = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1
    del ordered
    # Consecutive entries of `again` share a key; the first member of a run is just before its first entry.
    opens = np.ones(len(again), bool)
    opens[1:] = np.diff(again) > 1
    run_first = (again[opens] - 1)[np.cumsum(opens) - 1] if len(again) else again
    later = order[again]
    with_first, with_previous = order[run_first], order[again - 1]
    more = with_previous != with_first
    return np.concatenate([with_first, with_previous[more]]), np.concatenate([later, later[more]])


def _rows_equal(tables: Tables, left: Int64Array, right: Int64Array) -> npt.NDArray[np.bool_]:
    """Whether the other halves of the 128-bit hashes are equal too."""
    equal = np.empty(len(left), bool)
    for begin in range(0, len(left), _CHUNK):
        chunk = slice(begin, begin + _CHUNK)
        a, b = (tables.rows("hash_rest", rows[chunk], np.uint64, 1) for rows in (left, right))
        equal[chunk] = (a == b)[:, 0]
    return equal


def _merge_near_duplicates(
    tables: Tables, forest: Forest, left: Int64Array, right: Int64Array, config: DedupConfig
) -> None:
    for begin in range(0, len(left), _CHUNK):
        a, b = left[begin : begin + _CHUNK], right[begin : begin + _CHUNK]
        apart = forest.roots(a) != forest.roots(b)
        a, b = a[apart], b[apart]
        signature_a, signature_b = (tables.rows("signature", rows, np.uint32, config.num_perm) for rows in (a, b))
        alike = (signature_a == signature_b).mean(axis=1) >= config.threshold
        forest.join(a[alike], b[alike])


def _mark(forest: Forest, repeat: npt.NDArray[np.uint8], kind: Repeat) -> None:
    for begin in range(0, len(repeat), _CHUNK):
        members = np.arange(begin, min(begin + _CHUNK, len(repeat)))
        joined = forest.roots(members) != members
        part = repeat[begin : begin + _CHUNK]
        part[joined & (part == Repeat.NONE)] = kind
