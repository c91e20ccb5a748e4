"""Sets tables and dense parameters to their moving averages, after training."""

import functools
from typing import Any

import jax

from tpu_embedding.optimizers.final_dense_values import finalize_dense_values
from tpu_embedding.plan.check_rows import check_slots, check_tables
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.shard_map import on_shards
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.update.averages import averaged_nodes, swap_in_averages
from tpu_embedding.update.lazy_update import state_specs


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
