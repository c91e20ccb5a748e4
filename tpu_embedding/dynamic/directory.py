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
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from tpu_embedding.dynamic.ids_64 import NO_ID
from tpu_embedding.dynamic.vocabulary import SLOTS_PER_BUCKET, Dynamic
from tpu_embedding.plan.plan import StackPlan, TablePlan

LINE_LANES: Final = 2 * SLOTS_PER_BUCKET
DIRECTORY: Final = ":ids"
"""What the name of a directory adds to the name of its stack."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class IdDirectory:
    """Ids, scores and counts of the dynamic tables of a stack.

    Per shard inside `shard_map`; the global arrays hold the shards one after the other.

    Attributes:
      keys: uint32 `[buckets, 128]`, the mixed words of 64 ids; see `ids_64`. Empty
        lanes have all bits set.
      scores: uint32 `[buckets, 128]`: the clock at the last use of each id, then the
        steps that used it. 0 in empty lanes.
      sketch: uint32 `[buckets, 128]`, counters of unknown ids. It is None without
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
