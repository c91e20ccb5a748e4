"""Sets table values together with the optimizer state that was made from them.

Most slot variables start with a number. A few start from the values of their table:
the moving averages of `adafactor(use_ema=True)`, and the sum of squares from which
Adafactor takes the scale of a table. When values are set, they must follow.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tpu_embedding.optimizers.probe import probe_rule
from tpu_embedding.optimizers.rules.adafactor import CompensatedSum, is_sum
from tpu_embedding.plan.plan import EmbeddingPlan, TrainedStackPlan
from tpu_embedding.plan.shard_map import on_shards
from tpu_embedding.rows.access import blocks_of, merge_block, read_block
from tpu_embedding.rows.packed_rows import PackedRows, store_rows
from tpu_embedding.tables import table_values
from tpu_embedding.update.apply import init_state
from tpu_embedding.update.every_row import KeptGradientState
from tpu_embedding.update.lazy_update import is_slot, state_specs
from tpu_embedding.update.table_writer import RoundedState
from tpu_embedding.update.totals import rows_of_stack

_SAME: Final = 1e-5
"""Relative difference up to which a total keeps its bits when it is measured again."""


@overload
def with_table_values(
    stacked: dict[str, PackedRows],
    values: Mapping[str, Any],
    plan: EmbeddingPlan,
    slots: None = None,
) -> dict[str, PackedRows]: ...


@overload
def with_table_values(
    stacked: dict[str, PackedRows],
    values: Mapping[str, Any],
    plan: EmbeddingPlan,
    slots: Mapping[str, Any],
) -> tuple[dict[str, PackedRows], dict[str, Any]]: ...


def with_table_values(
    stacked: dict[str, PackedRows],
    values: Mapping[str, Any],
    plan: EmbeddingPlan,
    slots: Mapping[str, Any] | None = None,
) -> Any:
    """Returns the stacks with the values of the given tables replaced.

    With `slots`, the optimizer state that was made from the old values follows, in rows
    whose values change: moving averages of rows, and Adafactor's scale of a table.

    Args:
      stacked: stack name to packed rows, as in `unstack_tables`.
      values: table name to real numbers, `[vocabulary_size, *row_shape]`. Those of
        narrow tables are rounded to the nearest numbers of their type.
      plan: plan of the embedding layer.
      slots: stack name to optimizer state, from `init_slots`; an empty dict if there is
        none yet. It may be left out if no optimizer of these tables makes state from
        their values.

    Returns:
      New stacks; with `slots`, `(stacks, slots)`.

    Raises:
      TypeError: if `values` is no dict, or `plan` is no plan.
      ValueError: if a table is unknown, its stack is missing, or the stacks were made
        for another plan; if an array has the wrong shape, is complex or not numeric,
        or is beyond the range of its type; or if `slots` is missing.

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
        check_no_followers(
            set(values) & tables_with_followers(plan),
            "tables, slots = te.functional.with_table_values(\n"
            "    tables, values, plan, slots)\n"
            "Before init_slots there is none: give an empty dict.",
        )
    new = table_values.replace_values(stacked, dict(values), plan)
    if slots is None:
        return new
    if slots:
        num_rows = {name: len(values[name]) for name in values}
        slots = with_following_slots(slots, new, num_rows, plan, stacked)
    return new, dict(slots)


def check_no_followers(tables: Collection[str], line: str) -> None:
    """Rejects values of tables without the state that was made from their values.

    Args:
      tables: names of those to be set that have such a state.
      line: the line to write.

    Raises:
      ValueError: if there is one.
    """
    if tables:
        raise ValueError(
            f"The values of the tables {sorted(tables)} must be set together with the "
            "state that their optimizer made from them, such as moving averages or "
            f"Adafactor's scale of a table, got the values alone. Write\n  {line}"
        )


def tables_with_followers(plan: EmbeddingPlan) -> frozenset[str]:
    """Returns the tables from whose values an optimizer makes state."""
    return frozenset(
        table.name
        for stack in plan.trained_stacks
        if any(_following_parts(stack))
        for table in stack.tables
    )


def with_following_slots(
    slots: Mapping[str, Any],
    tables: dict[str, PackedRows],
    num_rows: Mapping[str, int],
    plan: EmbeddingPlan,
    old_tables: dict[str, PackedRows] | None = None,
    *,
    parts: Literal["all", "totals"] = "all",
) -> dict[str, Any]:
    """Returns slots whose state made from table values follows values that were set.

    A total over a table that its values confirm keeps its bits.

    Args:
      slots: stack name to optimizer state.
      tables: stack name to packed rows, with the new values.
      num_rows: table name to the number of rows that were set, from the first one on.
      plan: plan of the embedding layer.
      old_tables: the tables before; rows that did not change then keep their slot
        variables. None: all rows that were set changed.
      parts: `"totals"` leaves slot variables as they are.
    """
    result = dict(slots)
    for stack in plan.trained_stacks:
        num_set = [num_rows.get(table.name, 0) for table in stack.tables]
        if stack.name in slots and any(_following_parts(stack)) and any(num_set):
            old_table = None if old_tables is None else old_tables[stack.name]
            result[stack.name] = _follow(
                slots[stack.name],
                tables[stack.name],
                old_table,
                np.asarray(num_set, np.int32),
                stack,
                plan,
                parts,
            )
    return result


@functools.partial(jax.jit, static_argnames=("stack", "plan", "parts"))
def _follow(
    state: Any,
    table: PackedRows,
    old_table: PackedRows | None,
    num_set: jax.Array,
    stack: TrainedStackPlan,
    plan: EmbeddingPlan,
    parts: Literal["all", "totals"],
) -> Any:
    """Returns the state of a stack with the parts of a new state that follow."""

    def follow_shard(state, table, old_table, num_set):
        def new_of(kind: str, old: Any, new: Any) -> Any:
            if kind == "total":
                return _confirmed(old, new, num_set)
            if kind == "slot" and parts == "all":
                return _with_rows(old, new, table, old_table, num_set, stack)
            return old

        new = init_state(table, stack)
        return _map_rule_state(new_of, state, new, _following_parts(stack))

    specs, rows = state_specs(state, stack), stack.rows_spec
    return on_shards(
        follow_shard,
        plan,
        in_specs=(specs, rows, rows, PartitionSpec()),
        out_specs=specs,
    )(state, table, old_table, num_set)


@functools.lru_cache(maxsize=256)
def _following_parts(stack: TrainedStackPlan) -> tuple[str, ...]:
    """Returns the kind of each part of a rule's state, "" for one that stays.

    A `"slot"` starts from the rows, a `"total"` is the sum of each table.
    """
    rule = probe_rule(stack.optimizer, stack.dim)
    probed = iter(rule.leaves)
    kinds = []
    for part in jax.tree.leaves(rule.state, is_leaf=is_sum):
        slots = [next(probed) for _ in jax.tree.leaves(part)]
        # The other sum of Adafactor, its clock, is a scalar.
        if is_sum(part):
            kinds.append("total" if part.value.ndim == 1 else "")
        else:
            kinds.append("slot" if slots[0] and slots[0].starts_from_rows else "")
    return tuple(kinds)


def _map_rule_state(
    function: Callable[[str, Any, Any], Any],
    state: Any,
    new: Any,
    kinds: tuple[str, ...],
) -> Any:
    """Returns the state with `function(kind, part, new part)` as parts of the rule."""
    if isinstance(state, RoundedState | KeptGradientState):
        inner = _map_rule_state(function, state.inner, new.inner, kinds)
        return state._replace(inner=inner)
    parts, tree = jax.tree.flatten(state, is_leaf=lambda x: is_slot(x) or is_sum(x))
    return tree.unflatten(map(function, kinds, parts, tree.flatten_up_to(new)))


def _confirmed(
    old: CompensatedSum, measured: CompensatedSum, num_set: jax.Array
) -> CompensatedSum:
    """Returns measured totals; the old ones where they agree, or nothing was set."""
    is_same = jnp.abs(old.value - measured.value) <= _SAME * jnp.abs(measured.value)
    return jax.tree.map(
        lambda x, y: jnp.where(is_same | (num_set == 0), x, y), old, measured
    )


def _with_rows(
    slot: PackedRows,
    new_slot: PackedRows,
    table: PackedRows,
    old_table: PackedRows | None,
    num_set: jax.Array,
    stack: TrainedStackPlan,
) -> PackedRows:
    """Returns a slot variable with new rows for those that were set. Per shard."""

    def write(start: Any, size: int, slot: PackedRows) -> PackedRows:
        is_used, of_stack = rows_of_stack(start + jnp.arange(size), stack)
        is_new = jnp.zeros(size, bool)
        for i, member in enumerate(stack.tables):
            row = of_stack - member.row_offset
            is_new |= is_used & (row >= 0) & (row < num_set[i])
        if old_table is not None:
            rows, before = (read_block(x, start, size) for x in (table, old_table))
            is_equal = (rows == before) | (jnp.isnan(rows) & jnp.isnan(before))
            is_new &= ~jnp.all(is_equal, axis=1)
        new = store_rows(read_block(new_slot, start, size), slot.layout)
        return merge_block(slot, start, new.reshape(size, -1), is_new)

    blocks = blocks_of([x.layout for x in (slot, table)])
    slot = write(*blocks.first, slot)
    return blocks.loop(lambda start, slot: write(start, blocks.size, slot), slot)
