"""A pseudo-random order of any number of things that takes no memory: a keyed Feistel network with cycle walking.

`shuffled(positions, num_items, keys)` gives, for each position, the item that stands there. For one key it is a
bijection of 0 … num_items − 1, so every item comes exactly once. The network permutes the numbers of b bits, 2^b the
first power of two to hold all items; a result outside is sent through again until it falls inside, less than twice on
average.

A round takes (left, right) to (right, left xor F(right, key)); `F` and the keys come from SplitMix64's finaliser.
"""

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

NUM_ROUNDS = 6


def mix(x: UInt64Array) -> UInt64Array:
    """SplitMix64's finaliser: a bijection of 64 bits in which every input bit reaches every output bit."""
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
    # The halves trade places, and so sizes, in every round; their number is even, so the result has the first layout.
    for round_index in range(NUM_ROUNDS):
        scrambled = mix(right + keys + np.uint64(round_index * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF))
        left, right = right, (left ^ scrambled) & np.uint64((1 << left_bits) - 1)
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right
