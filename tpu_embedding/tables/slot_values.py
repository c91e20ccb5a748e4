"""Reads and sets slot variables by table and name, as NumPy arrays.

The state of an optimizer is a pytree of its own, per stack. The functions here show it
per table, under the names that users of the optimizer know: `accumulators`, `momenta`,
`mu`. `table_values.py` does the same for the tables themselves.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

import jax
import numpy as np

from tpu_embedding.argument_checks import check_mapping
from tpu_embedding.plan.plan import EmbeddingPlan, TablePlan, TrainedStackPlan
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.table_values import (
    real_array,
    replace_values,
    unstack_tables,
)

StateParts = Literal["rows", "all"]
"""`"rows"`: slot variables; `"all"`: also totals of tables, and counts of steps."""

_HYPERPARAMETERS = {"hyperparams", "hyperparams_states"}
"""Fields of `optax.inject_hyperparams`, which `with_hyperparameters` sets."""

_PARTS_OF_A_SUM = {"value", "rest"}
"""Fields of a compensated sum, which say little without the field that holds it."""


def slot_values(
    slots: Mapping[str, Any], plan: EmbeddingPlan, parts: StateParts = "rows"
) -> dict[str, dict[str, np.ndarray]]:
    """Returns the slot variables of each trained table, by table and name.

    A name is the field of the optimizer's state, such as `accumulators`, `momenta` and
    `linears` of this package's optimizers, or `mu`, `nu`, `trace` and `sum_of_squares`
    of optax. Where two fields have one name, the fields and positions around them come
    first: `0/trace` and `1/trace` in a chain of two `optax.trace`.

    Args:
      slots: stack name to optimizer state, from `init_slots`. Stacks may be missing.
      plan: plan of the embedding layer.
      parts: `"rows"` returns the slot variables, which have one entry per row. `"all"`
        also returns the rest of the state: totals of a table, such as the
        `column_accumulators` of `adafactor`, and counts of steps, which all tables of
        a stack share. Hyper-parameters are never among them.

    Returns:
      Table name to slot name to array. Slot variables are `[vocabulary_size, dim]` or
      `[vocabulary_size]`, in logical row order. Other values lack the first axis.

    Raises:
      ValueError: if `parts` is another value, or the slots were made for another plan.

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
        raise ValueError(
            f"parts must be one of {list(get_args(StateParts))}, got {parts!r}."
        )
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


def with_slot_values(
    slots: Mapping[str, Any],
    values: Mapping[str, Mapping[str, Any]],
    plan: EmbeddingPlan,
) -> dict[str, Any]:
    """Returns the optimizer's state with some slot variables replaced.

    Args:
      slots: stack name to optimizer state, from `init_slots`.
      values: table name to slot name to array, as `slot_values` returns them. Tables
        and slots may be missing; these keep their values. A count of steps belongs to
        all tables of a stack, so tables that give one must give the same.
      plan: plan of the embedding layer.

    Returns:
      The new state. Shapes, dtypes and shardings stay.

    Raises:
      TypeError: if `values`, or those of a table, are no dict.
      ValueError: if a table or slot is unknown, a value is no array of real numbers of
        its shape, or the slots were made for another plan.

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
    for of_table in values.values():
        check_mapping("values of each table", of_table, line)
    stack_of = {
        table.name: stack for stack in plan.trained_stacks for table in stack.tables
    }
    for table_name in values:
        if table_name not in stack_of or stack_of[table_name].name not in slots:
            raise ValueError(
                "values must name tables that have an optimizer and slots, "
                f"{sorted(t for t, s in stack_of.items() if s.name in slots)}, got "
                f"{table_name!r}."
            )
    result = dict(slots)
    for stack in plan.trained_stacks:
        own = {t.name: values[t.name] for t in stack.tables if t.name in values}
        if own:
            result[stack.name] = _with_values(slots[stack.name], own, stack, plan)
    return result


def slot_rows(state: Any, stack: TrainedStackPlan) -> dict[str, PackedRows]:
    """Returns the slot variables of one stack by name, see `slot_values`.

    Args:
      state: optimizer state of the stack, arrays or their shapes.
      stack: the stack.
    """
    slots = named_slots(state, stack)
    return {slot.name: slot.leaf for slot in slots if slot.kind == "rows"}


def with_slot_rows(
    state: Any, rows: Mapping[str, PackedRows], stack: TrainedStackPlan
) -> Any:
    """Returns the state of one stack with some slot variables replaced.

    Args:
      state: optimizer state of the stack.
      rows: new slot variables by name, as `slot_rows` returns them.
      stack: the stack.
    """
    leaves = [rows.get(slot.name, slot.leaf) for slot in named_slots(state, stack)]
    return jax.tree.structure(state, is_leaf=_is_rows).unflatten(leaves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedSlot:
    """A named leaf of an optimizer's state.

    Attributes:
      name: see `slot_values`.
      kind: one entry per row; one per table of the stack; or shared by its tables, as
        counts and the hyper-parameters of `optax.inject_hyperparams` are.
      leaf: packed rows, or an array.
    """

    name: str
    kind: Literal["rows", "tables", "shared", "hyperparameter"]
    leaf: Any

    def read(
        self, stack: TrainedStackPlan, plan: EmbeddingPlan
    ) -> dict[str, np.ndarray]:
        """Returns the value of each table."""
        if self.kind == "rows":
            return unstack_tables({stack.name: self.leaf}, plan)
        array = np.asarray(self.leaf)
        return {
            table.name: np.array(array[i] if self.kind == "tables" else array)
            for i, table in enumerate(stack.tables)
        }

    def replaced(
        self, values: dict[str, Any], stack: TrainedStackPlan, plan: EmbeddingPlan
    ) -> Any:
        """Returns the leaf with the values of some tables replaced."""
        if not values:
            return self.leaf
        new = {
            table.name: _checked(
                values[table.name], self._spec(table), table.name, self.name
            )
            for table in stack.tables
            if table.name in values
        }
        if self.kind == "rows":
            return replace_values({stack.name: self.leaf}, new, plan)[stack.name]
        array = np.array(self.leaf)
        if self.kind == "shared":
            first, *others = new.values()
            if any(not np.array_equal(first, other) for other in others):
                raise ValueError(
                    f"values of {self.name!r} must be equal for the tables "
                    f"{sorted(new)}, because they share an optimizer state, got "
                    f"{ {name: x.tolist() for name, x in new.items()} }."
                )
            array = first
        else:
            for i, table in enumerate(stack.tables):
                if table.name in new:
                    array[i] = new[table.name]
        return jax.device_put(array, self.leaf.sharding)

    def _spec(self, table: TablePlan) -> jax.ShapeDtypeStruct:
        """Returns shape and dtype of the value of a table."""
        if self.kind == "rows":
            shape = (table.num_rows, *self.leaf.layout.row_shape)
            return jax.ShapeDtypeStruct(shape, self.leaf.lines.dtype)
        shape = self.leaf.shape[1:] if self.kind == "tables" else self.leaf.shape
        return jax.ShapeDtypeStruct(shape, self.leaf.dtype)


def _with_values(
    state: Any,
    values: dict[str, Mapping[str, Any]],
    stack: TrainedStackPlan,
    plan: EmbeddingPlan,
) -> Any:
    """Returns the state of one stack with the values of some tables replaced."""
    named = list(named_slots(state, stack))
    known = [slot.name for slot in named if slot.kind != "hyperparameter"]
    for table_name, of_table in values.items():
        for name in of_table:
            if name not in known:
                raise ValueError(
                    f"values of table {table_name!r} must name parts of the state of "
                    f"its optimizer, {sorted(known)}, got {name!r}."
                )
    leaves = [
        slot.replaced(
            {
                table_name: of_table[slot.name]
                for table_name, of_table in values.items()
                if slot.name in of_table
            },
            stack,
            plan,
        )
        for slot in named
    ]
    return jax.tree.structure(state, is_leaf=_is_rows).unflatten(leaves)


def named_slots(state: Any, stack: TrainedStackPlan) -> Iterator[NamedSlot]:
    """Yields the named leaves of the state of one stack, in their order."""
    leaves = jax.tree.leaves(state, is_leaf=_is_rows)
    num_tables = len(stack.tables)
    paths = _paths(state)
    for name, path, leaf in zip(_names(paths), paths, leaves, strict=True):
        kind = "shared"
        if _HYPERPARAMETERS.intersection(path):
            kind = "hyperparameter"
        elif _is_rows(leaf):
            kind = "rows"
        elif stack.optimizer.takes_totals and leaf.shape[:1] == (num_tables,):
            kind = "tables"
        yield NamedSlot(name=name, kind=kind, leaf=leaf)


def _paths(state: Any) -> list[list[str]]:
    """Returns the fields, keys and positions around each leaf of a state."""
    keystr = functools.partial(jax.tree_util.keystr, simple=True)
    # A state may be one array, without a field.
    return [
        [keystr((key,)) for key in path] or ["state"]
        for path, _ in jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_rows)
    ]


def _names(paths: list[list[str]]) -> list[str]:
    """Returns the shortest end of each path that no other one shares."""
    lengths = [_shortest(parts) for parts in paths]
    while True:
        names = [
            "/".join(parts[-length:])
            for parts, length in zip(paths, lengths, strict=True)
        ]
        longer = [
            length + (names.count(name) > 1 and length < len(parts))
            for name, parts, length in zip(names, paths, lengths, strict=True)
        ]
        if longer == lengths:
            return names
        lengths = longer


def _shortest(parts: list[str]) -> int:
    """Returns how many parts a name needs to say anything."""
    for i, part in enumerate(parts):
        if part in _HYPERPARAMETERS:
            return len(parts) - i
    return 2 if parts[-1] in _PARTS_OF_A_SUM else 1


def _checked(
    value: Any, old: jax.ShapeDtypeStruct, table_name: str, name: str
) -> np.ndarray:
    """Returns a new value with the dtype of the old one.

    Raises:
      ValueError: if it is no array of real numbers of the shape, or loses a fraction.
    """
    owner = f"values of slot {name!r} of table {table_name!r}"
    array = real_array(value, old.shape, owner)
    new = array.astype(old.dtype)
    is_int = jax.numpy.issubdtype(old.dtype, np.integer)
    if is_int and not np.array_equal(new, array):
        raise ValueError(
            f"{owner} must be integers of dtype {old.dtype}, got other values."
        )
    return new


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, PackedRows)
