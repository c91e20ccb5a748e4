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
        """Returns the sum with `addend` added, elementwise."""
        addend = addend + self.rest
        value = self.value + addend
        added = value - self.value
        rest = (self.value - (value - added)) + (addend - added)
        return CompensatedSum(value, rest)


def compensated_sum(start: jax.Array) -> CompensatedSum:
    """Returns a compensated sum that starts at the given value."""
    return CompensatedSum(start, jnp.zeros_like(start))


NO_SUM: Final = CompensatedSum(None, None)
"""Stands for a sum that is not kept, in a state of the same structure."""
