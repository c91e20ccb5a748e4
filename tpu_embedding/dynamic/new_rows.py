"""Initializes rows and slot variables of new ids before their first lookup."""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from tpu_embedding.dynamic.find_or_insert import NewRows
from tpu_embedding.initializers import threefry, threefry_key
from tpu_embedding.optimizers.rules.adafactor import CompensatedSum, coarse_part, is_sum
from tpu_embedding.optimizers.table_rows import AllReduce, table_rows_context
from tpu_embedding.plan.plan import StackPlan
from tpu_embedding.rows.access import gather_rows, set_rows
from tpu_embedding.rows.packed_rows import (
    PackedRows,
    load_rows,
    store_rows,
)
from tpu_embedding.types import PADDING_ROW_ID
from tpu_embedding.update.state import (
    RoundedState,
    is_slot,
    map_slots,
    slots_of,
    with_slots,
)
from tpu_embedding.update.totals import tables_of_rows
from tpu_embedding.xla import as_variables, read_before_write

_ROWS_PER_TURN: Final = 256


def init_new_rows(
    table: PackedRows,
    state: Any,
    new_rows: NewRows,
    init_keys: UInt32[Array, "tables two"],
    stack: StackPlan,
    all_reduce: AllReduce,
) -> tuple[PackedRows, Any]:
    """Writes one shard's rows and slot variables for new ids, in place if donated.

    `state` is None without an optimizer.
    """
    if isinstance(state, RoundedState):
        # The update count seeds the rounding of narrow rows, so it must not restart.
        table, inner = init_new_rows(
            table, state.inner, new_rows, init_keys, stack, all_reduce
        )
        return table, RoundedState(step=state.step, inner=inner)
    per_turn = min(_ROWS_PER_TURN, new_rows.rows.shape[0])

    def init_turn(carry):
        turn, table, slots, changes = carry
        positions = turn * per_turn + jnp.arange(per_turn, dtype=jnp.int32)
        in_bounds = jnp.minimum(positions, new_rows.rows.shape[0] - 1)
        rows = new_rows.rows[in_bounds]
        first, second = new_rows.first[in_bounds], new_rows.second[in_bounds]
        tables = new_rows.tables[in_bounds]
        row_ids = table.layout.dealt(rows)
        row_ids = jnp.where(positions < new_rows.count, row_ids, PADDING_ROW_ID)
        values = initial_values_of_ids(first, second, tables, init_keys, stack)
        # The optimizer starts from the row as it will be read back, rounded to the
        # stored dtype.
        stored = load_rows(store_rows(values, table.layout), table.layout)
        old_state = with_slots(state, slots)
        new = _initial_state(stored, row_ids, old_state, stack)
        if changes:
            # Totals over a table, such as Adafactor's, must no longer include the row
            # that is replaced.
            old = gather_rows(table, row_ids)
            lost = _sums_of(_initial_state(old, row_ids, old_state, stack))
            table, lost = read_before_write((table, lost))
            changes = list(map(_changed, changes, _sums_of(new), lost))
        new_state = map_slots(
            lambda slot, new: set_rows(slot, row_ids, new), old_state, new
        )
        table = set_rows(table, row_ids, values)
        return turn + 1, table, slots_of(new_state), changes

    # The loop ends after the last new id, so a step without new ids writes nothing.
    num_turns = (new_rows.count + per_turn - 1) // per_turn
    no_change = [jax.tree.map(jnp.zeros_like, total) for total in _sums_of(state)]
    _, table, slots, changes = jax.lax.while_loop(
        lambda carry: carry[0] < num_turns,
        init_turn,
        (jnp.int32(0), table, slots_of(state), no_change),
    )
    # The changes are all-reduced after the loop. Inside it, an all-reduce would
    # deadlock, because the loop's length differs by shard.
    remaining = iter(changes)
    return table, jax.tree.map(
        lambda x: _plus(x, next(remaining), all_reduce) if is_sum(x) else x,
        with_slots(state, slots),
        is_leaf=lambda x: is_slot(x) or is_sum(x),
    )


def initial_values_of_ids(
    first: UInt32[Array, " ids"],
    second: UInt32[Array, " ids"],
    tables: Int[Array, " ids"],
    init_keys: UInt32[Array, "tables two"],
    stack: StackPlan,
) -> Float[Array, "ids dim"]:
    """Computes initial rows, which depend only on the table's key and the id.

    `tables` holds each id's table, as a position in the stack.
    """
    initializers: list[Any] = [table.row_initializer for table in stack.tables]
    keys = [_pick(init_keys[:, i], tables) for i in range(2)]
    keys = jnp.stack(threefry(keys[0], keys[1], first, second), axis=1)
    # Always 0, because the key already holds the id, and row numbers depend on the
    # device count.
    row_ids = jnp.zeros((1,), jnp.int32)
    result = jnp.zeros((*tables.shape, stack.dim), jnp.float32)
    for function in dict.fromkeys(initializer.function for initializer in initializers):
        has_function = [
            initializer.function == function for initializer in initializers
        ]
        # `function` is called for the rows of all tables, so tables with different
        # initializers also need scalars. The results for their rows are not used.
        first_scalars = initializers[has_function.index(True)].scalars
        scalars = [
            initializer.scalars if is_used else first_scalars
            for initializer, is_used in zip(initializers, has_function, strict=True)
        ]
        parameters = [
            _pick(jnp.asarray(values), tables) for values in zip(*scalars, strict=True)
        ]

        def row(key, *parameters, function=function):
            return function(threefry_key(key), row_ids, stack.dim, *parameters)[0]

        # XLA would fold constant parameters of a lone table into the arithmetic, which
        # would then round differently than in a stack with several tables.
        values = jax.vmap(row)(*as_variables((keys, *parameters)))
        is_used = _pick(jnp.asarray(has_function), tables)
        result = jnp.where(is_used[:, None], values, result)
    return result


def _pick(values: Array, tables: Array) -> Array:
    # Tables are few, so selects replace a gather, which is slow for single numbers.
    result = jnp.broadcast_to(values[0], tables.shape)
    for i in range(1, values.shape[0]):
        result = jnp.where(tables == i, values[i], result)
    return result


def _initial_state(
    values: Float[Array, "ids dim"],
    row_ids: Int[Array, " ids"],
    inner: Any,
    stack: StackPlan,
) -> Any:
    if not stack.is_trained:
        return inner
    known = None
    if stack.optimizer.takes_totals:
        is_touched = jnp.zeros(row_ids.shape, bool)
        known = tables_of_rows(row_ids, is_touched, lambda totals, _: totals, stack)
    with table_rows_context(known):
        return stack.optimizer.init(values)


def _plus(
    total: CompensatedSum, change: CompensatedSum, all_reduce: AllReduce
) -> CompensatedSum:
    # The change is summed over shards in two parts. Coarse parts add exactly in any
    # order, and the remainder is small.
    coarse = coarse_part(change.value, total.value)
    fine = change.value - coarse + change.rest
    return total.plus(all_reduce(coarse, "sum")).plus(all_reduce(fine, "sum"))


def _changed(
    change: CompensatedSum, gained: CompensatedSum, lost: CompensatedSum
) -> CompensatedSum:
    change = change.plus(gained.value).plus(gained.rest)
    return change.plus(-lost.value).plus(-lost.rest)


def _sums_of(state: Any) -> list[CompensatedSum]:
    leaves = jax.tree.leaves(state, is_leaf=is_sum)
    return [leaf for leaf in leaves if is_sum(leaf)]
