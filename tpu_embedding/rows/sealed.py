"""Seals a pytree that holds row ids, so that arithmetic on its leaves is refused.

Row ids are no numbers to add. A generic `jax.tree.map` over a sparse gradient would add
or square them without an error, and change the wrong rows. `seal` therefore hides
integers in an opaque dtype, as JAX does with random keys: JAX passes such an array
through `jit`, and refuses to calculate with it. Compiled programs stay the same.
"""

import dataclasses
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
    tag="row ids; see te.global_norm, te.add, te.scale",
)
"""The opaque dtype of sealed integers."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sealed:
    """A pytree whose integers no arithmetic can reach.

    `jnp.zeros_like` of every leaf gives a tree without rows.

    Attributes:
      leaves: of the tree; integers in an opaque dtype.
      structure: of the tree.
    """

    leaves: list[Any]
    structure: Any = dataclasses.field(metadata={"static": True})

    def open(self) -> Any:
        """Returns the tree with plain integers."""
        leaves = [_open_leaf(leaf) for leaf in self.leaves]
        return jax.tree.unflatten(self.structure, leaves)


def seal(tree: Any) -> Sealed:
    """Returns the tree with int32 arrays in an opaque dtype."""
    leaves, structure = jax.tree.flatten(tree)
    return Sealed([_seal_leaf(leaf) for leaf in leaves], structure)


def _seal_leaf(leaf: Array) -> Array:
    if not jnp.issubdtype(leaf.dtype, jnp.integer):
        return leaf
    # A word of zeros stands for padding.
    words = jax.lax.bitcast_convert_type(leaf ^ PADDING_ROW_ID, jnp.uint32)
    return jax.random.wrap_key_data(words[..., None], impl=_ROW_IDS)


def _open_leaf(leaf: Array) -> Array:
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    words = jax.random.key_data(leaf)[..., 0]
    return jax.lax.bitcast_convert_type(words, jnp.int32) ^ PADDING_ROW_ID
