"""Rows with fewer than 32 bits per element, in int32 words of JAX or NumPy arrays.

A TPU gathers and adds 32-bit words. XLA stores 16-bit arrays in tiles, which a gather
of rows would copy.

    bfloat16    two rows share each lane, one in the lower and one in the upper bits. A
                shift separates them, so a TPU moves no values between lanes.
    int8        four elements of a row share a lane. Two more lanes hold the scale and
                the bias, both float32.
"""

from types import ModuleType
from typing import Any, Final, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

NarrowDtype = Literal["bfloat16", "int8"]
"""Storage type of narrow rows. As in FBGEMM, an int8 row `q`, with elements from 0 to
255, means `scale * q + bias`."""

NARROW_DTYPES: Final[tuple[NarrowDtype, ...]] = get_args(NarrowDtype)

_SIGN: Final = np.uint32(0x80000000)
_MAGNITUDE: Final = 0x7FFFFFFF
_FLOAT32_INFINITY: Final = 0x7F800000
_BFLOAT16_INFINITY: Final = 0x7F80
_BFLOAT16_NAN: Final = 0x7FC0
_MAX_CODE: Final = 255
"""Largest element of an int8 row."""


def lanes_per_row(dtype: NarrowDtype, dim: int) -> int:
    """Counts the lanes that a row takes, including lanes that it shares.

    Example:
      >>> lanes_per_row("bfloat16", 64), lanes_per_row("int8", 64)
      (64, 18)
    """
    return -(-dim // 4) + 2 if dtype == "int8" else dim


def rows_per_lane(dtype: NarrowDtype) -> int:
    return 1 if dtype == "int8" else 2


def encode_rows(rows: Any, dtype: NarrowDtype, bits: Any = None) -> Any:
    """Encodes float32 rows as int32 `[rows, lanes]`, each in its own lanes.

    Rounds to nearest. If you pass random uint32 `bits`, shaped like `rows`, bfloat16
    rows are rounded up or down at random, so that the mean is exact. Numbers that
    bfloat16 can represent don't change, other finite numbers stay finite, and NaN stays
    NaN. In int8, a number that isn't finite spoils its row, but no other row.
    """
    if dtype == "int8":
        return _encode_int8(rows)
    patterns = rows.view("uint32")
    return _to_bfloat16(patterns, bits, _module_of(rows)).view("int32")


def decode_rows(stored: Any, dtype: NarrowDtype, dim: int) -> Any:
    """Decodes rows from `encode_rows` to float32."""
    xp = _module_of(stored)
    if dtype == "int8":
        codes = _split(stored[:, :-2].view("uint32"), dim, xp)
        scale, bias = stored[:, -2:-1].view("float32"), stored[:, -1:].view("float32")
        return codes.astype("float32") * scale + bias
    return (stored << 16).view("float32")


def join_rows(stored: Any, dtype: NarrowDtype) -> Any:
    """Joins rows from `encode_rows` that share lanes.

    Maps `[lines, rows_per_lane, lanes]` to `[lines, lanes]`.
    """
    if dtype == "int8":
        return stored[:, 0]
    return stored[:, 0] | (stored[:, 1] << 16)


def split_rows(lines: Any, dtype: NarrowDtype) -> Any:
    """Inverts `join_rows`."""
    if dtype == "int8":
        return lines[:, None]
    parts = [lines & 0xFFFF, (lines >> 16) & 0xFFFF]
    return _module_of(lines).stack(parts, axis=1)


def mix_bits(words: Any) -> Any:
    """Maps uint32 words to pseudo-random words, one to one.

    Each input bit changes each output bit with probability near 1/2. Source: Wellons'
    "lowbias32".
    """
    # Unlike a random stream, a hash doesn't depend on the order and number of devices.
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x7FEB352D)
    words = (words ^ (words >> np.uint32(15))) * np.uint32(0x846CA68B)
    return words ^ (words >> np.uint32(16))


def random_bits(keys: UInt32[Array, " rows"], dim: int) -> UInt32[Array, "rows dim"]:
    """Makes random bits per element from a random number per row."""
    elements = jnp.arange(dim, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    return mix_bits(keys[:, None] + elements[None, :])


def _to_bfloat16(patterns: Any, bits: Any, xp: ModuleType) -> Any:
    """Rounds float32 bit patterns to bfloat16 bit patterns. Both are uint32."""
    # The result is the upper half, after a carry from the lower half.
    magnitude = patterns & _MAGNITUDE
    if bits is None:
        carry = ((magnitude >> 16) & 1) + 0x7FFF  # A tie goes to the even number.
    else:
        carry = bits & 0xFFFF
    # A finite number must not be rounded up to infinity.
    rounded = xp.minimum((magnitude + carry) >> 16, _BFLOAT16_INFINITY - 1)
    rounded = xp.where(magnitude == _FLOAT32_INFINITY, _BFLOAT16_INFINITY, rounded)
    rounded = xp.where(magnitude > _FLOAT32_INFINITY, _BFLOAT16_NAN, rounded)
    return rounded.astype("uint32") | ((patterns & _SIGN) >> 16)


def _encode_int8(rows: Any) -> Any:
    """Encodes each row with its own scale and bias, using the full range of codes."""
    xp = _module_of(rows)
    bias = rows.min(axis=1)
    scale = (rows.max(axis=1) - bias) / np.float32(_MAX_CODE)
    # If all elements of a row are equal, 0 / 0 would make the codes NaN.
    divisor = xp.where(scale == 0, np.float32(1), scale)
    codes = xp.round((rows - bias[:, None]) / divisor[:, None])
    codes = xp.clip(codes, 0, _MAX_CODE).astype("int32").view("uint32")
    ends = xp.stack([scale, bias], axis=1).astype("float32").view("int32")
    return xp.concatenate([_join(codes, xp).view("int32"), ends], axis=1)


def _join(codes: Any, xp: ModuleType) -> Any:
    """Packs the uint32 codes of int8 rows into words, four codes in each."""
    # Word `w` of `n` holds the elements `w`, `w + n`, `w + 2 n` and `w + 3 n`, lowest
    # bits first. With this order, joining and splitting work on contiguous slices.
    num_words = -(-codes.shape[1] // 4)
    codes = xp.pad(codes, ((0, 0), (0, 4 * num_words - codes.shape[1])))
    words = codes[:, :num_words]
    for k in range(1, 4):
        words = words | (codes[:, k * num_words : (k + 1) * num_words] << (8 * k))
    return words


def _split(words: Any, dim: int, xp: ModuleType) -> Any:
    """Inverts `_join`."""
    parts = [(words >> shift) & 0xFF for shift in (0, 8, 16, 24)]
    return xp.concatenate(parts, axis=1)[:, :dim]


def _module_of(array: Any) -> ModuleType:
    return jnp if isinstance(array, jax.Array) else np
