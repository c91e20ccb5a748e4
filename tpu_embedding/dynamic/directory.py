"""The directory of a stack of dynamic tables: which id has which row.

A bucket is a line of 128 lanes: the first words of 64 ids, then their second words. A
second line tells when each id was used last, and in how many steps. A lookup reads one
line per id, without a loop over probes.

A bucket and its 64 rows are on one shard, so that it finds and inserts ids without
asking other shards. Buckets are dealt in blocks: shard `s` holds the buckets
`s * buckets_per_shard` and on. The row in lane `lane` of bucket `b` of a shard is its
row `64 * b + lane` of the table, and the table's row `that * num_shards + s`.
"""

import dataclasses
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from tpu_embedding.dynamic.ids_64 import NO_ID
from tpu_embedding.dynamic.vocabulary import SLOTS_PER_BUCKET, Dynamic
from tpu_embedding.plan.plan import StackPlan, TablePlan
from tpu_embedding.types import PADDING_ROW_ID

LINE_LANES: Final = 2 * SLOTS_PER_BUCKET
DIRECTORY: Final = ":ids"
"""What the name of a directory adds to the name of its stack."""


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
      rows: int32 `[ids]`, rows of this shard, rising, then `PADDING_ROW_ID`.
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
    """Reads single elements; without a lane, the element is undefined."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicTablePlan:
    """The buckets of a dynamic table on each shard.

    Attributes:
      table: the table.
      dynamic: vocabulary of the table.
      num_buckets: buckets of the table, over all shards.
      buckets_per_shard: buckets on each shard; the last shard may use fewer.
      first_bucket: first bucket within the directory of a shard.
      first_row: first row within the rows of a shard.
      num_shards: shards of the table.
    """

    table: TablePlan
    dynamic: Dynamic
    num_buckets: int
    buckets_per_shard: int
    first_bucket: int
    first_row: int
    num_shards: int

    @property
    def default_row(self) -> int | None:
        """Row of the table that ids without a row read, or None."""
        if self.dynamic.default_row == "none":
            return None
        return self.buckets_per_shard * SLOTS_PER_BUCKET * self.num_shards


def dynamic_tables(stack: StackPlan) -> tuple[DynamicTablePlan, ...]:
    """Returns the tables of a stack of dynamic tables; none for a static stack."""
    plans, first_bucket = [], 0
    for table in stack.tables:
        dynamic = table.config.vocabulary
        if not isinstance(dynamic, Dynamic):
            return ()
        per_shard = dynamic.buckets_per_shard(stack.num_shards)
        plans.append(
            DynamicTablePlan(
                table=table,
                dynamic=dynamic,
                num_buckets=dynamic.num_buckets,
                buckets_per_shard=per_shard,
                first_bucket=first_bucket,
                first_row=table.row_offset // stack.num_shards,
                num_shards=stack.num_shards,
            )
        )
        first_bucket += per_shard
    return tuple(plans)
