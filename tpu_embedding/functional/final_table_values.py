"""Sets tables and dense parameters to their moving averages, after training."""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tpu_embedding.optimizers.rules.adafactor import (
    AdafactorState,
    CollectedGradients,
    catch_up,
    compensated_sum,
)
from tpu_embedding.plan.check_rows import check_slots, check_tables
from tpu_embedding.plan.plan import EmbeddingPlan, TrainedStackPlan
from tpu_embedding.plan.shard_map import on_shards
from tpu_embedding.rows.access import blocks_of, read_block, write_block
from tpu_embedding.rows.packed_rows import PackedRows, load_rows, store_rows
from tpu_embedding.update.every_row import KeptGradientState
from tpu_embedding.update.lazy_update import state_specs
from tpu_embedding.update.totals import across_shards, tables_of_rows


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
    # averages also take it in.
    waiting = sum(x.step for x in _nodes(state, KeptGradientState))
    rows = [table, node.averages, node.average_counts]
    blocks = blocks_of([packed.layout for packed in rows])

    def swap_block(block: tuple[Any, int], carry: tuple[Any, Array]) -> Any:
        """Swaps the rows of a block; adds their squares to each table's sum."""
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


Params = TypeVar("Params")


def finalize_dense_values(params: Params, state: Any) -> tuple[Params, Any]:
    """Sets dense parameters to the moving averages that `adafactor` keeps of them.

    `tpu_embedding.functional.finalize_variable_values` is the public function, for
    dense parameters and for tables.

    Args:
      params: pytree of dense parameters, as the optimizer's `init` took it.
      state: the optimizer's state. `adafactor(use_ema=True)` may be anywhere in it.

    Returns:
      New parameters, and the state with which training may continue. Parameters
      without averages stay as they are; without `use_ema`, so do all, as in Keras.

    Raises:
      ValueError: if the averages belong to other parameters.

    Example:
      >>> from tpu_embedding import optimizers
      >>> optimizer = optimizers.adafactor(0.5, use_ema=True, ema_momentum=0.5)
      >>> params = {"bias": jnp.ones(1)}
      >>> state = optimizer.init(params)
      >>> for _ in range(2):
      ...     updates, state = optimizer.update(params, state, params)
      ...     params = {"bias": params["bias"] + updates["bias"]}
      >>> final, state = finalize_dense_values(params, state)
      >>> round(float(params["bias"][0]), 3), round(float(final["bias"][0]), 3)
      (0.334, 0.417)
    """

    def finalize(state: Any, waiting_steps: Any) -> Any:
        is_node = lambda x: isinstance(x, AdafactorState | CollectedGradients)  # noqa: E731
        finalize_node = functools.partial(swap_in, waiting_steps=waiting_steps)
        return jax.tree.map(finalize_node, state, is_leaf=is_node)

    def swap_in(node: Any, waiting_steps: Any) -> Any:
        nonlocal params
        if isinstance(node, CollectedGradients):
            # The steps that only collect gradients average as well.
            inner = finalize(node.steps.inner_opt_state, node.steps.mini_step)
            return CollectedGradients(node.steps._replace(inner_opt_state=inner))
        if _is_averaged(node):
            params, node = _swap_in_averages(params, node, waiting_steps)
        return node

    state = finalize(state, 0)
    return params, state


def has_averages(state: Any) -> bool:
    """Returns True if an optimizer's state holds moving averages of variables."""
    return any(map(_is_averaged, jax.tree.leaves(state, is_leaf=_is_averaged)))


def _is_averaged(node: Any) -> bool:
    return isinstance(node, AdafactorState) and bool(jax.tree.leaves(node.averages))


def _swap_in_averages(
    params: Any, node: AdafactorState, waiting_steps: Any
) -> tuple[Any, AdafactorState]:
    """Returns the final parameters, and the state that holds them as averages."""

    def swap(array: Any, average: Any, count: Any, seen: Any, momentum: Any) -> Any:
        if not hasattr(average, "dtype"):  # Another optimizer trains this array.
            return array, average, seen
        missed = waiting_steps
        if seen is not None:
            missed = (missed + count - seen)[:, None]
            seen = jnp.full_like(seen, count)
        value = catch_up(average, array, missed, momentum)
        return value.astype(array.dtype), value, seen

    fields = node.averages, node.count, node.average_counts, node.average_momentum
    try:
        swapped = jax.tree.map(swap, params, *fields)
    except ValueError as error:
        raise ValueError(
            "finalize_variable_values needs the parameters that the optimizer was made "
            f"for, got others: {error}"
        ) from error
    params, averages, counts = (
        jax.tree.map(lambda _, parts, i=i: parts[i], params, swapped) for i in range(3)
    )
    return params, node._replace(averages=averages, average_counts=counts)


def finalize_variable_values(
    params: Any, state: Any, plan: EmbeddingPlan | None = None
) -> tuple[Any, Any]:
    """Sets variables to the moving averages that `adafactor(use_ema=True)` keeps.

    It is `finalize_variable_values` of Keras' optimizers. A row that was not looked up
    in the latest steps has an average that lags behind; it is caught up first. The pass
    is in place if the caller's `jit` donates tables and slots. For a whole model there
    is `tpu_embedding.Optimizer.finalize_variable_values`.

    Args:
      params: with a plan, tables: stack name to packed rows. Without one, a pytree of
        dense parameters, as the optimizer's `init` took it.
      state: with a plan, slots: stack name to optimizer state. Without one, the state
        of the optimizer of the dense parameters. Variables whose optimizer keeps no
        averages stay as they are.
      plan: plan of the layer; None: the parameters are dense.

    Returns:
      New variables, and the state with which training may continue.

    Raises:
      ValueError: if the arrays belong to another plan, or the averages to other
        parameters.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(
      ...     te.FeatureConfig(table=table),
      ...     optimizer=te.optimizers.adafactor(0.1, use_ema=True),
      ... )
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> slots = te.functional.init_slots(tables, plan)
      >>> tables, slots = te.functional.finalize_variable_values(tables, slots, plan)
    """
    if plan is None:
        return finalize_dense_values(params, state)
    return _finalize_tables(params, state, plan)


@functools.partial(jax.jit, static_argnames="plan")
def _finalize_tables(
    tables: dict[str, PackedRows], slots: dict[str, Any], plan: EmbeddingPlan
) -> tuple[dict[str, PackedRows], dict[str, Any]]:
    check_tables(tables, plan.trained_stacks)
    check_slots(slots, plan.trained_stacks)
    new_tables, new_slots = dict(tables), dict(slots)
    for stack in plan.trained_stacks:
        table, state = tables[stack.name], slots[stack.name]
        if averaged_nodes(state):
            swap = functools.partial(swap_in_averages, stack=stack)
            specs = stack.rows_spec, state_specs(state, stack)
            swapped = on_shards(swap, plan, in_specs=specs, out_specs=specs)
            new_tables[stack.name], new_slots[stack.name] = swapped(table, state)
    return new_tables, new_slots
