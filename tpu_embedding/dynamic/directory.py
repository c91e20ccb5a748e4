"""Directories, which map 64-bit ids to rows in a stack of dynamic tables.

A bucket holds 64 ids of two words each, which fill one line of 128 lanes. A lookup
therefore reads one line per id. A bucket and its rows are on the same shard, so finding
and inserting ids needs no communication.
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
"""Suffix that turns a stack's name into its directory's name."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class IdDirectory:
    """Ids, scores and counters for a stack of dynamic tables.

    Shapes are per shard. Global arrays concatenate the shards.

    Attributes:
      keys: uint32 `[buckets, 128]`. A line holds the first mixed words of 64 ids, then
        their second mixed words. Empty lanes hold `NO_ID`.
      scores: uint32 `[buckets, 128]`. A line holds the clock at the last use of each
        id, then the number of steps that used each id. Empty lanes hold 0.
      sketch: uint32 `[buckets, 128]`, counters for unknown ids. None without
        `AdmitAfter`.
      clock: uint32 `[1]`, number of the current step (counted from 1), or the latest
        `now`.
      used_rows: int32 `[tables]`, rows that have an id.
      init_keys: uint32 `[tables, 2]`, random keys for initial values.
    """

    # `Any`, because leaves may be arrays, shapes or shardings.
    keys: Any
    scores: Any
    sketch: Any
    # `clock` and `init_keys` are equal on all shards. Each shard still has its own
    # entries, so that one `rows_spec` fits all leaves.
    clock: Any
    used_rows: Any
    init_keys: Any


def empty_directory(
    num_buckets: int, has_sketch: bool, init_keys: UInt32[Array, "tables two"]
) -> IdDirectory:
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
    return stack_name + DIRECTORY


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicTablePlan:
    """The positions of a dynamic table's buckets and rows on each shard.

    Shard `s` has room for `buckets_per_shard` buckets, from bucket
    `s * buckets_per_shard` on. The last shards may use fewer. Lane `lane` in local
    bucket `b` is local row `r = 64 * b + lane`, which is table row
    `r * num_shards + s`.

    Attributes:
      first_bucket: position of the table's first bucket in each shard's directory.
      first_row: position of the table's first row on each shard.
    """

    table: TablePlan
    dynamic: Dynamic
    buckets_per_shard: int
    first_bucket: int
    first_row: int
    num_shards: int

    @property
    def default_row(self) -> int | None:
        """Table row that is read for ids without a row. If None, they read nothing."""
        if self.dynamic.default_row == "none":
            return None
        # The first row after the rows for ids. `Dynamic.rows_over` adds one row to each
        # shard for it.
        return self.buckets_per_shard * SLOTS_PER_BUCKET * self.num_shards


def dynamic_tables(stack: StackPlan) -> tuple[DynamicTablePlan, ...]:
    """Plans the tables in a stack. The result is empty if the tables are static."""
    plans, first_bucket = [], 0
    for table in stack.tables:
        dynamic = table.config.vocabulary
        if not isinstance(dynamic, Dynamic):
            # Stacked tables have equal `stacking_key`s, so they are all dynamic or all
            # static.
            return ()
        per_shard = dynamic.buckets_per_shard(stack.num_shards)
        plans.append(
            DynamicTablePlan(
                table=table,
                dynamic=dynamic,
                buckets_per_shard=per_shard,
                first_bucket=first_bucket,
                # Divides exactly: each dynamic table has a multiple of `num_shards`
                # rows.
                first_row=table.row_offset // stack.num_shards,
                num_shards=stack.num_shards,
            )
        )
        first_bucket += per_shard
    return tuple(plans)
