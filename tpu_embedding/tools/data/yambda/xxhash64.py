"""The 64-bit xxHash of short keys, for whole arrays.

MLPerf's `dlrm_v4` turns pairs and triples of ids into rows by this hash. The library
`xxhash` takes one call per key. NumPy hashes all keys of a batch at once, faster than
these calls, so the data need no further package.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

# Constants of the algorithm: xxHash's doc/xxhash_spec.md, section "XXH64".
_PRIME_1: Final = np.uint64(0x9E3779B185EBCA87)
_PRIME_2: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME_3: Final = np.uint64(0x165667B19E3779F9)
_PRIME_4: Final = np.uint64(0x85EBCA77C2B2AE63)
_PRIME_5: Final = np.uint64(0x27D4EB2F165667C5)


def xxh64(keys: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the xxHash of each tuple of keys, uint64 in the shape of the keys.

    The hashed bytes are those of the keys, one after the other, as little-endian int64.
    The seed is 0.

    Args:
      keys: one to three integer arrays of one shape, because xxHash works in stripes
        from 32 bytes on. Element `i` of each makes tuple `i`.

    Example:
      >>> [hex(h) for h in xxh64([np.array([1, 2]), np.array([3, 3])])]
      ['0x9c2b5aef47d495cc', '0x1a69d6aaa3f20b98']
    """
    # Arithmetic is modulo 2**64, as that of unsigned arrays is in NumPy.
    start = int(_PRIME_5) + 8 * len(keys)
    state = np.full(np.shape(keys[0]), start, np.uint64)
    for key in keys:
        lane = np.asarray(key).astype(np.int64).view(np.uint64)
        lane = _rotate_left(lane * _PRIME_2, 31) * _PRIME_1
        state = _rotate_left(state ^ lane, 27) * _PRIME_1 + _PRIME_4
    state = (state ^ state >> np.uint64(33)) * _PRIME_2
    state = (state ^ state >> np.uint64(29)) * _PRIME_3
    return state ^ state >> np.uint64(32)


def _rotate_left(values: np.ndarray, num_bits: int) -> np.ndarray:
    return values << np.uint64(num_bits) | values >> np.uint64(64 - num_bits)
