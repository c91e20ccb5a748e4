"""Chooses how devices with equal copies of a shard add their gradients up.

Each device receives the gradients of the rows that its own group of devices looked up.
Devices along the replica axes then exchange them, in one of two ways:

* *rows*: an all-gather of the received rows, which every replica sums by itself, in the
  same order.
* *table*: an all-reduce of a dense gradient, for shards with few rows.

With R replicas, V rows per shard and n received rows, a device sends `(R - 1) n` rows
in the first way and `2 (R - 1) V / R` in the second. The way that sends fewer is taken.
An optimizer that sees each occurrence of an id needs the first.
"""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tpu_embedding.plan.stack_plan import StackPlan

ReplicaReduction = Literal["none", "rows", "table"]


def choose_reduction(stack: "StackPlan", received_rows: int) -> ReplicaReduction:
    """Returns how the replicas of a stack add up the gradients of a round.

    Args:
      stack: plan of the stack.
      received_rows: length of the buffer of rows that a device receives in a round.
    """
    if stack.num_replicas == 1:
        return "none"
    # From so many received rows on, the all-reduce sends no more.
    table_min_rows = -(-2 * stack.rows_per_shard // stack.num_replicas)
    if stack.keeps_duplicates or received_rows < table_min_rows:
        return "rows"
    return "table"
