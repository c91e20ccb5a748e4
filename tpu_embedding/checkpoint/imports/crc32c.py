"""Computes CRC-32C checksums of large arrays with NumPy.

A checksum is a chain of table look-ups, one per two bytes. NumPy runs 2^16 chains side
by side, each over its own part of the bytes. The checksums of the parts are then merged
pairwise: appending bytes to a message multiplies its checksum by a matrix over GF(2).
"""

import functools
from typing import Any, Final

import numpy as np

_POLYNOMIAL: Final = 0x82F63B78
"""Of Castagnoli, lowest bit first."""

_BLOCK_BYTES: Final = 2**24
"""Bytes that are copied, and checked together."""

_MAX_PARTS: Final = 2**16
_MASK_DELTA: Final = 0xA282EAD8

_MIN_PART_BYTES: Final = 64
"""Shorter parts take longer to merge than to check."""


def crc32c(data: Any, crc: int = 0) -> int:
    """Returns the CRC-32C of bytes.

    Args:
      data: bytes, or a contiguous NumPy array.
      crc: checksum of the bytes before them.

    Example:
      >>> hex(crc32c(b"123456789"))
      '0xe3069283'
    """
    if isinstance(data, np.ndarray):
        array = data.reshape(-1).view(np.uint8)
    else:
        array = np.frombuffer(data, np.uint8)
    state = crc ^ 0xFFFFFFFF
    for start in range(0, len(array), _BLOCK_BYTES):
        state = _of_block(array[start : start + _BLOCK_BYTES], state)
    return state ^ 0xFFFFFFFF


def _of_block(array: np.ndarray, state: int) -> int:
    """Returns the state after some more bytes."""
    num_parts = min(_MAX_PARTS, len(array) // _MIN_PART_BYTES)
    if num_parts > 1:
        num_parts = 1 << (num_parts.bit_length() - 1)
        # Of two-byte words.
        part_bytes = len(array) // num_parts // 2 * 2
        size = num_parts * part_bytes
        words = array[:size].view("<u2").reshape(num_parts, -1)
        state = _of_parts(words, state)
        array = array[size:]
    table = _byte_table().tolist()
    for byte in array.tolist():
        state = (state >> 8) ^ table[(state ^ byte) & 0xFF]
    return state


def unmask(masked: int) -> int:
    """Returns the checksum that TensorFlow and LevelDB store in a masked form."""
    rotated = (masked - _MASK_DELTA) & 0xFFFFFFFF
    return ((rotated >> 17) | (rotated << 15)) & 0xFFFFFFFF


def _of_parts(words: np.ndarray, state: int) -> int:
    """Returns the state after the words of all parts, one part behind the other."""
    table = _word_table()
    states = np.zeros(len(words), np.uint32)
    states[0] = state
    for column in np.ascontiguousarray(words.T):
        states = (states >> np.uint32(16)) ^ table[states.astype(np.uint16) ^ column]
    num_bytes = 2 * words.shape[1]
    matrix = _append_zeros(num_bytes)
    while len(states) > 1:
        states = _times(matrix, states[0::2]) ^ states[1::2]
        matrix = _times(matrix, matrix)
    return int(states[0])


@functools.cache
def _byte_table() -> np.ndarray:
    """Returns the checksum state after each byte."""
    states = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        odd = (states & np.uint32(1)).astype(bool)
        states = np.where(odd, (states >> 1) ^ np.uint32(_POLYNOMIAL), states >> 1)
    return states


@functools.cache
def _word_table() -> np.ndarray:
    """Returns the checksum state after each word of two bytes."""
    words = np.arange(2**16, dtype=np.uint32)
    table = _byte_table()
    once = table[words & 0xFF] ^ (words >> 8)
    return (once >> 8) ^ table[once & 0xFF]


def _append_zeros(num_bytes: int) -> np.ndarray:
    """Returns the matrix, 32 columns, that a number of zero bytes multiplies by."""
    ones = np.uint32(1) << np.arange(32, dtype=np.uint32)
    byte = (ones >> 8) ^ _byte_table()[ones & 0xFF]
    result = ones
    while num_bytes:
        if num_bytes & 1:
            result = _times(byte, result)
        byte = _times(byte, byte)
        num_bytes >>= 1
    return result


def _times(matrix: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Returns the product of a matrix, 32 columns, with vectors of 32 bits."""
    result = np.zeros_like(vectors)
    for bit, column in enumerate(matrix):
        result ^= np.where(vectors >> np.uint32(bit) & np.uint32(1), column, 0).astype(
            np.uint32
        )
    return result
