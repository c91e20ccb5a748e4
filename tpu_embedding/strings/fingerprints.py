"""Stable 64-bit hashes, for many strings at once.

TensorFlow and Keras use the same hashes, so you can use tables trained there.
`farmhash64` is the hash in `to_hash_bucket_fast` and in `Hashing`. `siphash64` is the
hash in `to_hash_bucket_strong` and in `Hashing` with a salt.

Sources: github.com/google/farmhash, `farmhashna`; J.-P. Aumasson and D. J. Bernstein,
"SipHash: a fast short-input PRF", 2012. Arithmetic is modulo 2**64, as in NumPy.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from tpu_embedding.argument_checks import invalid

Words = np.ndarray
"""uint64 `[num_strings]`."""

_K0: Final = np.uint64(0xC3A5C85C97CB3127)
_K1: Final = np.uint64(0xB492B66FBE98F273)
_K2: Final = np.uint64(0x9AE16A3B2F90404F)

_WORD: Final = 8
_LONG_BLOCK: Final = 64
_STRINGS_PER_PART: Final = 8192

MAX_BYTES: Final = 2**16
"""Maximum string length. FarmHash takes 60 ms for a string with this length.

The hashes process all strings at once, block by block. The limit protects a served
model, whose clients choose the strings: a string of 10 MB would take 9 s.
"""


@dataclasses.dataclass(frozen=True)
class ByteStrings:
    """Byte strings in one buffer, with int64 `starts` and `lengths`."""

    # uint8, with 8 unused bytes after the last string, so that `words` stays in bounds.
    buffer: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    def __getitem__(self, chosen: np.ndarray | slice) -> "ByteStrings":
        return ByteStrings(self.buffer, self.starts[chosen], self.lengths[chosen])

    def equal_to(self, string: bytes) -> np.ndarray:
        """Compares all strings with one string."""
        is_equal = self.lengths == len(string)
        for i, byte in enumerate(string):
            candidates = np.flatnonzero(is_equal)
            is_equal[candidates] = self[candidates].words(i, 1) == byte
        return is_equal

    def words(self, offset: Any, num_bytes: int = _WORD) -> Words:
        """Reads the little-endian number at an offset in each string."""
        # This view has an item at every byte offset, so numbers may be unaligned.
        size = self.buffer.shape[0] - num_bytes + 1
        overlapping = np.ndarray((size,), f"<u{num_bytes}", self.buffer, 0, (1,))
        return overlapping[self.starts + offset].astype(np.uint64)


def encode(strings: Sequence[Any] | np.ndarray) -> ByteStrings:
    """Encodes str as UTF-8. Bytes don't change, and other elements raise TypeError."""
    if isinstance(strings, np.ndarray):
        width = strings.dtype.itemsize
        codes = None
        if strings.dtype.kind == "S" and width:
            codes = np.ascontiguousarray(strings).view(np.uint8)
        elif strings.dtype.kind == "U" and width:
            codes = np.ascontiguousarray(strings).view(np.uint32)
            codes = codes.astype(np.uint8) if codes.max(initial=0) < 128 else None
        if codes is not None:
            lengths = np.strings.str_len(strings).astype(np.int64)
            buffer = np.concatenate([codes, np.zeros(_WORD, np.uint8)])
            starts = np.arange(len(strings)) * (len(codes) // max(1, len(strings)))
            return ByteStrings(buffer, starts, lengths)
        strings = strings.tolist()
    strings = list(strings)
    try:
        text = "".join(strings)
    except TypeError:  # There are bytes, or values that are not strings.
        text = None
    # Only ASCII text has as many bytes as characters.
    if text is not None and text.isascii():
        joined, encoded = text.encode(), strings
    else:
        encoded = [_encode_one(string, i) for i, string in enumerate(strings)]
        joined = b"".join(encoded)
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    buffer = np.frombuffer(joined + bytes(_WORD), np.uint8)
    return ByteStrings(buffer, np.cumsum(lengths) - lengths, lengths)


def _encode_one(string: Any, index: int) -> bytes:
    if isinstance(string, str):
        return string.encode()
    if isinstance(string, bytes):
        return string
    rule, fix = f"be str or bytes at {index}", "Replace missing values with a string."
    raise invalid("Strings", rule, string, fix, TypeError)


def farmhash64(strings: ByteStrings) -> Words:
    """Hashes with FarmHash's `Fingerprint64`."""
    return _by_parts(strings, _farmhash64)


def siphash64(strings: ByteStrings, key: tuple[int, int]) -> Words:
    """Hashes with SipHash-2-4, under a key of two 64-bit numbers."""
    return _by_parts(strings, lambda part: _siphash64(part, key))


def _by_parts(strings: ByteStrings, function: Callable[[ByteStrings], Words]) -> Words:
    num_strings = strings.lengths.shape[0]
    longest = int(strings.lengths.max(initial=0))
    if longest > MAX_BYTES:
        rule, fix = f"have at most {MAX_BYTES:,} bytes", "Hash a digest instead."
        raise invalid("Strings to hash", rule, longest, fix)
    # A few thousand strings at a time stay in the CPU's cache.
    parts = [
        function(strings[first : first + _STRINGS_PER_PART])
        for first in range(0, num_strings, _STRINGS_PER_PART)
    ]
    return np.concatenate([np.zeros(0, np.uint64), *parts])


def _farmhash64(strings: ByteStrings) -> Words:
    hashes = np.empty(strings.lengths.shape[0], np.uint64)
    # FarmHash has a function for each of these ranges of lengths.
    functions = (
        lambda empty: np.full(empty.lengths.shape[0], _K2),
        _farm_1_to_3,
        _farm_4_to_7,
        _farm_8_to_16,
        _farm_17_to_32,
        _farm_33_to_64,
        _farm_above_64,
    )
    ranges = np.searchsorted([0, 3, 7, 16, 32, 64], strings.lengths)
    for i, function in enumerate(functions):
        is_member = ranges == i
        if is_member.any():
            hashes[is_member] = function(strings[is_member])
    return hashes


def _siphash64(strings: ByteStrings, key: tuple[int, int]) -> Words:
    num_strings = strings.lengths.shape[0]
    constants = (
        0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573
    )  # fmt: skip
    state = np.empty((4, num_strings), np.uint64)
    for i, constant in enumerate(constants):
        state[i] = constant ^ key[i % 2]
    # Put long strings first, so that for any k, the first columns are the strings with
    # a k-th word.
    order = np.argsort(-strings.lengths, kind="stable")
    ordered = strings[order]
    num_words = ordered.lengths // _WORD
    for k in range(int(num_words.max(initial=0))):
        # The first `end` strings have more than k words.
        end = int(np.searchsorted(-num_words, -k, side="left"))
        longer = state[:, :end]  # A view, which changes in place.
        _sip_compress(longer, ordered[np.arange(end)].words(k * _WORD))
    _sip_compress(state, _last_word(ordered, num_words))
    state[2] ^= np.uint64(0xFF)
    for _ in range(4):
        _sip_round(state)
    hashes = np.empty(num_strings, np.uint64)
    hashes[order] = state[0] ^ state[1] ^ state[2] ^ state[3]
    return hashes


def _rotate(value: Words, bits: int) -> Words:
    """Rotates right, like FarmHash."""
    return (value >> np.uint64(bits)) | (value << np.uint64(64 - bits))


def _shift_mix(value: Words) -> Words:
    return value ^ (value >> np.uint64(47))


def _mix(u: Words, v: Words, multiplier: Any) -> Words:
    """Mixes like FarmHash's `HashLen16`."""
    a = _shift_mix((u ^ v) * multiplier)
    return _shift_mix((v ^ a) * multiplier) * multiplier


def _multiplier(strings: ByteStrings) -> Words:
    return _K2 + strings.lengths.astype(np.uint64) * np.uint64(2)


def _farm_1_to_3(strings: ByteStrings) -> Words:
    lengths = strings.lengths
    first, middle = strings.words(0, 1), strings.words(lengths // 2, 1)
    last = strings.words(lengths - 1, 1)
    y = first + (middle << np.uint64(8))
    z = lengths.astype(np.uint64) + (last << np.uint64(2))
    return _shift_mix(y * _K2 ^ z * _K0) * _K2


def _farm_4_to_7(strings: ByteStrings) -> Words:
    lengths = strings.lengths
    first, last = strings.words(0, 4), strings.words(lengths - 4, 4)
    u = lengths.astype(np.uint64) + (first << np.uint64(3))
    return _mix(u, last, _multiplier(strings))


def _farm_8_to_16(strings: ByteStrings) -> Words:
    multiplier = _multiplier(strings)
    a = strings.words(0) + _K2
    b = strings.words(strings.lengths - 8)
    c = _rotate(b, 37) * multiplier + a
    d = (_rotate(a, 25) + b) * multiplier
    return _mix(c, d, multiplier)


def _farm_17_to_32(strings: ByteStrings) -> Words:
    _, hashes = _mix_of_ends(strings, _K1)
    return hashes


def _farm_33_to_64(strings: ByteStrings) -> Words:
    multiplier, lengths = _multiplier(strings), strings.lengths
    y, z = _mix_of_ends(strings, _K2)
    a = strings.words(0) * _K2
    e, f = strings.words(16) * multiplier, strings.words(24)
    g = (y + strings.words(lengths - 32)) * multiplier
    h = (z + strings.words(lengths - 24)) * multiplier
    u = _rotate(e + f, 43) + _rotate(g, 30) + h
    return _mix(u, e + _rotate(f + a, 18) + g, multiplier)


def _mix_of_ends(strings: ByteStrings, factor: Any) -> tuple[Words, Words]:
    """Computes a sum and a mix of the first and last 16 bytes."""
    multiplier, lengths = _multiplier(strings), strings.lengths
    a, b = strings.words(0) * factor, strings.words(8)
    c = strings.words(lengths - 8) * multiplier
    d = strings.words(lengths - 16) * _K2
    y = _rotate(a + b, 43) + _rotate(c, 30) + d
    return y, _mix(y, a + _rotate(b + _K2, 18) + c, multiplier)


def _weak_hash(strings: ByteStrings, offset: Any, a: Words, b: Words):
    """Hashes 32 bytes like FarmHash's `WeakHashLen32WithSeeds`."""
    w, x, y, z = (strings.words(offset + 8 * i) for i in range(4))
    a = a + w
    b = _rotate(b + a + z, 21)
    c = a
    a = a + x + y
    return a + z, b + _rotate(a, 44) + c


def _farm_above_64(strings: ByteStrings) -> Words:
    """Mixes 56 state bytes with each 64-byte block, then with the last 64 bytes."""
    num_strings = strings.lengths.shape[0]
    num_blocks = (strings.lengths - 1) // _LONG_BLOCK
    x = np.full(num_strings, np.uint64(81))
    y = x * _K1 + np.uint64(113)
    z = _shift_mix(y * _K2 + np.uint64(113)) * _K2
    x = x * _K2 + strings.words(0)
    zeros = np.zeros(num_strings, np.uint64)
    state = np.stack([x, y, z, zeros, zeros, zeros, zeros])
    for k in range(int(num_blocks.max())):
        active = np.flatnonzero(num_blocks > k)
        state[:, active] = _farm_block(
            strings[active], k * _LONG_BLOCK, state[:, active], _K1, 1
        )
    remainder = ((strings.lengths - 1) % _LONG_BLOCK).astype(np.uint64)
    # The last block has its own multiplier, and multiplies two words by 9.
    multiplier = _K1 + ((state[2] & np.uint64(0xFF)) << np.uint64(1))
    state[5] += remainder
    state[3] += state[5]
    state[5] += state[3]
    x, y, z, v0, v1, w0, w1 = _farm_block(
        strings, strings.lengths - _LONG_BLOCK, state, multiplier, 9
    )
    u = _mix(v0, w0, multiplier) + _shift_mix(y) * _K0 + z
    return _mix(u, _mix(v1, w1, multiplier) + x, multiplier)


def _farm_block(
    strings: ByteStrings, offset: Any, state: np.ndarray, multiplier: Any, factor: int
) -> np.ndarray:
    """Mixes 64 bytes into the state `(x, y, z, v, v, w, w)`."""
    x, y, z, v0, v1, w0, w1 = state
    x = _rotate(x + y + v0 + strings.words(offset + 8), 37) * multiplier
    y = _rotate(y + v1 + strings.words(offset + 48), 42) * multiplier
    x = x ^ w1 * np.uint64(factor)
    y = y + v0 * np.uint64(factor) + strings.words(offset + 40)
    z = _rotate(z + w0, 33) * multiplier
    v0, v1 = _weak_hash(strings, offset, v1 * multiplier, x + w0)
    w0, w1 = _weak_hash(strings, offset + 32, z + w1, y + strings.words(offset + 16))
    # FarmHash swaps `x` and `z` after each block.
    return np.stack([z, y, x, v0, v1, w0, w1])


def _last_word(strings: ByteStrings, num_words: np.ndarray) -> Words:
    """Reads the bytes after the last whole word, with the length as highest byte."""
    num_bytes = (strings.lengths % _WORD).astype(np.uint64)
    mask = (np.uint64(1) << num_bytes * np.uint64(_WORD)) - np.uint64(1)
    rest = strings.words(num_words * _WORD) & mask
    return rest | strings.lengths.astype(np.uint64) << np.uint64(56)


def _sip_compress(state: np.ndarray, words: Words) -> None:
    state[3] ^= words
    _sip_round(state)
    _sip_round(state)
    state[0] ^= words


def _sip_round(state: np.ndarray) -> None:
    """Runs one SipHash round on `[4, num_strings]`, in place."""
    a, b, c, d = state
    a += b
    b[:] = _rotate(b, 64 - 13) ^ a
    a[:] = _rotate(a, 32)
    c += d
    d[:] = _rotate(d, 64 - 16) ^ c
    a += d
    d[:] = _rotate(d, 64 - 21) ^ a
    c += b
    b[:] = _rotate(b, 64 - 17) ^ c
    c[:] = _rotate(c, 32)
