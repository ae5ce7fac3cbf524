"""A small trained quality classifier: logistic regression over hashed words and bigrams.

A document's logit is bias + mean over its words and bigrams of weight[hash]; its score is the sigmoid of the logit.
Training minimizes the log-loss with L2 decay by full-batch AdaGrad from zero: the same examples give the same weights.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from m2forge.corpus.judge.words import TextBatch, cut, windows
from m2forge.corpus.permutation import mix
from m2forge.corpus.token_set import Int64Array
from m2forge.errors import DataError
from m2forge.files import write_atomic

NUM_BUCKETS = 1 << 17
_PAIR = np.uint64(0x9FB21C651E98DF25)
_STEPS = 150
_RATE = 2.0
_DECAY = 1e-5


class Classifier:
    def __init__(self, weight: npt.NDArray[np.float32], bias: float) -> None:
        self.weight = weight
        self.bias = bias

    def sums(self, batch: TextBatch) -> npt.NDArray[np.float64]:
        """Two columns per document, summed weights and number of terms; sums of a document's windows may be added."""
        bucket, owner = terms(batch)
        summed = batch.per_document(owner, self.weight[bucket].astype(np.float64))
        return np.stack([summed, batch.per_document(owner)], axis=1)

    def scores(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The probability that a document belongs to the positive class."""
        return _logistic(self.bias + sums[:, 0] / np.maximum(sums[:, 1], 1.0))

    def save(self, path: Path) -> None:
        write_atomic(path, np.append(self.weight, np.float32(self.bias)).astype("<f4").tobytes())


def load_classifier(path: Path) -> Classifier:
    values = np.frombuffer(path.read_bytes(), "<f4")
    return Classifier(values[:-1], float(values[-1]))


def terms(batch: TextBatch) -> tuple[Int64Array, Int64Array]:
    """Buckets of all words and bigrams, and the document of each."""
    owner, word = batch.word_document, batch.word_hash
    inside = np.flatnonzero(owner[1:] == owner[:-1])
    pair = mix(word[inside] * _PAIR + word[inside + 1])
    hashes = np.concatenate([word, pair])
    return (hashes % np.uint64(NUM_BUCKETS)).astype(np.int64), np.concatenate([owner, owner[inside]])


def train_classifier(positive: Sequence[bytes], negative: Sequence[bytes]) -> Classifier:
    """Train a classifier of `positive` against `negative`; both classes have the same total weight."""
    if not positive or not negative:
        raise DataError(
            f"a quality classifier needs examples of both classes, received {len(positive)} good and {len(negative)} "
            "bad ones; give more sources, or leave the classifier out"
        )
    # One window of an example is enough.
    texts = [windows(text)[0] for text in (*positive, *negative)]
    bucket, owner = _all_terms(texts)
    label = np.repeat([1.0, 0.0], [len(positive), len(negative)])
    importance = np.repeat([0.5 / len(positive), 0.5 / len(negative)], [len(positive), len(negative)])
    num_terms = np.maximum(np.bincount(owner, minlength=len(texts)), 1)
    used, column = np.unique(bucket, return_inverse=True)
    weight, bias = np.zeros(len(used)), 0.0
    weight_square, bias_square = np.full(len(used), 1e-12), 1e-12
    for _ in range(_STEPS):
        logit = bias + np.bincount(owner, weights=weight[column], minlength=len(texts)) / num_terms
        error = (_logistic(logit) - label) * importance
        gradient = np.bincount(column, weights=(error / num_terms)[owner], minlength=len(used)) + _DECAY * weight
        weight_square += gradient**2
        bias_square += float(error.sum()) ** 2
        weight -= _RATE * gradient / np.sqrt(weight_square)
        bias -= 0.1 * float(error.sum()) / bias_square**0.5
    weights = np.zeros(NUM_BUCKETS, np.float32)
    weights[used] = weight
    return Classifier(weights, float(np.float32(bias)))


def _all_terms(texts: Sequence[bytes]) -> tuple[Int64Array, Int64Array]:
    buckets, owners = [], []
    for index, text in enumerate(texts):
        bucket, owner = terms(cut([text]))
        buckets.append(bucket)
        owners.append(owner + index)
    return np.concatenate(buckets), np.concatenate(owners)


def _logistic(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return 1.0 / (1.0 + np.exp(-np.clip(x, -60.0, 60.0)))
