"""The leaves of a state that are no tables: as arrays to save, and restored.

Random keys are saved as their numbers. Files then hold no type of JAX.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embedding.checkpoint.arrays import SavedArray
from tpu_embedding.checkpoint.records import ArrayRecord


def array_of_leaf(leaf: Any) -> np.ndarray | jax.Array:
    """Returns the array to save for a leaf."""
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)


def leaf_records(leaf: Any) -> list[ArrayRecord]:
    """Returns the shape and type of a leaf's saved array; an int may have two."""
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        return [ArrayRecord(shape=(), dtype=name) for name in ("int64", "uint64")]
    data = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    if _is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
    return [ArrayRecord(shape=tuple(data.shape), dtype=np.dtype(data.dtype).name)]


def restored_leaf(
    saved: SavedArray, wanted: Any, sharding: jax.sharding.Sharding
) -> Any:
    """Returns a leaf with the type and sharding of a given one.

    Args:
      saved: array of the checkpoint.
      wanted: array, shape or number.
      sharding: placement of a leaf whose shape has none.

    Raises:
      CheckpointError: if a file is damaged.
    """
    if isinstance(wanted, np.ndarray):
        return saved.read()
    if isinstance(wanted, bool | int | float | np.generic):
        return type(wanted)(saved.read())
    if isinstance(wanted, jax.Array) and not wanted.committed:
        # Such an array may meet arrays of any devices in a program, and so must this.
        value = jnp.asarray(saved.read())
    else:
        data = wanted
        if _is_key(wanted) and isinstance(wanted, jax.Array):
            data = jax.random.key_data(wanted)
        elif _is_key(wanted):
            data = jax.eval_shape(jax.random.key_data, wanted)
        sharding = data.sharding or wanted.sharding or sharding
        value = jax.make_array_from_callback(data.shape, sharding, saved.read)
    if _is_key(wanted):
        return jax.random.wrap_key_data(value, impl=_key_impl(wanted))
    return value


def _key_impl(leaf: Any) -> Any:
    """Returns the generator of a random key, or of its shape."""
    impls = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), leaf)
    return impls[0]


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
