"""Find duplicates: exact ones by a 128-bit hash, near-duplicates by MinHash.

In: the scanned tables. Out: for every document whether it is unique, an exact or a near-duplicate; the first of each
set of duplicates survives. Near-duplicates are found band by band: documents are sorted by the band's key, those
with equal keys are compared by their full signatures, and pairs with at least the threshold's similarity are merged.

Memory per document: sorting takes 8 bytes for keys, 8 for the order, 8 for the sorted keys and 4 of scratch, the
union-find 8, the result 1; signatures stay on disk.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from m2forge.corpus.config import DedupConfig
from m2forge.corpus.token_set import Int64Array
from m2forge.corpus.write.document_table import Tables
from m2forge.observe.progress import progress

_CHUNK = 1 << 13


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
            earlier, later = _equal_pairs(tables.column("hash", np.uint64))
            same = _rows_equal(tables, earlier, later)
            forest.join(earlier[same], later[same])
            _mark(forest, repeat, Repeat.EXACT)
            bar.advance()
        for band in range(num_bands):
            earlier, later = _equal_pairs(tables.column(f"band-{band:03d}", np.uint64))
            _merge_near_duplicates(tables, forest, earlier, later, config)
            bar.advance()
    _mark(forest, repeat, Repeat.NEAR)
    return repeat


def _equal_pairs(keys: npt.NDArray[np.generic]) -> tuple[Int64Array, Int64Array]:
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
