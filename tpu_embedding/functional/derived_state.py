"""Sets table values together with the optimizer state derived from them.

Moving averages and Adafactor's sum of squares start from table values, so new values
reset them. `finalize_variable_values` does the reverse: it sets tables to their moving
averages.
"""

import functools
from collections.abc import Collection, Mapping
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tpu_embedding.optimizers.averages import AveragesState, catch_up
from tpu_embedding.optimizers.probe import probe_rule
from tpu_embedding.optimizers.rules.adafactor import (
    AdafactorState,
    CollectedGradients,
    CompensatedSum,
    compensated_sum,
    is_sum,
)
from tpu_embedding.optimizers.table_rows import TableRows
from tpu_embedding.plan.check_rows import check_slots, check_tables
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.plan.shard_map import on_shards
from tpu_embedding.rows.access import (
    blocks_of,
    merge_block,
    read_block,
    write_block,
)
from tpu_embedding.rows.packed_rows import PackedRows, load_rows, store_rows
from tpu_embedding.tables import table_values
from tpu_embedding.transfers import moves_arrays
from tpu_embedding.update.state import (
    KeptGradientState,
    init_state,
    is_slot,
    state_specs,
)
from tpu_embedding.update.totals import across_shards, tables_of_rows

_SAME: Final = 1e-5
"""A total is kept if a new measurement of it differs by at most this fraction."""

DerivedKind = Literal["slot", "total"]
"""State that starts from table values: a slot variable, or a sum over each table."""


@moves_arrays
def with_table_values(
    stacked: dict[str, PackedRows],
    values: Mapping[str, Any],
    plan: EmbeddingPlan,
    slots: Mapping[str, Any] | None = None,
) -> Any:
    """Replaces all values in the given tables.

    If you pass `slots`, optimizer state derived from the old values is reset to match
    the new values. This state is the moving averages of all rows, and Adafactor's scale
    of the table. Other slot variables don't change.

    Args:
      stacked: stack name to packed rows, as in `unstack_tables`.
      values: table name to real numbers, `[vocabulary_size, *row_shape]`. If a table
        has a narrow dtype, the numbers are rounded to nearest.
      plan: plan of the embedding layer.
      slots: stack name to optimizer state, from `init_slots`. Before you call
        `init_slots`, pass an empty dict. Only needed if the optimizer derives state
        from table values.

    Returns:
      New stacks, or `(stacks, slots)` if you pass `slots`.

    Raises:
      TypeError: if `values` is not a dict, or `plan` is not a plan.
      ValueError: if a table is unknown, its stack is missing, or the stacks were made
        for another plan. Also raised for an array that has the wrong shape, does not
        hold real numbers, or is beyond the range of its type. Also raised if `slots` is
        needed but missing.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=2, dim=2, name="movie")
      >>> rule = te.optimizers.adafactor(0.1, use_ema=True)
      >>> plan = te.make_plan(te.FeatureConfig(table=table), optimizer=rule)
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> slots = te.functional.init_slots(tables, plan)
      >>> ones = {"movie": np.ones((2, 2))}
      >>> tables, slots = te.functional.with_table_values(tables, ones, plan, slots)
      >>> te.functional.slot_values(slots, plan)["movie"]["averages"].tolist()
      [[1.0, 1.0], [1.0, 1.0]]
    """
    table_values.check_values(values, plan)
    if slots is None:
        check_has_slots(
            set(values) & tables_with_derived_state(plan),
            "tables, slots = te.functional.with_table_values(\n"
            "    tables, values, plan, slots)\n"
            "Before init_slots, pass an empty dict as slots.",
        )
    new = table_values.replace_values(stacked, dict(values), plan)
    if slots is None:
        return new
    return new, restarted_slots(slots, new, values, plan)


def check_has_slots(tables: Collection[str], line: str) -> None:
    if tables:
        raise ValueError(
            f"The values of the tables {sorted(tables)} must be set together with the "
            "state that their optimizer derived from them, such as moving averages or "
            f"Adafactor's scale of a table, got only the values. Write\n  {line}"
        )


def tables_with_derived_state(plan: EmbeddingPlan) -> frozenset[str]:
    return frozenset(
        table.name
        for stack in plan.trained_stacks
        if any(_derived_kinds(stack))
        for table in stack.tables
    )


@functools.lru_cache(maxsize=256)
def _derived_kinds(stack: StackPlan) -> tuple[DerivedKind | None, ...]:
    """Classifies each node of a rule's state. None means that it starts as a constant.

    A sum is one node.
    """
    rule = probe_rule(stack.optimizer, stack.dim)
    slots = iter(rule.leaves)
    kinds: list[DerivedKind | None] = []
    for node in jax.tree.leaves(rule.state, is_leaf=is_sum):
        # A sum has several leaves, and all of them must be taken from `slots`.
        first_slot, *_ = [next(slots) for _ in jax.tree.leaves(node)]
        if is_sum(node):
            # Adafactor's other sum, its clock, is a scalar.
            kinds.append("total" if node.value.ndim == 1 else None)
        else:
            is_derived = first_slot is not None and first_slot.starts_from_rows
            kinds.append("slot" if is_derived else None)
    return tuple(kinds)


def restarted_slots(
    slots: Mapping[str, Any],
    tables: Mapping[str, PackedRows],
    names: Collection[str],
    plan: EmbeddingPlan,
    kinds: tuple[DerivedKind, ...] = ("slot", "total"),
) -> dict[str, Any]:
    """Resets derived state to match the values of the tables in `names`.

    `slots` may lack stacks. A total that still agrees with the values keeps its bits.
    """
    result = dict(slots)
    for stack in plan.trained_stacks:
        is_set = np.array([table.name in names for table in stack.tables])
        if stack.name in slots and any(_derived_kinds(stack)) and any(is_set):
            state, source = slots[stack.name], tables[stack.name]
            if not stack.storage.holds_all_rows:
                source = stack.storage.init_state(source, stack, state)
            result[stack.name] = _restarted_state(
                state, source, is_set, stack, plan, kinds
            )
    return result


# `is_set` is not static, so one program serves any choice of tables.
@functools.partial(jax.jit, static_argnames=("stack", "plan", "kinds"))
def _restarted_state(
    state: Any,
    source: Any,
    is_set: jax.Array,
    stack: StackPlan,
    plan: EmbeddingPlan,
    kinds: tuple[DerivedKind, ...],
) -> Any:
    """Resets derived state. `source` is the table, or a new state made from it."""
    is_table = isinstance(source, PackedRows)

    def restart_shard(state: Any, source: Any, is_set: jax.Array) -> Any:
        nodes, tree = jax.tree.flatten(
            state, is_leaf=lambda node: is_slot(node) or is_sum(node)
        )
        new_state = init_state(source, stack) if is_table else source
        new_nodes = tree.flatten_up_to(new_state)
        rule_kinds = _derived_kinds(stack)
        # The rule's state comes last, after the state of its wrappers.
        num_before = len(nodes) - len(rule_kinds)
        for i, kind in enumerate(rule_kinds, start=num_before):
            if kind not in kinds:
                continue
            if kind == "total":
                nodes[i] = _restarted_total(nodes[i], new_nodes[i], is_set)
            else:
                nodes[i] = _restarted_slot(nodes[i], new_nodes[i], is_set, stack)
        return tree.unflatten(nodes)

    specs = state_specs(state, stack)
    return on_shards(
        restart_shard,
        plan,
        in_specs=(specs, stack.rows_spec if is_table else specs, PartitionSpec()),
        out_specs=specs,
    )(state, source, is_set)


def _restarted_total(
    old: CompensatedSum, measured: CompensatedSum, is_set: jax.Array
) -> CompensatedSum:
    # A new sum rounds differently from the total that steps have updated. Keeping the
    # old bits lets a restored run continue exactly.
    is_same = jnp.abs(old.value - measured.value) <= _SAME * jnp.abs(measured.value)
    return jax.tree.map(lambda x, y: jnp.where(is_same | ~is_set, x, y), old, measured)


def _restarted_slot(
    old: PackedRows, new: PackedRows, is_set: jax.Array, stack: StackPlan
) -> PackedRows:
    def restart_block(slot: PackedRows, block: tuple[Any, int]) -> PackedRows:
        (start, size), rows = block, _rows_of_block(*block, stack)
        values = store_rows(read_block(new, start, size), slot.layout)
        is_new = rows.is_used & rows.per_row(is_set)
        return merge_block(slot, start, values.reshape(size, -1), is_new)

    return blocks_of([old.layout]).as_parts().fold(restart_block, old)


def _rows_of_block(start: Any, size: int, stack: StackPlan) -> TableRows:
    """Matches a block of rows with their tables. Totals cover only the block's rows."""
    row_ids = start + jnp.arange(size, dtype=jnp.int32)
    is_touched = jnp.ones(size, bool)
    return tables_of_rows(row_ids, is_touched, lambda total, _: total, stack)


def finalize_variable_values(
    params: Any, state: Any, plan: EmbeddingPlan | None = None
) -> tuple[Any, Any]:
    """Sets variables to their moving averages, as in Keras.

    `te.optimizers.with_ema` and `adafactor(use_ema=True)` keep moving averages. With
    other optimizers, variables don't change. If the latest steps did not look up a row,
    its average is brought up to date first. The update is in place if your `jit`
    donates tables and slots. For a whole model, call
    `tpu_embedding.Optimizer.finalize_variable_values` instead.

    Args:
      params: with a plan, the tables, a dict from stack name to packed rows. Without a
        plan, the dense parameters that were passed to the optimizer's `init`.
      state: with a plan, the slots, a dict from stack name to optimizer state. Without
        a plan, the state of the dense optimizer, with averages anywhere in it.
      plan: plan of the layer. Omit it for dense parameters.

    Returns:
      New variables and new state. The averages in the state start from the new
      variables, so training can continue.

    Raises:
      ValueError: if the arrays belong to another plan, or the averages belong to other
        parameters.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(
      ...     te.FeatureConfig(table=table),
      ...     optimizer=te.optimizers.with_ema(te.optimizers.adagrad(0.1)),
      ... )
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> slots = te.functional.init_slots(tables, plan)
      >>> tables, slots = te.functional.finalize_variable_values(tables, slots, plan)
    """
    if plan is not None:
        check_tables(params, plan.trained_stacks)
        check_slots(state, plan.trained_stacks)
    if not has_averages(state):
        return params, state
    if plan is None:
        return _finalize_dense(params, state)
    return _finalize_tables(params, state, plan)


def has_averages(state: Any) -> bool:
    return any(map(_is_averaged, jax.tree.leaves(state, is_leaf=_is_averaged)))


def _is_averaged(node: Any) -> bool:
    is_state = isinstance(node, AdafactorState | AveragesState)
    return is_state and bool(jax.tree.leaves(node.averages))


@functools.partial(jax.jit, static_argnames="plan")
def _finalize_tables(
    tables: dict[str, PackedRows], slots: dict[str, Any], plan: EmbeddingPlan
) -> tuple[dict[str, PackedRows], dict[str, Any]]:
    tables, slots = dict(tables), dict(slots)
    for stack in plan.trained_stacks:
        name, state = stack.name, slots[stack.name]
        if has_averages(state):
            finalize = functools.partial(_finalize_shard, stack=stack)
            specs = stack.rows_spec, state_specs(state, stack)
            finalize = on_shards(finalize, plan, in_specs=specs, out_specs=specs)
            tables[name], slots[name] = finalize(tables[name], state)
    return tables, slots


def _finalize_shard(
    table: PackedRows, state: Any, stack: StackPlan
) -> tuple[PackedRows, Any]:
    """Sets all rows to their averages, and rounds the averages to the table's dtype."""
    # A rule keeps exactly one state with averages, perhaps inside wrappers.
    nodes = jax.tree.leaves(state, is_leaf=_is_averaged)
    (averaged,) = filter(_is_averaged, nodes)
    # Some steps only accumulated gradients. They didn't change the rows, but they count
    # in the averages.
    is_kept_gradient = lambda node: isinstance(node, KeptGradientState)  # noqa: E731
    nodes = jax.tree.leaves(state, is_leaf=is_kept_gradient)
    count = averaged.count + sum(x.step for x in filter(is_kept_gradient, nodes))

    # The same pass also sums the squares. Two passes would copy a packed table.
    def finalize_block(
        carry: tuple[PackedRows, PackedRows, Any], block: tuple[Any, int]
    ) -> tuple[PackedRows, PackedRows, Any]:
        (table, averages, squares), (start, size) = carry, block
        missed_steps = count - read_block(averaged.average_counts, start, size)
        values = catch_up(
            read_block(averages, start, size),
            read_block(table, start, size),
            missed_steps[:, None],
            averaged.average_momentum,
        )
        stored = store_rows(values, table.layout)
        # A narrow dtype rounds the rows, and the averages must equal the stored rows.
        values = load_rows(stored, table.layout)
        row_squares = jnp.sum(jnp.square(values), axis=1)
        return (
            write_block(table, start, stored),
            write_block(averages, start, values),
            squares + _rows_of_block(start, size, stack).total(row_squares),
        )

    blocks = blocks_of(
        [x.layout for x in (table, averaged.averages, averaged.average_counts)]
    )
    no_squares = jnp.zeros(len(stack.tables))
    carry = (table, averaged.averages, no_squares)
    table, averages, squares = blocks.as_parts().fold(finalize_block, carry)
    finalized = averaged._replace(averages=averages)
    if isinstance(finalized, AdafactorState):
        squares = compensated_sum(across_shards(stack)(squares, "sum"))
        finalized = finalized._replace(squares=squares)
    state = jax.tree.map(
        lambda x: finalized if x is averaged else x,
        state,
        is_leaf=lambda x: x is averaged,
    )
    return table, state


def _finalize_dense(params: Any, state: Any, waiting_steps: Any = 0) -> tuple[Any, Any]:
    """Sets dense parameters to their moving averages.

    Inside a `MultiSteps`, `waiting_steps` counts the steps since the latest update.
    They only accumulated gradients, but count in the averages.
    """

    def finalize_node(node: Any) -> Any:
        nonlocal params
        if isinstance(node, CollectedGradients):
            steps = node.steps
            params, inner = _finalize_dense(
                params, steps.inner_opt_state, steps.mini_step
            )
            return CollectedGradients(steps._replace(inner_opt_state=inner))
        if not _is_averaged(node):
            return node
        try:
            final = jax.tree.map(
                functools.partial(final_value, node.average_momentum),
                params,
                node.averages,
            )
        except ValueError as error:
            raise ValueError(
                "finalize_variable_values needs the parameters that the optimizer was "
                f"made for, got a different structure: {error}"
            ) from error
        params = jax.tree.map(lambda old, new: new.astype(old.dtype), params, final)
        return node._replace(averages=jax.tree.map(new_average, final, node.averages))

    def final_value(momentum: Any, array: Any, average: Any) -> Any:
        if not hasattr(average, "dtype"):  # Another optimizer trains this array.
            return array
        return catch_up(average, array, waiting_steps, momentum)

    def new_average(value: Any, average: Any) -> Any:
        return value if hasattr(average, "dtype") else average

    is_node = lambda x: _is_averaged(x) or isinstance(x, CollectedGradients)  # noqa: E731
    state = jax.tree.map(finalize_node, state, is_leaf=is_node)
    return params, state
