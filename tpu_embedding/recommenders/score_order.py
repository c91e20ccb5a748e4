"""Turns values of any dtype into float32 without changing their order.

float32 merges integers above 2^24, and JAX truncates 64-bit values on their way to a
device. Where only the order counts, neither needs to happen.
"""

from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from tpu_embedding.recommenders.metric import as_float32, is_on_device

_MOST_BITS: Final = {"i": 16, "u": 16, "f": 32}
"""Bits of the widest dtype of each kind whose values float32 keeps."""


def float32_in_order(values: ArrayLike) -> Float[Array, "*shape"]:
    """Returns float32 values in the same order along the last axis.

    Equal values stay equal, and NaN stays NaN. float32 keeps the values of most dtypes.
    Integers and floats that it would round become their places among the distinct
    values, from 0.

    Args:
      values: numbers of any shape.

    Example:
      >>> float32_in_order(np.array([1_700_000_001, 5, 1_700_000_003])).tolist()
      [1.0, 0.0, 2.0]
    """
    xp: Any = jnp if is_on_device(values) else np
    values = xp.asarray(values)
    dtype = values.dtype
    if values.ndim == 0 or 8 * dtype.itemsize <= _MOST_BITS.get(dtype.kind, 64):
        return as_float32(values)
    order = xp.argsort(values, axis=-1)
    ordered = xp.take_along_axis(values, order, axis=-1)
    is_new = ordered[..., 1:] != ordered[..., :-1]
    is_new = xp.concatenate([xp.zeros_like(ordered[..., :1], bool), is_new], axis=-1)
    places = xp.cumsum(is_new, axis=-1, dtype=xp.int32)
    places = xp.take_along_axis(places, xp.argsort(order, axis=-1), axis=-1)
    places = xp.where(values == values, places.astype(xp.float32), xp.float32(np.nan))
    return jnp.asarray(places)
