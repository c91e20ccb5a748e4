"""Mixed ids, and access to the lines of their buckets. Per shard."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from tpu_embedding.rows.id_directory import LINE_LANES
from tpu_embedding.types import PADDING_ROW_ID


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixedIds:
    """Mixed ids in any order. Per shard.

    Attributes:
      buckets: int32 `[ids]`, buckets of this shard's directory at the owner, and of all
        shards, one after the other, at the source; `PADDING_ROW_ID` for padding.
      first: uint32 `[ids]`, first mixed word.
      second: uint32 `[ids]`, second mixed word.
      may_insert: bool `[ids]`, True if the feature that asks for it inserts ids.
    """

    buckets: Int[Array, " ids"]
    first: UInt32[Array, " ids"]
    second: UInt32[Array, " ids"]
    may_insert: Bool[Array, " ids"]

    @property
    def is_id(self) -> Bool[Array, " ids"]:
        """False for padding."""
        return self.buckets != PADDING_ROW_ID


class Pass(NamedTuple):
    """Says what a call of `insert` does with its ids. Both are bools, maybe traced.

    Attributes:
      notes: marks known ids as used, and counts unknown ones for the admission.
      fills: gives lanes to unknown ids. The ids of their buckets are noted before.
    """

    notes: Any
    fills: Any


def read_elements(lines: Array, buckets: Array, lanes: Array) -> Array:
    """Reads single elements; those of ids without a lane are undefined."""
    index = _element(buckets, jnp.maximum(lanes, 0))
    return lines.reshape(-1).at[index].get(mode="clip")


def set_elements(
    lines: Array, buckets: Array, lanes: Array, values: Array, is_set: Array
) -> Array:
    """Sets single elements; those that several ids name get equal values."""
    elements = lines.reshape(-1)
    index = jnp.where(is_set, _element(buckets, lanes), elements.shape[0])
    return elements.at[index].set(values, mode="drop").reshape(lines.shape)


def _element(buckets: Array, lanes: Array) -> Array:
    """Returns the number of an element: XLA:CPU is slow with two indices for each."""
    return buckets.astype(jnp.uint32) * LINE_LANES + lanes.astype(jnp.uint32)


def add_to_elements(
    lines: Array, buckets: Array, lanes: Array, is_added: Array
) -> Array:
    """Adds 1 to single elements."""
    elements = lines.reshape(-1)
    index = jnp.where(is_added, _element(buckets, lanes), elements.shape[0])
    return elements.at[index].add(jnp.uint32(1), mode="drop").reshape(lines.shape)
