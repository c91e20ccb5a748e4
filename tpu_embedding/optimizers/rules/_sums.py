"""Compensated float32 sums, accurate over millions of small additions."""

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp


class CompensatedSum(NamedTuple):
    """A float32 sum, and the rounding error that its value does not hold.

    Knuth, "The Art of Computer Programming", volume 2, section 4.2.2, theorem B.

    Attributes:
      value: the sum, rounded to float32.
      rest: the rounding error, added to the next addend.
    """

    value: Any
    rest: Any

    def plus(self, addend: jax.Array) -> "CompensatedSum":
        """Returns the sum with `addend` added."""
        addend = addend + self.rest
        value = self.value + addend
        return CompensatedSum(value, _rounding_error(self.value, addend, value))


def coarse_part(values: jax.Array, total: jax.Array) -> jax.Array:
    """Rounds values to a unit, so that float32 sums of them are exact in any order.

    The sum of `values - coarse_part(values, total)` is small, and so is its rounding
    error. A sum of both parts is as exact as one of twice the bits.

    Args:
      values: float32.
      total: float32, broadcast against the values. Sums up to 8 times as large are
        exact.

    Example:
      >>> values = jnp.array([1e7, 0.25])
      >>> coarse = coarse_part(values, jnp.float32(1e7))
      >>> coarse.tolist(), (values - coarse).tolist()
      ([10000000.0, 0.0], [0.0, 0.25])
    """
    bits = jax.lax.bitcast_convert_type(jnp.maximum(total, 1e-30), jnp.int32)
    # The exponent alone: a power of two.
    power = jax.lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)
    unit = power * 2**-20
    # Larger values are multiples of the unit, and their quotients could overflow.
    is_small = jnp.abs(values) < 8 * power
    return jnp.where(is_small, jnp.round(values / unit) * unit, values)


def is_sum(node: Any) -> bool:
    """Returns True if a part of an optimizer's state is a compensated sum."""
    return isinstance(node, CompensatedSum)


def _rounding_error(first: jax.Array, second: jax.Array, total: jax.Array) -> jax.Array:
    """Returns `first + second - total`, of the rounded total."""
    added = total - first
    return (first - (total - added)) + (second - added)


def compensated_sum(start: jax.Array) -> CompensatedSum:
    """Returns a compensated sum that starts at the given value."""
    return CompensatedSum(start, jnp.zeros_like(start))


NO_SUM: Final = CompensatedSum(None, None)
"""Stands for a sum that is not kept, in a state of the same structure."""
