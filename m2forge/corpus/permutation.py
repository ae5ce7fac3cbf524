"""A pseudo-random permutation of any size in constant memory: a keyed Feistel network with cycle walking.

`shuffled(positions, num_items, keys)` returns the item at each position. For one key it is a bijection of
0 … num_items − 1, so every item occurs exactly once. The network permutes the b-bit integers, 2^b being the first power
of two that holds all items; a result out of range is permuted again until it is in range, less than twice on average.

A round maps (left, right) to (right, left xor F(right, key)); `F` and the keys come from SplitMix64's finalizer.
"""

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

NUM_ROUNDS = 6


def mix(x: UInt64Array) -> UInt64Array:
    """SplitMix64's finalizer: a bijection of 64 bits in which every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffled(positions: UInt64Array, num_items: int, keys: UInt64Array) -> UInt64Array:
    """The item at each position under the permutation of its key. `keys` has one entry per position."""
    num_bits = max(2, (num_items - 1).bit_length())
    result = _permute(positions, num_bits, keys)
    outside = np.flatnonzero(result >= num_items)
    while outside.size:
        walked = _permute(result[outside], num_bits, keys[outside])
        result[outside] = walked
        outside = outside[walked >= num_items]
    return result


def _permute(x: UInt64Array, num_bits: int, keys: UInt64Array) -> UInt64Array:
    right_bits = num_bits // 2
    left_bits = num_bits - right_bits
    left, right = x >> np.uint64(right_bits), x & np.uint64((1 << right_bits) - 1)
    # The halves swap, and so do their sizes, in every round; the number of rounds is even, so the layout is restored.
    for round_index in range(NUM_ROUNDS):
        scrambled = mix(right + keys + np.uint64(round_index * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF))
        left, right = right, (left ^ scrambled) & np.uint64((1 << left_bits) - 1)
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right
