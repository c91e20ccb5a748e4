"""Random ids with Zipf-like popularity, for the synthetic data sets.

Click logs are skewed: a few ids make up most of the traffic. Data without skew would
not exercise an embedding layer.
"""

import dataclasses
import math
from typing import Final

import numpy as np

GOLDEN_RATIO: Final = (math.sqrt(5.0) - 1.0) / 2.0
"""Number whose multiples, modulo 1, are spread most evenly.

Source: Knuth, The Art of Computer Programming, volume 3, section 6.4.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZipfIds:
    """A bounded Zipf law over the ids of one feature.

    Rank `k` in `1 .. vocabulary_size` has the probability

        P(k) proportional to the integral of x**-exponent from k to k + 1.

    This is Zipf's law with an integral in place of the power. Its cumulative law has a
    closed-form inverse, so drawing needs no table for any vocabulary. A fixed
    permutation, `id = (rank * multiplier) % vocabulary_size`, turns ranks into ids. It
    keeps hot ids apart, so no shard owns all of them.

    Attributes:
      vocabulary_size: number of distinct ids, 1 to 2**31 - 2.
      exponent: 0 is uniform and 1 is Zipf's original law. Far above 1, a few ids take
        almost all draws.

    Example:
      >>> ids = ZipfIds(vocabulary_size=10, exponent=1.0)
      >>> [int(ids.ids_of_ranks(np.array(rank))) for rank in (0, 1, 2)]
      [0, 7, 4]
    """

    vocabulary_size: int
    exponent: float = 1.0

    def draw(
        self, generator: np.random.Generator, shape: int | tuple[int, ...]
    ) -> np.ndarray:
        """Draws independent int32 ids of the given shape."""
        return self.ids_of_ranks(self.draw_ranks(generator, shape))

    def draw_ranks(
        self, generator: np.random.Generator, shape: int | tuple[int, ...]
    ) -> np.ndarray:
        """Draws independent popularity ranks of the given shape, from 0."""
        # The ranks at which the cumulative law reaches uniform numbers.
        mass = generator.random(shape) * self._mass(self.vocabulary_size + 1.0)
        if self.exponent == 1.0:
            x = np.exp(mass)
        else:
            power = 1.0 - self.exponent
            x = np.exp(np.log1p(power * mass) / power)
        # Rounding may push the last rank to vocabulary_size + 1 or to infinity.
        return np.minimum(x, self.vocabulary_size).astype(np.int64) - 1

    def ids_of_ranks(self, ranks: np.ndarray) -> np.ndarray:
        """Returns the int32 ids of popularity ranks; rank 0 is the most popular."""
        multiplier = max(1, round(GOLDEN_RATIO * self.vocabulary_size))
        while math.gcd(multiplier, self.vocabulary_size) != 1:
            multiplier += 1
        return (ranks.astype(np.int64) * multiplier % self.vocabulary_size).astype(
            np.int32
        )

    def probabilities(self, ranks: np.ndarray) -> np.ndarray:
        """Returns the float64 probability of each rank.

        Example:
          >>> ZipfIds(vocabulary_size=4, exponent=0.0).probabilities(np.arange(2))
          array([0.25, 0.25])
        """
        mass = self._mass(ranks + 2.0) - self._mass(ranks + 1.0)
        return mass / self._mass(self.vocabulary_size + 1.0)

    def _mass(self, x: np.ndarray | float) -> np.ndarray:
        """Returns the integral of `x**-exponent` from 1 to `x`."""
        if self.exponent == 1.0:
            return np.log(x)
        power = 1.0 - self.exponent
        return np.expm1(power * np.log(x)) / power
