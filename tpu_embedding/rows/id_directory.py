"""The directory of a stack of dynamic tables: which id has which row.

A bucket is a line of 128 lanes: the first words of 64 ids, then their second words. A
second line tells when each id was used last, and in how many steps. A lookup reads one
line per id, without a loop over probes.
"""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from tpu_embedding.dynamic import SLOTS_PER_BUCKET
from tpu_embedding.rows.id_mixing import NO_ID

LINE_LANES: Final = 2 * SLOTS_PER_BUCKET
DIRECTORY: Final = ":ids"
"""Ending of the name of a directory, behind the name of its stack."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class IdDirectory:
    """Ids, scores and counts of the dynamic tables of a stack.

    Per shard inside `shard_map`; the global arrays hold the shards one after the other.

    Attributes:
      keys: uint32 `[buckets, 128]`, the mixed words of 64 ids; see `id_mixing`. Empty
        lanes have all bits set.
      scores: uint32 `[buckets, 128]`: the clock at the last use of each id, then the
        steps that used it. 0 in empty lanes.
      sketch: uint32 `[buckets, 128]`, counters of unknown ids; None without
        `AdmitAfter`.
      clock: uint32 `[1]`, the step, from 1 on; equal on all shards.
      used_rows: int32 `[tables]`, rows that ids have.
      init_keys: uint32 `[tables, 2]`, random keys of initial values; equal on all
        shards.
    """

    # Any: leaves of a pytree may be arrays, shapes or shardings.
    keys: Any
    scores: Any
    sketch: Any
    clock: Any
    used_rows: Any
    init_keys: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class NewRows:
    """Rows that new ids have got. Per shard.

    Attributes:
      rows: int32 `[ids]`, rows of this shard, rising; `PADDING_ROW_ID` behind the last.
      first: uint32 `[ids]`, first mixed word of the id.
      second: uint32 `[ids]`, second mixed word.
      tables: int32 `[ids]`, position of the table in the stack.
      count: int32 scalar, number of rows.
    """

    rows: Int[Array, " ids"]
    first: UInt32[Array, " ids"]
    second: UInt32[Array, " ids"]
    tables: Int[Array, " ids"]
    count: Int[Array, ""]


def empty_directory(
    num_buckets: int, has_sketch: bool, init_keys: UInt32[Array, "tables two"]
) -> IdDirectory:
    """Returns a directory without an id. Per shard.

    Args:
      num_buckets: buckets of all tables on this shard.
      has_sketch: True for `AdmitAfter`.
      init_keys: random keys of the tables.
    """
    zeros = jnp.zeros((num_buckets, LINE_LANES), jnp.uint32)
    return IdDirectory(
        keys=jnp.full((num_buckets, LINE_LANES), NO_ID, jnp.uint32),
        scores=zeros,
        sketch=zeros if has_sketch else None,
        clock=jnp.ones((1,), jnp.uint32),
        used_rows=jnp.zeros((init_keys.shape[0],), jnp.int32),
        init_keys=init_keys,
    )


def directory_name(stack_name: str) -> str:
    """Returns the key of a stack's directory in the dict of tables."""
    return stack_name + DIRECTORY
