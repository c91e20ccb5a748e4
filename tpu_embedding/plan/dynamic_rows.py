"""Deals the rows of dynamic tables to shards, whole buckets at a time.

A bucket and its 64 rows lie on one shard, so that it finds and inserts ids without
asking the others. Buckets are dealt in blocks: shard `s` holds the buckets
`s * buckets_per_shard` and on. The row in lane `lane` of bucket `b` of a shard is its
row `64 * b + lane` of the table, and the table's row `that * num_shards + s`.
"""

import dataclasses

from tpu_embedding.dynamic import SLOTS_PER_BUCKET, AdmitAfter, Dynamic
from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.plan.stack_plan import StackPlan, TablePlan
from tpu_embedding.plan.stacking import NamedTable
from tpu_embedding.rows.packed_rows import round_up


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


def rows_of_dynamic_table(dynamic: Dynamic, num_shards: int) -> int:
    """Returns the rows of a dynamic table over all shards, spare ones included."""
    per_shard = buckets_per_shard(dynamic, num_shards) * SLOTS_PER_BUCKET
    return num_shards * (per_shard + (dynamic.default_row == "learned"))


def buckets_per_shard(dynamic: Dynamic, num_shards: int) -> int:
    """Returns the buckets that each shard has room for."""
    return -(-dynamic.num_buckets // num_shards)


def dynamic_tables(stack: StackPlan) -> tuple[DynamicTablePlan, ...]:
    """Returns the tables of a stack of dynamic tables; none for a static stack."""
    plans, first_bucket = [], 0
    for table in stack.tables:
        dynamic = table.config.dynamic
        if dynamic is None:
            return ()
        per_shard = buckets_per_shard(dynamic, stack.num_shards)
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


def directory_bytes(stack: StackPlan, hardware: HardwareInfo) -> int:
    """Returns the memory of the ids of a stack on each device; 0 for a static one.

    The number of buckets is rounded up to whole tiles of the hardware.
    """
    tables = dynamic_tables(stack)
    if not tables:
        return 0
    num_buckets = sum(table.buckets_per_shard for table in tables)
    bytes_of_line = 4 * 2 * SLOTS_PER_BUCKET
    num_arrays = 3 if isinstance(tables[0].dynamic.admit, AdmitAfter) else 2
    return num_arrays * round_up(num_buckets, hardware.sublanes) * bytes_of_line


def refuse_unsuited(table: NamedTable) -> None:
    """Refuses optimizers that a dynamic table cannot have.

    Raises:
      ValueError: if the rule moves every row in every step.
    """
    if table.optimizer is not None and table.optimizer.moves_every_row:
        raise ValueError(
            f"TableConfig.optimizer of table {table.name!r} moves every row in each "
            "step, which a te.Dynamic vocabulary cannot have: rows without an id would "
            "move, too. Leave out every_row."
        )
