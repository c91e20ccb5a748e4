"""Starts the rows of new ids: initial values, and slot variables as new. Per shard."""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from tpu_embedding.initializers import RowFunction, RowInitializer, threefry_key
from tpu_embedding.optimizers.rules.track_touched_rows import with_new_rows_touched
from tpu_embedding.optimizers.table_rows import table_rows_context
from tpu_embedding.plan.stack_plan import StackPlan, TrainedStackPlan
from tpu_embedding.row_random_bits import threefry
from tpu_embedding.rows.access import set_rows
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.types import PADDING_ROW_ID
from tpu_embedding.update.lazy_update import is_slot
from tpu_embedding.update.shard_rows import shard_rows
from tpu_embedding.update.table_writer import RoundedState

_ROWS_PER_TURN: Final = 256


def start_rows(
    table: PackedRows,
    state: Any,
    rows: Int[Array, " ids"],
    words: tuple[UInt32[Array, " ids"], UInt32[Array, " ids"]],
    tables: Int[Array, " ids"],
    count: Int[Array, ""],
    init_keys: UInt32[Array, "tables two"],
    stack: StackPlan,
) -> tuple[PackedRows, Any]:
    """Writes the rows of new ids, in place where donated. Per shard.

    Args:
      table: rows of this shard.
      state: optimizer state of the stack; None without one.
      rows: rows of the shard; the first `count` are used.
      words: mixed words of the ids.
      tables: position of each row's table in the stack.
      count: number of new rows.
      init_keys: random keys of the tables.
      stack: plan of the stack.

    Returns:
      New table and state.
    """
    (num_ids,) = rows.shape
    per_turn = min(_ROWS_PER_TURN, num_ids)
    inner = state.inner if isinstance(state, RoundedState) else state
    leaves, tree = jax.tree.flatten(inner, is_leaf=is_slot)
    slots = [leaf for leaf in leaves if is_slot(leaf)]

    def write(carry):
        turn, table, slots = carry
        place = turn * per_turn + jnp.arange(per_turn, dtype=jnp.int32)
        is_used = place < count
        place = jnp.minimum(place, num_ids - 1)
        row_ids = jnp.where(is_used, rows[place], PADDING_ROW_ID)
        values = initial_rows(
            words[0][place], words[1][place], tables[place], init_keys, stack
        )
        table = set_rows(table, row_ids, values)
        new = _initial_slots(values, row_ids, tree, leaves, stack)
        slots = [
            set_rows(slot, row_ids, value)
            for slot, value in zip(slots, new, strict=True)
        ]
        return turn + 1, table, slots

    num_turns = (count + per_turn - 1) // per_turn
    _, table, slots = jax.lax.while_loop(
        lambda carry: carry[0] < num_turns, write, (jnp.int32(0), table, slots)
    )
    remaining = iter(slots)
    inner = tree.unflatten([next(remaining) if is_slot(x) else x for x in leaves])
    if isinstance(state, RoundedState):
        return table, RoundedState(step=state.step, inner=inner)
    return table, inner


def initial_rows(
    first: UInt32[Array, " ids"],
    second: UInt32[Array, " ids"],
    tables: Int[Array, " ids"],
    init_keys: UInt32[Array, "tables two"],
    stack: StackPlan,
) -> Float[Array, "ids dim"]:
    """Returns the initial values of rows: a function of the table's key and the id.

    Args:
      first: first mixed word of each id.
      second: second mixed word.
      tables: position of each id's table in the stack.
      init_keys: random keys of the tables.
      stack: gives the initializers.
    """
    by_function: dict[RowFunction, list[int]] = {}
    initializers: list[RowInitializer] = []
    for i, table in enumerate(stack.tables):
        initializer = table.row_initializer
        assert initializer is not None, "TableConfig refuses others"
        initializers.append(initializer)
        by_function.setdefault(initializer.function, []).append(i)
    keys = [_pick(init_keys[:, i], tables) for i in range(2)]
    keys = jnp.stack(threefry(keys[0], keys[1], first, second), axis=1)
    result = None
    for function, members in by_function.items():
        scalars = [initializers[i].scalars for i in members]
        parameters = [
            _pick(jnp.asarray(_spread(values, members, len(initializers))), tables)
            for values in zip(*scalars, strict=True)
        ]
        values = _rows_of(function, keys, parameters, stack.dim)
        is_member = jnp.zeros(tables.shape, bool)
        for i in members:
            is_member |= tables == i
        result = (
            values if result is None else jnp.where(is_member[:, None], values, result)
        )
    assert result is not None
    return result


def _rows_of(
    function: Callable[..., Array], keys: Array, parameters: list[Array], dim: int
) -> Array:
    row_ids = jnp.zeros((1,), jnp.int32)

    def row(key, *parameters):
        return function(threefry_key(key), row_ids, dim, *parameters)[0]

    # As a constant, XLA would fold a parameter into the arithmetic and round otherwise.
    keys, parameters = jax.lax.optimization_barrier((keys, parameters))
    return jax.vmap(row)(keys, *parameters)


def _spread(values: Any, members: list[int], size: int) -> np.ndarray:
    """Returns one value per table of the stack; those of other tables are any."""
    result = np.full(size, values[0])
    result[members] = values
    return result


def _pick(values: Array, tables: Array) -> Array:
    """Returns the value of each row's table."""
    result = jnp.broadcast_to(values[0], tables.shape)
    for i in range(1, values.shape[0]):
        result = jnp.where(tables == i, values[i], result)
    return result


def _initial_slots(
    values: Float[Array, "ids dim"],
    row_ids: Int[Array, " ids"],
    tree: Any,
    leaves: list[Any],
    stack: StackPlan,
) -> list[Array]:
    """Returns the rows of each slot variable before the first step."""
    if not isinstance(stack, TrainedStackPlan):
        return []
    known = None
    if stack.optimizer.takes_totals:
        is_touched = jnp.zeros(row_ids.shape, bool)
        known = shard_rows(row_ids, is_touched, lambda totals, _: totals, stack)
    with table_rows_context(known):
        state = stack.optimizer.init(values)
    state = with_new_rows_touched(state, tree.unflatten(leaves))
    new = tree.flatten_up_to(state)
    return [x for x, leaf in zip(new, leaves, strict=True) if is_slot(leaf)]
