"""Sets table values together with the optimizer state that was made from them.

Most slot variables start with a number. A few start from the values of their table:
the moving averages of `adafactor(use_ema=True)`, and the sum of squares from which
Adafactor takes the scale of a table. When values are set, they must follow.
"""

import functools
from collections.abc import Collection, Mapping
from typing import Any, Final, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tpu_embedding.functional.steps import init_slots
from tpu_embedding.optimizers.probe import probe_rule
from tpu_embedding.optimizers.rules._sums import CompensatedSum, is_sum
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.shard_map import on_shards
from tpu_embedding.plan.stack_plan import TrainedStackPlan
from tpu_embedding.rows.consecutive_rows import blocks_of, read_block, write_block
from tpu_embedding.rows.packed_rows import PackedRows, store_rows
from tpu_embedding.tables import table_values
from tpu_embedding.update.lazy_update import is_slot
from tpu_embedding.update.partition_specs import slot_specs, table_specs
from tpu_embedding.update.shard_rows import rows_of_stack

_SAME: Final = 1e-5
"""Relative difference up to which a total keeps its bits when it is measured anew."""


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


def check_no_followers(tables: Collection[str], way_out: str) -> None:
    """Refuses to set tables without the state that was made from their values.

    Args:
      tables: names of those to be set that have such a state.
      way_out: the line to write.

    Raises:
      ValueError: if there is one.
    """
    if tables:
        raise ValueError(
            f"The values of the tables {sorted(tables)} must be set together with the "
            "state that their optimizer made from them, such as moving averages or "
            f"Adafactor's scale of a table, got the values alone. Write\n  {way_out}"
        )


def tables_with_followers(plan: EmbeddingPlan) -> frozenset[str]:
    """Returns the tables from whose values an optimizer makes state."""
    return frozenset(
        table.name
        for stack in plan.trained_stacks
        if any(_is_made_from_values(plan)[stack.name])
        for table in stack.tables
    )


def with_following_slots(
    slots: Mapping[str, Any],
    tables: dict[str, PackedRows],
    num_rows: Mapping[str, int],
    plan: EmbeddingPlan,
    old_tables: dict[str, PackedRows] | None = None,
) -> dict[str, Any]:
    """Returns slots whose state made from table values follows values that were set.

    Args:
      slots: stack name to optimizer state.
      tables: stack name to packed rows, with the new values.
      num_rows: table name to the number of rows that were set, from the first one on.
      plan: plan of the embedding layer.
      old_tables: the tables before; rows that did not change then keep their slot
        variables. None: all rows that were set changed.
    """
    flags = _is_made_from_values(plan)
    return _with_parts(slots, tables, num_rows, plan, flags, old_tables)


def with_measured_totals(
    slots: Mapping[str, Any],
    tables: dict[str, PackedRows],
    names: Collection[str],
    plan: EmbeddingPlan,
) -> dict[str, Any]:
    """Returns slots whose totals over the values of some tables are measured anew.

    Slot variables stay. A total that the values confirm keeps its bits.

    Args:
      slots: stack name to optimizer state.
      tables: stack name to packed rows.
      names: the tables.
      plan: plan of the embedding layer.
    """
    flags = {
        name: tuple(
            flag and not is_slot(atom)
            for flag, atom in zip(
                is_made, jax.tree.leaves(slots[name], is_leaf=_is_atom), strict=True
            )
        )
        for name, is_made in _is_made_from_values(plan).items()
        if name in slots
    }
    return _with_parts(slots, tables, dict.fromkeys(names, 1), plan, flags)


def _with_parts(
    slots: Mapping[str, Any],
    tables: dict[str, PackedRows],
    num_rows: Mapping[str, int],
    plan: EmbeddingPlan,
    flags: Mapping[str, tuple[bool, ...]],
    old_tables: dict[str, PackedRows] | None = None,
) -> dict[str, Any]:
    """Returns slots with the parts that have flags made anew."""
    atoms, limits, old = {}, {}, {}
    for stack in plan.trained_stacks:
        sizes = [num_rows.get(table.name, 0) for table in stack.tables]
        if stack.name in slots and any(flags[stack.name]) and any(sizes):
            all_atoms = jax.tree.leaves(slots[stack.name], is_leaf=_is_atom)
            atoms[stack.name] = _chosen(all_atoms, flags[stack.name])
            limits[stack.name] = np.asarray(sizes, np.int32)
            old[stack.name] = None if old_tables is None else old_tables[stack.name]
    if not atoms:
        return dict(slots)
    trained = {s.name: tables[s.name] for s in plan.trained_stacks if s.name in tables}
    wanted = tuple((name, flags[name]) for name in atoms)
    new_atoms = _follow(atoms, trained, old, limits, plan, wanted)
    result = dict(slots)
    for name, of_stack in new_atoms.items():
        leaves, structure = jax.tree.flatten(slots[name], is_leaf=_is_atom)
        new = iter(of_stack)
        result[name] = structure.unflatten(
            [
                next(new) if flag else leaf
                for leaf, flag in zip(leaves, flags[name], strict=True)
            ]
        )
    return result


def _is_made_from_values(plan: EmbeddingPlan) -> dict[str, tuple[bool, ...]]:
    """Returns which parts of each stack's state are made from the table's values."""
    return {stack.name: _follows(stack) for stack in plan.trained_stacks}


@functools.lru_cache(maxsize=256)
def _follows(stack: TrainedStackPlan) -> tuple[bool, ...]:
    """Returns True for slots that start from rows, and for sums of each table."""
    rows = jax.ShapeDtypeStruct((1, stack.dim), jnp.float32)
    state = jax.eval_shape(stack.optimizer.init, rows)
    probed = iter(probe_rule(stack.optimizer, stack.dim).leaves)
    # A kept gradient, its touches and its step come first, and a step of rounding.
    num_before = 3 * stack.optimizer.keeps_gradient
    num_before += stack.layout.narrow_dtype is not None
    flags = [False] * num_before
    for part in jax.tree.leaves(state, is_leaf=is_sum):
        slots = [next(probed) for _ in jax.tree.leaves(part)]
        if is_sum(part):
            # The other sum of Adafactor, its clock, is a scalar.
            flags.append(part.value.ndim == 1)
        else:
            (slot,) = slots
            flags.append(slot is not None and slot.starts_from_rows)
    return tuple(flags)


def _is_atom(node: Any) -> bool:
    """Returns True for a part of a state that follows as a whole, or not at all."""
    return is_slot(node) or is_sum(node)


def _chosen(atoms: list[Any], flags: tuple[bool, ...]) -> list[Any]:
    return [atom for atom, flag in zip(atoms, flags, strict=True) if flag]


@functools.partial(jax.jit, static_argnames=("plan", "wanted"))
def _follow(
    atoms: dict[str, list[Any]],
    tables: dict[str, PackedRows],
    old_tables: dict[str, PackedRows | None],
    limits: dict[str, jax.Array],
    plan: EmbeddingPlan,
    wanted: tuple[tuple[str, tuple[bool, ...]], ...],
) -> dict[str, list[Any]]:
    """Returns the parts of states that follow, with those of the rows that were set."""
    states = init_slots(tables, plan)
    fresh = {
        name: _chosen(jax.tree.leaves(states[name], is_leaf=_is_atom), flags)
        for name, flags in wanted
    }
    stacks = [stack for stack in plan.trained_stacks if stack.name in atoms]
    new_tables = {stack.name: tables[stack.name] for stack in stacks}

    def follow_shard(atoms, fresh, tables, old_tables, limits):
        return {
            stack.name: [
                _merge(
                    old,
                    new,
                    limits[stack.name],
                    [x[stack.name] for x in (tables, old_tables) if x[stack.name]],
                    stack,
                )
                for old, new in zip(atoms[stack.name], fresh[stack.name], strict=True)
            ]
            for stack in stacks
        }

    of_atoms, of_tables = slot_specs(atoms, plan), table_specs(new_tables, plan)
    return on_shards(
        follow_shard,
        plan,
        in_specs=(of_atoms, of_atoms, of_tables, of_tables, PartitionSpec()),
        out_specs=of_atoms,
    )(atoms, fresh, new_tables, old_tables, limits)


def _merge(
    old: Any,
    fresh: Any,
    limits: jax.Array,
    tables: list[PackedRows],
    stack: TrainedStackPlan,
) -> Any:
    """Returns a part of a state as it is for the rows that were set. Per shard."""
    if is_slot(old):
        return _merge_rows(old, fresh, limits, tables, stack)

    is_same = jnp.abs(old.value - fresh.value) <= _SAME * jnp.abs(fresh.value)
    is_kept = is_same | (limits == 0)
    return CompensatedSum(
        jnp.where(is_kept, old.value, fresh.value),
        jnp.where(is_kept, old.rest, fresh.rest),
    )


def _merge_rows(
    old: PackedRows,
    fresh: PackedRows,
    limits: jax.Array,
    tables: list[PackedRows],
    stack: TrainedStackPlan,
) -> PackedRows:
    blocks = blocks_of([x.layout for x in (old, fresh, *tables)])

    def merge_block(start: Any, size: int, merged: PackedRows) -> PackedRows:
        is_new = _is_set(start, size, limits, stack)
        if len(tables) == 2:
            new, before = (read_block(x, start, size) for x in tables)
            is_equal = (new == before) | (jnp.isnan(new) & jnp.isnan(before))
            is_new &= ~jnp.all(is_equal, axis=1)
        kept, rows = (read_block(x, start, size) for x in (merged, fresh))
        is_new = is_new.reshape(-1, *[1] * (rows.ndim - 1))
        rows = jnp.where(is_new, rows, kept)
        return write_block(merged, start, store_rows(rows, old.layout))

    merged = merge_block(*blocks.first, old)
    return blocks.loop(lambda start, x: merge_block(start, blocks.size, x), merged)


def _is_set(
    start: Any, size: int, limits: jax.Array, stack: TrainedStackPlan
) -> jax.Array:
    """Returns True for the rows of a block that were set, `[size]`. Per shard."""
    row_ids = start + jnp.arange(size, dtype=jnp.int32)
    is_used, of_stack = rows_of_stack(row_ids, stack)
    is_set = jnp.zeros(size, bool)
    for i, table in enumerate(stack.tables):
        row = of_stack - table.row_offset
        is_set |= (row >= 0) & (row < limits[i])
    return is_set & is_used
