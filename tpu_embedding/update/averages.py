"""Sets the rows of a table to their moving averages, at the end of training."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tpu_embedding.optimizers.rules._sums import compensated_sum
from tpu_embedding.optimizers.rules.adafactor import AdafactorState, catch_up
from tpu_embedding.plan.stack_plan import TrainedStackPlan
from tpu_embedding.rows.access import blocks_of, read_block, write_block
from tpu_embedding.rows.packed_rows import PackedRows, load_rows, store_rows
from tpu_embedding.update.every_row import KeptGradientState
from tpu_embedding.update.tables_of_rows import tables_of_rows
from tpu_embedding.update.totals import across_shards


def swap_in_averages(
    table: PackedRows, state: Any, stack: TrainedStackPlan
) -> tuple[PackedRows, Any]:
    """Sets all rows of a stack to their averages. Per shard; in place where donated.

    Args:
      table: rows of this shard.
      state: the optimizer's, with the averages of `adafactor`.
      stack: the stack's plan.

    Returns:
      The new table, and the state with which training may continue.
    """
    (node,) = averaged_nodes(state)
    # A step that only collected its gradient left the rows as they were, and their
    # averages take it in, too.
    waiting = sum(x.step for x in _nodes(state, KeptGradientState))
    rows = [table, node.averages, node.average_counts]
    blocks = blocks_of([packed.layout for packed in rows])

    def swap_block(block: tuple[Any, int], carry: tuple[Any, Array]) -> Any:
        """Swaps the rows of a block; adds their squares to those of each table."""
        start, size = block
        (table, averages, counts), squares = carry
        missed = node.count - read_block(counts, start, size) + waiting
        averaged = catch_up(
            read_block(averages, start, size),
            read_block(table, start, size),
            missed[:, None],
            node.average_momentum,
        )
        stored = store_rows(averaged, table.layout)
        squares += _squares_by_table(load_rows(stored, table.layout), start, stack)
        new_rows = [
            write_block(table, start, stored),
            write_block(averages, start, averaged),
            write_block(counts, start, jnp.broadcast_to(node.count, (size,))),
        ]
        return new_rows, squares

    # The first block has a size of its own; a loop takes the others.
    carry = swap_block(blocks.first, (rows, jnp.zeros(len(stack.tables))))
    carry = blocks.loop(lambda start, x: swap_block((start, blocks.size), x), carry)
    (new_table, averages, counts), squares = carry
    new_node = node._replace(
        averages=averages,
        average_counts=counts,
        squares=compensated_sum(across_shards(stack)(squares, "sum")),
    )
    return new_table, jax.tree.map(
        lambda x: new_node if x is node else x, state, is_leaf=lambda x: x is node
    )


def _squares_by_table(
    values: Float[Array, "size dim"], start: Any, stack: TrainedStackPlan
) -> Float[Array, " tables"]:
    """Returns the sum of squares of a block of stored rows, for each table."""
    (size, _) = values.shape
    row_ids = start + jnp.arange(size, dtype=jnp.int32)
    # Of this shard: the caller adds up the shards once, after the last block.
    rows = tables_of_rows(row_ids, jnp.ones(size, bool), lambda x, _: x, stack)
    return rows.total(jnp.sum(jnp.square(values), axis=1))


def averaged_nodes(state: Any) -> list[AdafactorState]:
    """Returns the parts of a stack's state that hold moving averages of rows."""
    return [x for x in _nodes(state, AdafactorState) if jax.tree.leaves(x.averages)]


def _nodes(state: Any, kind: type) -> list[Any]:
    """Returns the nodes of a type in a state, without those inside another one."""
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind))
    return [x for x in leaves if isinstance(x, kind)]
