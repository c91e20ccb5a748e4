"""Initial values of tables: functions `(key, shape, dtype)`, as in JAX."""

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tpu_embedding.field_checks import convert_ints, is_int

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]


def truncated_normal_initializer(dim: int) -> Initializer:
    """Returns TensorFlow's default: truncated normal with stddev `1 / sqrt(dim)`.

    JAX and TensorFlow both take `stddev` before truncation at two standard deviations,
    so the two agree without a correction.
    """
    return jax.nn.initializers.truncated_normal(stddev=1.0 / math.sqrt(dim))


@dataclasses.dataclass(frozen=True)
class RowIdInitializer:
    """Initial values that show where a row comes from: row `i` is all `offset + i`.

    Use it to check lookups and checkpoints. float32 holds row ids up to 2**24 exactly.

    Attributes:
      offset: value of row 0, an int of 32 bits.

    Example:
      >>> key = jax.random.key(0)
      >>> RowIdInitializer(10)(key, (3, 2), jnp.float32).tolist()
      [[10.0, 10.0], [11.0, 11.0], [12.0, 12.0]]
    """

    offset: int = 0

    def __post_init__(self):
        convert_ints(self, "offset")
        if not is_int(self.offset) or not -(2**31) <= self.offset < 2**31:
            raise ValueError(
                "RowIdInitializer.offset must be an int of 32 bits, got "
                f"{self.offset!r}; give the value of row 0."
            )

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Returns the values of a table of this shape; the key has no effect."""
        del key
        if self.offset + shape[0] > 2**31:
            raise ValueError(
                "RowIdInitializer.offset must leave 32 bits for the last row, got "
                f"{self.offset} for {shape[0]} rows."
            )
        row_ids = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + self.offset
        return row_ids.astype(dtype)


def takes_key(initializer: Callable[..., Any]) -> bool:
    """Returns False for TensorFlow's and Keras' initializers, `(shape, dtype)`."""
    try:
        signature = inspect.signature(initializer)
    except (TypeError, ValueError):
        return True  # Some compiled functions do not tell their arguments.
    try:
        signature.bind("key", "shape", "dtype")
    except TypeError:
        return False
    return next(iter(signature.parameters)) != "shape"
