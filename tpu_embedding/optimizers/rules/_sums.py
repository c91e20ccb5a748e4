"""Running sums of float32 values that lose nothing over millions of small additions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class CompensatedSum(NamedTuple):
    """A sum as two float32: its value, and what rounding took from it.

    Knuth, "The Art of Computer Programming", volume 2, section 4.2.2, theorem B.
    """

    value: jax.Array
    rest: jax.Array

    def plus(self, addend: jax.Array) -> "CompensatedSum":
        """Adds elementwise."""
        addend = addend + self.rest
        value = self.value + addend
        added = value - self.value
        rest = (self.value - (value - added)) + (addend - added)
        return CompensatedSum(value, rest)


def compensated_sum(start: jax.Array) -> CompensatedSum:
    """Returns a sum that begins at a value."""
    return CompensatedSum(start, jnp.zeros_like(start))
