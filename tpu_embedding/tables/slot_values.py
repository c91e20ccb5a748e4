"""Reads and sets slot variables by table and name, as NumPy arrays.

An optimizer has one state pytree per stack. Users see the state per table, under names
that they know, such as `accumulators` or `mu`.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embedding.argument_checks import check_mapping, invalid
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.table_values import (
    real_array,
    replace_values,
    unstack_tables,
)
from tpu_embedding.transfers import moves_arrays

StateParts = Literal["rows", "all"]
"""`"rows"` means slot variables. `"all"` adds table totals and step counts."""

_HYPERPARAMETERS = {"hyperparams", "hyperparams_states"}
"""Fields of `optax.inject_hyperparams`, which `with_hyperparameters` sets."""

_PARTS_OF_A_SUM = {"value", "rest"}
"""Fields of a compensated sum, which mean little without the name of the sum."""


@moves_arrays
def slot_values(
    slots: Mapping[str, Any], plan: EmbeddingPlan, parts: StateParts = "rows"
) -> dict[str, dict[str, np.ndarray]]:
    """Reads slot variables as NumPy arrays, by table and name.

    Names are optimizer state fields, such as `accumulators`, `momenta` and `linears` in
    this package, or `mu`, `nu`, `trace` and `sum_of_squares` in optax. If two fields
    have the same name, the fields and positions around them are prepended. For example,
    a chain of two `optax.trace` has `0/trace` and `1/trace`.

    Args:
      slots: optimizer state by stack name, from `init_slots`. You can leave out stacks.
      plan: plan of the embedding layer.
      parts: `"rows"` reads slot variables, which have one entry per row. `"all"` also
        reads table totals, such as the `column_accumulators` in `adafactor`, and step
        counts, which all tables in a stack share. Hyperparameters are never included.

    Returns:
      Arrays by table and slot name. Slot variables are `[vocabulary_size, dim]` or
      `[vocabulary_size]`, in logical row order. Totals and counts lack the first axis.

    Raises:
      ValueError: if `parts` is unknown, or the slots were made for another plan.

    Example:
      >>> import jax
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(
      ...     te.FeatureConfig(table=table), optimizer=te.optimizers.adagrad(0.1)
      ... )
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> slots = te.functional.init_slots(tables, plan)
      >>> te.functional.slot_values(slots, plan)["movie"]["accumulators"].shape
      (10, 4)
    """
    if parts not in get_args(StateParts):
        raise invalid("parts", f"be one of {list(get_args(StateParts))}", parts)
    values: dict[str, dict[str, np.ndarray]] = {}
    for stack in plan.trained_stacks:
        if stack.name not in slots:
            continue
        values |= {table.name: {} for table in stack.tables}
        kinds = {"rows"} if parts == "rows" else {"rows", "tables", "shared"}
        for slot in named_slots(slots[stack.name], stack):
            if slot.kind in kinds:
                for table_name, array in slot.read(stack, plan).items():
                    values[table_name][slot.name] = array
    return values


@moves_arrays
def with_slot_values(
    slots: Mapping[str, Any],
    values: Mapping[str, Mapping[str, Any]],
    plan: EmbeddingPlan,
) -> dict[str, Any]:
    """Replaces slot variables, and leaves the rest of the optimizer state unchanged.

    Args:
      slots: optimizer state by stack name, from `init_slots`.
      values: arrays by table and slot name, as in `slot_values`. Tables and slots that
        you leave out keep their values. Note that the tables in a stack share their
        step counts, so don't pass different counts for them.
      plan: plan of the embedding layer.

    Returns:
      The new state, with unchanged shapes, dtypes and shardings.

    Raises:
      TypeError: if `values`, or the values of a table, are not a dict.
      ValueError: if a table or slot is unknown, if a value is not real or has the wrong
        shape, or if the slots were made for another plan.

    Example:
      >>> import jax
      >>> import numpy as np
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(
      ...     te.FeatureConfig(table=table), optimizer=te.optimizers.adagrad(0.1)
      ... )
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> slots = te.functional.init_slots(tables, plan)
      >>> ones = {"movie": {"accumulators": np.ones((10, 4))}}
      >>> slots = te.functional.with_slot_values(slots, ones, plan)
      >>> float(te.functional.slot_values(slots, plan)["movie"]["accumulators"].mean())
      1.0
    """
    line = "values={'movie': {'accumulators': array}}, by table and slot name"
    check_mapping("values", values, line)
    for values_by_slot in values.values():
        check_mapping("values of each table", values_by_slot, line)
    stacks = [stack for stack in plan.trained_stacks if stack.name in slots]
    known_tables = sorted(table.name for stack in stacks for table in stack.tables)
    for table_name in values:
        if table_name not in known_tables:
            rule = f"name trained tables that have slots, {known_tables}"
            raise invalid("values", rule, table_name)
    result = dict(slots)
    for stack in stacks:
        new = {t.name: values[t.name] for t in stack.tables if t.name in values}
        if not new:
            continue
        state = slots[stack.name]
        named = list(named_slots(state, stack))
        known = sorted(slot.name for slot in named if slot.kind != "hyperparameter")
        for table_name, values_by_slot in new.items():
            for name in values_by_slot:
                if name not in known:
                    owner = f"values of table {table_name!r}"
                    rule = f"name parts of its optimizer's state, {known}"
                    raise invalid(owner, rule, name)
        leaves = []
        for slot in named:
            by_table = {t: v[slot.name] for t, v in new.items() if slot.name in v}
            leaves.append(slot.replaced(by_table, stack, plan))
        # `named_slots` yields the leaves of this tree, in its order.
        tree = jax.tree.structure(state, is_leaf=_is_rows)
        result[stack.name] = tree.unflatten(leaves)
    return result


def slot_rows(state: Any, stack: StackPlan) -> dict[str, PackedRows]:
    """Maps names to slot variables. The state may hold shapes instead of arrays."""
    slots = named_slots(state, stack)
    return {slot.name: slot.leaf for slot in slots if slot.kind == "rows"}


def with_slot_rows(state: Any, rows: Mapping[str, PackedRows], stack: StackPlan) -> Any:
    leaves = [rows.get(slot.name, slot.leaf) for slot in named_slots(state, stack)]
    return jax.tree.structure(state, is_leaf=_is_rows).unflatten(leaves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedSlot:
    """A named leaf in an optimizer state.

    Attributes:
      kind: `"rows"` and `"tables"` leaves have one entry per row or table. All tables
        share `"shared"` and `"hyperparameter"` leaves.
    """

    name: str
    kind: Literal["rows", "tables", "shared", "hyperparameter"]
    leaf: Any

    def read(self, stack: StackPlan, plan: EmbeddingPlan) -> dict[str, np.ndarray]:
        if self.kind == "rows":
            return unstack_tables({stack.name: self.leaf}, plan)
        array = np.asarray(self.leaf)
        return {
            table.name: np.array(array[i] if self.kind == "tables" else array)
            for i, table in enumerate(stack.tables)
        }

    def replaced(
        self, values: Mapping[str, Any], stack: StackPlan, plan: EmbeddingPlan
    ) -> Any:
        """Replaces the values for some tables, after checking that they fit."""
        if not values:
            return self.leaf
        array = self.leaf.lines if self.kind == "rows" else self.leaf
        shape, dtype = array.shape, array.dtype
        if self.kind == "tables":
            shape = shape[1:]
        new: dict[str, np.ndarray] = {}
        for table in [table for table in stack.tables if table.name in values]:
            if self.kind == "rows":
                shape = (table.num_rows, *self.leaf.layout.row_shape)
            owner = f"values of slot {self.name!r} of table {table.name!r}"
            array = real_array(values[table.name], shape, owner)
            new[table.name] = array.astype(dtype)
            is_integer = jnp.issubdtype(dtype, np.integer)
            if is_integer and not np.array_equal(new[table.name], array):
                rule = f"be integers that {dtype} holds"
                raise invalid(owner, rule, values[table.name])
        if self.kind == "rows":
            return replace_values({stack.name: self.leaf}, new, plan)[stack.name]
        if self.kind == "tables":
            array = np.array(self.leaf)
            for i, table in enumerate(stack.tables):
                if table.name in new:
                    array[i] = new[table.name]
        else:
            assert self.kind == "shared", "set by with_hyperparameters"
            array, *others = new.values()
            if any(not np.array_equal(array, other) for other in others):
                rule = f"be equal for the tables {sorted(new)}, which share them"
                found = [value.tolist() for value in new.values()]
                raise invalid(f"values of {self.name!r}", rule, found)
        return jax.device_put(array, self.leaf.sharding)


def named_slots(state: Any, stack: StackPlan) -> Iterator[NamedSlot]:
    """Names the leaves in a stack's state, in tree order."""
    with_paths = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_rows)
    keystr = functools.partial(jax.tree_util.keystr, simple=True)
    # A state may be a single array, without a field.
    paths = [[keystr((key,)) for key in path] or ["state"] for path, _ in with_paths]
    num_tables = len(stack.tables)
    for name, path, (_, leaf) in zip(_names(paths), paths, with_paths, strict=True):
        kind = "shared"
        if _HYPERPARAMETERS.intersection(path):
            kind = "hyperparameter"
        elif _is_rows(leaf):
            kind = "rows"
        # Only rules with totals have leaves with one entry per table. In other rules, a
        # shared vector could have as many elements by chance.
        elif stack.optimizer.takes_totals and leaf.shape[:1] == (num_tables,):
            kind = "tables"
        yield NamedSlot(name=name, kind=kind, leaf=leaf)


def _names(paths: list[list[str]]) -> list[str]:
    """Shortens paths through a state pytree to unique, meaningful suffixes."""
    # For a part of a compensated sum, the name begins with the sum. For a
    # hyperparameter, it begins with the field that holds all hyperparameters.
    lengths = []
    for path in paths:
        first = len(path) - (2 if path[-1] in _PARTS_OF_A_SUM else 1)
        hyperparameters = [i for i, key in enumerate(path) if key in _HYPERPARAMETERS]
        lengths.append(len(path) - min([first, *hyperparameters]))
    return shortest_names(paths, lengths)


def shortest_names(
    paths: Sequence[Sequence[str]], lengths: Sequence[int] = ()
) -> list[str]:
    """Shortens paths to unique suffixes of at least `lengths` parts, 1 by default.

    Example:
      >>> shortest_names([("user", "kernel"), ("item", "kernel"), ("user", "bias")])
      ['user/kernel', 'item/kernel', 'bias']
    """
    lengths = lengths or [1] * len(paths)
    while True:
        names = [
            "/".join(path[-length:])
            for path, length in zip(paths, lengths, strict=True)
        ]
        longer = [
            length + (names.count(name) > 1 and length < len(path))
            for name, path, length in zip(names, paths, lengths, strict=True)
        ]
        if longer == lengths:
            return names
        lengths = longer


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, PackedRows)
