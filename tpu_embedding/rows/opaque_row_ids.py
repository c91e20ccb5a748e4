"""Seals a pytree that holds row ids, so that arithmetic on its leaves is refused.

Row ids are no numbers to add. A generic `jax.tree.map` over a sparse gradient would add
or square them without an error, and change the wrong rows. `seal` therefore hides
integers in an opaque dtype, as JAX does with random keys: JAX passes such an array
through `jit`, and refuses to calculate with it. Compiled programs stay the same.
"""

import dataclasses
from collections.abc import Collection
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl
from jaxtyping import Array

from tpu_embedding.types import PADDING_ROW_ID


def _refuse(*args: Any) -> Any:
    raise TypeError("Row ids of a gradient are no random key.")


_ROW_IDS: Final = define_prng_impl(
    key_shape=(1,),
    seed=_refuse,
    split=_refuse,
    random_bits=_refuse,
    fold_in=_refuse,
    name="row_ids",
    tag="row ids; see te.gradients.global_norm, te.gradients.add, te.gradients.scale",
)
"""The opaque dtype of sealed integers."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sealed:
    """A pytree whose row ids and weights no arithmetic can reach.

    `jnp.zeros_like` of every leaf gives a tree without rows.

    Attributes:
      leaves: leaves of the tree, most of them in an opaque dtype.
      structure: structure of the tree.
      dtypes: dtype of each sealed leaf; None for a leaf that is not sealed.
    """

    leaves: list[Any]
    structure: Any = dataclasses.field(metadata={"static": True})
    dtypes: tuple[str | None, ...] = dataclasses.field(metadata={"static": True})

    def open(self) -> Any:
        """Returns the tree with plain arrays."""
        leaves = map(_open_leaf, self.leaves, self.dtypes)
        return jax.tree.unflatten(self.structure, leaves)


def seal(tree: Any, linear_fields: Collection[str]) -> Sealed:
    """Returns the tree with its arrays in an opaque dtype.

    Args:
      tree: pytree of int32, float32 and bool arrays.
      linear_fields: names of the fields whose float32 arrays stay as they are: those
        that are multiplied when the gradient is. A map over floats alone, such as the
        division by a loss scale, is then right.
    """
    with_paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves, dtypes = [], []
    for path, leaf in with_paths:
        is_linear = any(getattr(key, "name", None) in linear_fields for key in path)
        is_open = leaf.dtype == bool or (is_linear and leaf.dtype == jnp.float32)
        leaves.append(leaf if is_open else _seal_leaf(leaf))
        dtypes.append(None if is_open else leaf.dtype.name)
    return Sealed(leaves, structure, tuple(dtypes))


def _seal_leaf(leaf: Array) -> Array:
    if leaf.dtype == jnp.int32:
        leaf = leaf ^ PADDING_ROW_ID  # A word of zeros stands for padding.
    words = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
    return jax.random.wrap_key_data(words[..., None], impl=_ROW_IDS)


def _open_leaf(leaf: Array, dtype: str | None) -> Array:
    if dtype is None:
        return leaf
    words = jax.random.key_data(leaf)[..., 0]
    values = jax.lax.bitcast_convert_type(words, jnp.dtype(dtype))
    return values ^ PADDING_ROW_ID if dtype == "int32" else values
