"""Rejects arrays that were made for another plan.

Arrays of two plans can have equal shapes. A lookup would then read the rows of another
table without an error, so every public function checks its arrays first. The check
reads static facts only, and costs nothing under `jit`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer

from tpu_embedding.plan.plan import StackPlan, TrainedStackPlan
from tpu_embedding.rows.packed_rows import PackedRows, RowLayout


def check_tables(tables: Any, stacks: Sequence[StackPlan]) -> None:
    """Raises unless `tables` holds the rows of every stack.

    Args:
      tables: stack name to packed rows. It may have more stacks.
      stacks: stacks of the plan.

    Raises:
      TypeError: if `tables` is not a mapping of packed rows.
      ValueError: if a stack is missing, or its rows have other places than in the plan;
        or if arithmetic on packed narrow rows changed their dtype.
    """
    for stack in stacks:
        rows = _entry("tables", tables, stack, "init_tables")
        if not isinstance(rows, PackedRows):
            raise TypeError(
                f"tables[{stack.name!r}] must be PackedRows from init_tables, got "
                f"{type(rows).__name__}. Set single tables by with_table_values."
            )
        _check_layout(f"tables[{stack.name!r}]", rows.layout, stack.layout)
        _check_words(f"tables[{stack.name!r}]", rows, stack)


def check_slots(slots: Any, stacks: Sequence[TrainedStackPlan]) -> None:
    """Raises unless `slots` holds the optimizer state of every stack.

    Args:
      slots: stack name to optimizer state. It may have more stacks.
      stacks: stacks of the plan.

    Raises:
      TypeError: if `slots` is not a mapping.
      ValueError: if a stack is missing, or its slot variables belong to other tables.
    """
    for stack in stacks:
        state = _entry("slots", slots, stack, "init_slots")
        leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, PackedRows))
        layouts = [leaf.layout for leaf in leaves if isinstance(leaf, PackedRows)]
        if len(layouts) != len(stack.slots):
            raise ValueError(
                f"slots[{stack.name!r}] must hold {len(stack.slots)} slot variables, "
                f"got {len(layouts)}; use the slots that init_slots made for this plan."
            )
        for layout in layouts:
            _check_rows_of(f"slots[{stack.name!r}]", layout, stack)


def check_stack(rows: PackedRows, stack: StackPlan) -> None:
    """Raises unless the host reads or sets rows that were made for a stack.

    Args:
      rows: rows of a table, or of a slot variable.
      stack: stack of the plan.

    Raises:
      TypeError: if `jax.jit` traces the rows, which then lack values.
      ValueError: if they have other places than in the plan.
    """
    if isinstance(rows.lines, Tracer):
        names = [table.name for table in stack.tables]
        raise TypeError(
            "The values of tables are read and set on the host, which a function under "
            f"jax.jit or nnx.jit cannot do, got traced values of the tables {names}. "
            "Call the method outside of jit, such as layer.embedding_tables() after "
            "the step. Inside of it, layer(ids) looks rows up."
        )
    _check_rows_of(f"stacked[{stack.name!r}]", rows.layout, stack)
    _check_words(f"stacked[{stack.name!r}]", rows, stack)


def _check_words(owner: str, rows: PackedRows, stack: StackPlan) -> None:
    """Raises if arithmetic made numbers of the words that narrow rows share."""
    layout = rows.layout
    if layout.narrow_dtype is None or rows.lines.dtype == layout.stored_dtype:
        return
    names = [table.name for table in stack.tables]
    raise ValueError(
        f"{owner} must hold the int32 words that {layout.narrow_dtype} rows are packed "
        f"in, got {rows.lines.dtype} for the tables {names}. Arithmetic on words, such "
        "as an average by jax.tree.map or optax.incremental_update, doesn't give rows, "
        "even if the result is cast back to int32. Average the float32 values: "
        "layer.embedding_tables() or unstack_tables reads them, and "
        "layer.set_embedding_tables or with_table_values sets them."
    )


def _check_rows_of(owner: str, layout: RowLayout, stack: StackPlan) -> None:
    """Raises if rows belong to other tables than a stack's, or differ in number.

    Rows of a slot variable may be shorter than the table's, and are in lines of their
    own.
    """
    comparable = dataclasses.replace(
        stack.layout, contents=layout.contents, num_rows=layout.num_rows
    )
    _check_layout(owner, comparable, stack.layout)


def _entry(what: str, arrays: Any, stack: StackPlan, maker: str) -> Any:
    if not isinstance(arrays, Mapping):
        raise TypeError(
            f"{what} must map stack names to the arrays of {maker}, got "
            f"{type(arrays).__name__}."
        )
    if stack.name not in arrays:
        names = [table.name for table in stack.tables]
        raise ValueError(
            f"{what} must hold stack {stack.name!r} with the tables {names}, got the "
            f"stacks {sorted(arrays)}; use the {what} that {maker} made for this plan."
        )
    return arrays[stack.name]


def _check_layout(owner: str, layout: RowLayout, planned: RowLayout) -> None:
    """Raises if the rows of an array have other places than in the plan."""
    if layout == planned or layout.facts == planned.facts:
        return
    only_array = [fact for fact in layout.facts if fact not in planned.facts]
    only_plan = [fact for fact in planned.facts if fact not in layout.facts]
    # The first fact is about shards, if they differ, and the last about tables.
    listed = "; ".join(
        f"the {name} has {' and '.join(dict.fromkeys(facts[:1] + facts[-1:]))}"
        for name, facts in (("array", only_array), ("plan", only_plan))
        if facts
    )
    raise ValueError(
        f"{owner} was made for another plan: {listed}. Use the same plan, or move "
        "tables with unstack_tables and with_table_values."
    )
