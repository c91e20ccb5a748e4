"""Defines sums that stay exact where a float32 total would stop growing.

A float32 total of 2^24 no longer changes when 1 is added, so it loses every sample
after the first 17 million. A `Sum` keeps the rounding error of each addition in a
second float32.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sum:
    """An array of totals, each the unevaluated sum `high + low` of two float32 values.

    Whole numbers add exactly up to 2^46, in any order. Other values of one sign add
    with a relative error of at most 2^-44. `jax.lax.psum` over devices rounds `high` as
    float32 does, once; additions before and after it stay exact.

    Attributes:
      high: float32, the total rounded to float32.
      low: float32, the remainder.
    """

    high: Array
    low: Array

    @classmethod
    def of(cls, values: Float[Array, "*shape"]) -> "Sum":
        """Returns float32 values as totals."""
        return cls(high=values, low=jnp.zeros_like(values))

    @classmethod
    def zeros(cls, shape: tuple[int, ...] = ()) -> "Sum":
        """Returns totals of nothing."""
        return cls.of(jnp.zeros(shape, jnp.float32))

    def add(self, other: "Sum") -> "Sum":
        """Returns the totals of both, which have the same shape.

        The rounding error of `high + high` is a float32, and its formula is that of
        Knuth, "The Art of Computer Programming", volume 2, section 4.2.2, theorem B.

        Example:
          >>> big, one = Sum.of(jnp.float32(2**24)), Sum.of(jnp.float32(1))
          >>> float(big.high + one.high), float(big.add(one).add(one).value())
          (16777216.0, 16777218.0)
        """
        total = self.high + other.high
        part = total - self.high
        error = (self.high - (total - part)) + (other.high - part)
        low = error + (self.low + other.low)
        # The formula would make an infinite total NaN.
        low = jnp.where(jnp.isfinite(total), low, 0.0)
        high = total + low
        rest = jnp.where(jnp.isfinite(high), low - (high - total), 0.0)
        return Sum(high=high, low=rest)

    def value(self) -> Float[Array, "*shape"]:
        """Returns the totals rounded to float32."""
        return self.high + self.low

    def running(self) -> "Sum":
        """Returns the total up to and including each entry of a vector."""
        return jax.lax.associative_scan(Sum.add, self)

    def total(self) -> "Sum":
        """Returns the total over the first axis."""
        zero = jnp.float32(0)
        high, low = jax.lax.reduce(
            (self.high, self.low), (zero, zero), _add_leaves, (0,)
        )
        return Sum(high=high, low=low)


def _add_leaves(
    totals: tuple[Array, Array], others: tuple[Array, Array]
) -> tuple[Array, Array]:
    high, low = totals
    sum_of_both = Sum(high=high, low=low).add(Sum(high=others[0], low=others[1]))
    return sum_of_both.high, sum_of_both.low
