"""Deals the rows of dynamic tables to shards, whole buckets at a time.

A bucket and its 64 rows lie on one shard, so that it finds and inserts ids without
asking the others. Buckets are dealt in blocks: shard `s` holds the buckets
`s * buckets_per_shard` and on. The row in lane `lane` of bucket `b` of a shard is its
row `64 * b + lane` of the table, and the table's row `that * num_shards + s`.
"""

import dataclasses

from tpu_embedding.dynamic.vocabulary import SLOTS_PER_BUCKET, Dynamic
from tpu_embedding.plan.stack_plan import StackPlan, TablePlan


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
