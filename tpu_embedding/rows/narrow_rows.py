"""Rows of fewer than 32 bits per element, stored in 32-bit words.

A TPU moves and adds 32-bit words on SparseCore, and XLA stores arrays of 16-bit
elements in tiles that a gather of rows would copy. So narrow rows lie in int32 arrays:

    bfloat16, float16    two rows share each lane: the lower bits belong to one row,
                         the upper bits to another
    int8                 four elements of a row share a lane; two more lanes hold the
                         row's scale and bias, both float32

Rows that share lanes are read by a shift, without moving lanes of a TPU's vector
registers. An int8 row is better off in lanes of its own, because of scale and bias.

A new row replaces the old one exactly: the int32 difference of their bits is added,
shifted to the row's bits. Such additions carry nothing into other rows.

The functions take NumPy arrays, too, and then compute on the host.
"""

from types import ModuleType
from typing import Any, Final, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

NarrowDtype = Literal["bfloat16", "float16", "int8"]
"""Storage type of narrow rows. An int8 row `q` means `scale * q + bias`, q in 0...255.

As in FBGEMM, whose int8 rows also hold unsigned bytes, a scale and a bias."""

NARROW_DTYPES: Final[tuple[NarrowDtype, ...]] = get_args(NarrowDtype)

_SIGN: Final = np.uint32(0x80000000)
_MAGNITUDE: Final = 0x7FFFFFFF
_FLOAT32_INFINITY: Final = 0x7F800000
_MAX_CODE: Final = 255
"""Largest element of an int8 row."""


class _Float16Bits(NamedTuple):
    """A 16-bit float, by the bits of its positive numbers.

    Attributes:
      dropped: mantissa bits that float32 has beyond it.
      infinity: infinity of the type; larger numbers are NaN.
      exponent_shift: float32's exponent minus its own, for equal numbers.
    """

    dropped: int
    infinity: int
    exponent_shift: int


_BFLOAT16: Final = _Float16Bits(dropped=16, infinity=0x7F80, exponent_shift=0)
_FLOAT16: Final = _Float16Bits(dropped=13, infinity=0x7C00, exponent_shift=112)
_SUBNORMAL_STEP: Final = 2.0**-24
"""Difference of neighbouring float16 numbers below 2**-14."""


def lanes_per_row(dtype: NarrowDtype, dim: int) -> int:
    """Returns the lanes that a row takes, alone or together with another row.

    Example:
      >>> lanes_per_row("bfloat16", 64), lanes_per_row("int8", 64)
      (64, 18)
    """
    return -(-dim // 4) + 2 if dtype == "int8" else dim


def rows_per_lane(dtype: NarrowDtype) -> int:
    """Returns the number of rows that share each lane."""
    return 1 if dtype == "int8" else 2


def encode_rows(rows: Any, dtype: NarrowDtype, bits: Any = None) -> Any:
    """Encodes float32 rows as they are stored, each in lanes of its own.

    Finite numbers beyond the range of a 16-bit type become its largest number. A zero
    and a number that the type has, infinity and NaN included, stay what they are.

    Args:
      rows: float32 `[rows, dim]`, NumPy or JAX.
      dtype: storage type.
      bits: uint32 `[rows, dim]`, random: a 16-bit type then rounds up or down with
        the probabilities that make the mean exact. None: to the nearest number.

    Returns:
      int32 `[rows, lanes]`: the bit patterns of a 16-bit type, or the words of int8.
    """
    if dtype == "int8":
        return _encode_int8(rows)
    encode = _to_bfloat16 if dtype == "bfloat16" else _to_float16
    return encode(rows.view("uint32"), bits, _module_of(rows)).view("int32")


def decode_rows(stored: Any, dtype: NarrowDtype, dim: int) -> Any:
    """Decodes stored rows to float32; the inverse of `encode_rows`.

    Args:
      stored: int32 `[rows, lanes]`, NumPy or JAX.
      dtype: storage type.
      dim: elements of a row.
    """
    xp = _module_of(stored)
    if dtype == "int8":
        codes = _split(stored[:, :-2].view("uint32"), dim, xp)
        scale, bias = stored[:, -2:-1].view("float32"), stored[:, -1:].view("float32")
        return codes.astype("float32") * scale + bias
    if dtype == "bfloat16":
        return (stored << 16).view("float32")
    return _from_float16(stored.view("uint32"), xp)


def join_rows(stored: Any, dtype: NarrowDtype) -> Any:
    """Puts rows that share lanes into these lanes.

    Args:
      stored: int32 `[lines, rows_per_lane, lanes]`, from `encode_rows`.
      dtype: storage type.

    Returns:
      int32 `[lines, lanes]`.
    """
    if dtype == "int8":
        return stored[:, 0]
    return stored[:, 0] | (stored[:, 1] << 16)


def split_rows(lines: Any, dtype: NarrowDtype) -> Any:
    """Returns the rows that share lanes; the inverse of `join_rows`."""
    if dtype == "int8":
        return lines[:, None]
    parts = [lines & 0xFFFF, (lines >> 16) & 0xFFFF]
    return _module_of(lines).stack(parts, axis=1)


def random_bits(keys: UInt32[Array, " rows"], dim: int) -> UInt32[Array, "rows dim"]:
    """Returns random bits for each element of some rows.

    Args:
      keys: a random number per row, from `mix_bits`.
      dim: elements of a row.
    """
    elements = jnp.arange(dim, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    return mix_bits(keys[:, None] + elements[None, :])


def mix_bits(numbers: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Returns a pseudo-random number for each number; unequal ones for unequal numbers.

    Each bit of the input changes each bit of the result with probability near 1/2. A
    hash of counters, in place of a random stream, makes the result independent of the
    order and number of the devices. Source: Wellons' "lowbias32".
    """
    numbers = (numbers ^ (numbers >> 16)) * jnp.uint32(0x7FEB352D)
    numbers = (numbers ^ (numbers >> 15)) * jnp.uint32(0x846CA68B)
    return numbers ^ (numbers >> 16)


def _to_bfloat16(patterns: Any, bits: Any, xp: ModuleType) -> Any:
    """Rounds float32 bit patterns to bfloat16 bit patterns, in uint32."""
    magnitude = patterns & _MAGNITUDE
    rounded = _round(magnitude, _BFLOAT16, bits)
    return _finish(patterns, magnitude, rounded, _BFLOAT16, xp)


def _to_float16(patterns: Any, bits: Any, xp: ModuleType) -> Any:
    """Rounds float32 bit patterns to float16 bit patterns, in uint32."""
    magnitude = patterns & _MAGNITUDE
    smallest_normal = (_FLOAT16.exponent_shift + 1) << 23
    is_normal = magnitude >= smallest_normal
    shifted = xp.where(is_normal, magnitude, smallest_normal)
    rounded = _round(shifted - (_FLOAT16.exponent_shift << 23), _FLOAT16, bits)
    # Scaling by a power of two, and the remainder of a floor, are exact.
    steps = xp.where(is_normal, 0, magnitude).astype("uint32").view("float32")
    steps = steps * np.float32(1 / _SUBNORMAL_STEP)
    if bits is None:
        whole = xp.round(steps)
    else:
        floor = xp.floor(steps)
        threshold = (bits >> 8).astype("float32") * np.float32(2.0**-24)
        whole = floor + (steps - floor > threshold).astype("float32")
    # Via int32: a TPU has no conversion from floats to unsigned integers.
    subnormal = whole.astype("int32").view("uint32")
    rounded = xp.where(is_normal, rounded, subnormal)
    return _finish(patterns, magnitude, rounded, _FLOAT16, xp)


def _round(magnitude: Any, target: _Float16Bits, bits: Any) -> Any:
    """Rounds float32 magnitudes to the target's bits, to nearest or by random bits."""
    dropped = target.dropped
    if bits is None:
        carry = ((magnitude >> dropped) & 1) + ((1 << (dropped - 1)) - 1)
    else:
        carry = bits & ((1 << dropped) - 1)
    return (magnitude + carry) >> dropped


def _finish(
    patterns: Any, magnitude: Any, rounded: Any, target: _Float16Bits, xp: ModuleType
) -> Any:
    """Adds the sign, infinities and NaNs. Finite numbers stay finite."""
    largest, infinity = target.infinity - 1, target.infinity
    rounded = xp.where(rounded > largest, largest, rounded)
    rounded = xp.where(magnitude == _FLOAT32_INFINITY, infinity, rounded)
    quiet_nan = infinity | 1 << (22 - target.dropped)
    rounded = xp.where(magnitude > _FLOAT32_INFINITY, quiet_nan, rounded)
    return rounded.astype("uint32") | ((patterns & _SIGN) >> 16)


def _from_float16(patterns: Any, xp: ModuleType) -> Any:
    """Returns the float32 numbers of float16 bit patterns, by integer operations.

    A TPU flushes subnormal float32 numbers to zero. None occurs here.
    """
    magnitude = patterns & 0x7FFF
    shift = _FLOAT16.exponent_shift << 23
    normal = (magnitude << _FLOAT16.dropped) + shift
    subnormal = magnitude.view("int32").astype("float32") * np.float32(_SUBNORMAL_STEP)
    result = xp.where(magnitude < 0x400, subnormal.view("uint32"), normal)
    # The exponent of infinity and NaN is the largest of either type.
    result = xp.where(magnitude >= _FLOAT16.infinity, normal + shift, result)
    return (result.astype("uint32") | ((patterns & 0x8000) << 16)).view("float32")


def _encode_int8(rows: Any) -> Any:
    """Encodes each row with its own scale and bias, which spread it over all codes."""
    xp = _module_of(rows)
    bias = rows.min(axis=1)
    scale = (rows.max(axis=1) - bias) / np.float32(_MAX_CODE)
    divisor = xp.where(scale == 0, np.float32(1), scale)
    codes = xp.round((rows - bias[:, None]) / divisor[:, None])
    codes = xp.clip(codes, 0, _MAX_CODE).astype("int32").view("uint32")
    ends = xp.stack([scale, bias], axis=1).astype("float32").view("int32")
    return xp.concatenate([_join(codes, xp).view("int32"), ends], axis=1)


def _join(codes: Any, xp: ModuleType) -> Any:
    """Puts four elements of an int8 row, as uint32, into each word.

    Word `w` of `n` holds the elements `w`, `w + n`, `w + 2 n` and `w + 3 n`, lowest
    bits first.
    """
    num_words = -(-codes.shape[1] // 4)
    codes = xp.pad(codes, ((0, 0), (0, 4 * num_words - codes.shape[1])))
    words = codes[:, :num_words]
    for k in range(1, 4):
        words = words | (codes[:, k * num_words : (k + 1) * num_words] << (8 * k))
    return words


def _split(words: Any, dim: int, xp: ModuleType) -> Any:
    """Returns the elements of the words of int8 rows, as uint32."""
    parts = [(words >> shift) & 0xFF for shift in (0, 8, 16, 24)]
    return xp.concatenate(parts, axis=1)[:, :dim]


def _module_of(array: Any) -> ModuleType:
    return jnp if isinstance(array, jax.Array) else np
