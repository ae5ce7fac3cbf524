"""Topics: a short vector per document, similar for documents on the same topic, and clusters of similar documents.

A sketch (feature hashing) counts a document's words in `NUM_BUCKETS` dimensions, each word adding +1 or −1 at the
dimension given by its hash, so that inner products of sketches estimate those of the word counts. Words shorter than
`MIN_WORD_BYTES` bytes, which say little about a topic, are skipped, and counts are damped by a square root. Clusters
come from spherical k-means, on integer vectors small enough that float32 dot products are exact: results do not depend
on threads.
"""

import numpy as np
import numpy.typing as npt

from m2forge.corpus.judge.words import TextBatch
from m2forge.corpus.token_set import Int64Array
from m2forge.records import IntArray

SketchArray = npt.NDArray[np.int8]

NUM_BUCKETS = 128
MIN_WORD_BYTES = 5
_SAMPLE = 20_000
_ROUNDS = 8
_CHUNK = 1 << 10
_LENGTH = 2048.0
"""Maximum norm of a scaled vector: no inner product exceeds its square, up to which float32 represents all integers."""


def sketch_sums(batch: TextBatch) -> npt.NDArray[np.float64]:
    """Signed counts by dimension, one row per document; sums of a document's windows may be added."""
    longer = np.flatnonzero(batch.word_end - batch.word_start >= MIN_WORD_BYTES)
    value = batch.word_hash[longer] >> np.uint64(20)
    sign = (value & np.uint64(1)).astype(np.float64) * 2.0 - 1.0
    bucket = ((value >> np.uint64(1)) % np.uint64(NUM_BUCKETS)).astype(np.int64)
    cell = batch.word_document[longer] * NUM_BUCKETS + bucket
    counts = np.bincount(cell, weights=sign, minlength=batch.num_documents * NUM_BUCKETS)
    return counts.astype(np.float64).reshape(-1, NUM_BUCKETS)


def sketch(sums: npt.NDArray[np.float64]) -> SketchArray:
    """Damp the counts and scale them to one byte per dimension."""
    damped = np.sign(sums) * np.sqrt(np.abs(sums))
    largest = np.maximum(np.abs(damped).max(axis=1, keepdims=True), 1.0)
    scaled: SketchArray = np.rint(damped / largest * 127.0).astype(np.int8)
    return scaled


def group(sketches: SketchArray, num_groups: int) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """The cluster of each document and its cosine similarity to the centroid.

    Centroids are found on an even sample, initialized with evenly spaced documents of it, so the result is not random.
    """
    sample = sketches[_spread(len(sketches), _SAMPLE)]
    centre = _scaled(sample[_spread(len(sample), num_groups)])
    for _ in range(_ROUNDS):
        total = np.zeros(centre.shape)
        for begin in range(0, len(sample), _CHUNK):
            rows = _scaled(sample[begin : begin + _CHUNK])
            np.add.at(total, np.argmax(rows @ centre.T, axis=1), rows)
        centre = np.where(np.any(total != 0, axis=1, keepdims=True), _scaled(total), centre)
    member, likeness = np.empty(len(sketches), np.int32), np.empty(len(sketches), np.float32)
    for begin in range(0, len(sketches), _CHUNK):
        close = _scaled(sketches[begin : begin + _CHUNK]) @ centre.T
        member[begin : begin + _CHUNK] = np.argmax(close, axis=1)
        likeness[begin : begin + _CHUNK] = np.max(close, axis=1) / np.float32(_LENGTH**2)
    return member, likeness


def _spread(count: int, wanted: int) -> Int64Array:
    return np.unique(np.linspace(0, count - 1, min(count, wanted)).astype(np.int64))


def _scaled(rows: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    values = rows.astype(np.float64)
    norm = np.sqrt(np.sum(values * values, axis=1, keepdims=True))
    scaled: npt.NDArray[np.float32] = np.rint(values * (_LENGTH - NUM_BUCKETS) / np.maximum(norm, 1e-6)).astype(
        np.float32
    )
    return scaled
