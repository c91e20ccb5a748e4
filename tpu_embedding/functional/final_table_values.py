"""Sets tables to the moving averages of their rows, at the end of training."""

import functools
from typing import Any

import jax

from tpu_embedding.plan.check_rows import check_slots, check_tables
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.shard_map import on_shards
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.update.averages import averaged_nodes, swap_in_averages
from tpu_embedding.update.lazy_update import state_specs


@functools.partial(jax.jit, static_argnames="plan")
def finalize_variable_values(
    tables: dict[str, PackedRows], slots: dict[str, Any], plan: EmbeddingPlan
) -> tuple[dict[str, PackedRows], dict[str, Any]]:
    """Sets the rows of tables to the moving averages that `adafactor` keeps of them.

    It is `finalize_variable_values` of Keras' optimizers. A row that was not looked up
    in the latest steps has an average that lags behind; it is caught up first. The pass
    is in place if the caller's `jit` donates tables and slots.

    Args:
      tables: stack name to packed rows.
      slots: stack name to optimizer state. Stacks whose optimizer keeps no averages
        stay as they are.
      plan: plan of the layer.

    Returns:
      New tables, and the slots with which training may continue.

    Raises:
      ValueError: if the arrays belong to another plan.

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
