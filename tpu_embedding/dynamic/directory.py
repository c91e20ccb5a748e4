"""The directory of a stack of dynamic tables, which maps ids to rows.

A bucket is a line of 128 lanes: the first words of 64 ids, then their second words. A
second line stores each id's last use and how many steps used it. A lookup reads one
line per id, without a loop over probes.

A bucket and its 64 rows are on the same shard, which can thus find and insert ids
without communication. Buckets are distributed in blocks: shard `s` holds
`buckets_per_shard` buckets, starting with bucket `s * buckets_per_shard`. Lane `lane`
of the shard's bucket `b` is the shard's row `r = 64 * b + lane`, which is row
`r * num_shards + s` of the table.
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
    """Ids, scores and counters of a stack's dynamic tables.

    Shapes are per shard. The global arrays are the concatenated shards.

    Attributes:
      keys: uint32 `[buckets, 128]`, the first mixed words of 64 ids, then their second
        mixed words; see `ids_64`. Empty lanes have all bits set.
      scores: uint32 `[buckets, 128]`, the clock at each id's last use, then the number
        of steps that used it. 0 in empty lanes.
      sketch: uint32 `[buckets, 128]`, counters of unknown ids. None without
        `AdmitAfter`.
      clock: uint32 `[1]`, the current step, starting at 1, or the latest `now`. Equal
        on all shards.
      used_rows: int32 `[tables]`, number of rows with an id.
      init_keys: uint32 `[tables, 2]`, random keys of initial values. Equal on all
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
    """Returns an empty directory with the buckets of all tables. Per shard."""
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
      dynamic: its vocabulary.
      buckets_per_shard: buckets on each shard. The last shards may use fewer.
      first_bucket: first bucket in a shard's directory.
      first_row: first row of the table on each shard.
      num_shards: number of shards.
    """

    table: TablePlan
    dynamic: Dynamic
    buckets_per_shard: int
    first_bucket: int
    first_row: int
    num_shards: int

    @property
    def default_row(self) -> int | None:
        """Row of the table to read for ids without a row, or None to read nothing."""
        if self.dynamic.default_row == "none":
            return None
        return self.buckets_per_shard * SLOTS_PER_BUCKET * self.num_shards


def dynamic_tables(stack: StackPlan) -> tuple[DynamicTablePlan, ...]:
    """Returns the tables of a dynamic stack. Empty for a static stack."""
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
                buckets_per_shard=per_shard,
                first_bucket=first_bucket,
                first_row=table.row_offset // stack.num_shards,
                num_shards=stack.num_shards,
            )
        )
        first_bucket += per_shard
    return tuple(plans)
