"""Rejects arrays that were made for another plan.

Arrays for different plans can have equal shapes, and then a lookup would silently read
wrong rows. So public functions check layouts first, which costs nothing under `jit`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer

from tpu_embedding.argument_checks import about, invalid
from tpu_embedding.plan.plan import StackPlan
from tpu_embedding.rows.packed_rows import PackedRows, RowLayout


def check_tables(tables: Any, stacks: Sequence[StackPlan]) -> None:
    """Checks that `tables` holds the rows of every stack. It may hold more."""
    for stack in stacks:
        owner, rows = _entry("tables", tables, stack, "init_tables")
        if not isinstance(rows, PackedRows):
            rule = "be PackedRows from init_tables"
            fix = "Use with_table_values for single tables."
            raise invalid(owner, rule, rows, fix, TypeError)
        _check_layout(owner, rows.layout, stack.layout)
        _check_words(owner, rows, stack)


def check_slots(slots: Any, stacks: Sequence[StackPlan]) -> None:
    """Checks that `slots` holds the state of every stack. It may hold more."""
    for stack in stacks:
        owner, state = _entry("slots", slots, stack, "init_slots")
        # By default, JAX would also flatten `PackedRows`, and lose their layouts.
        leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, PackedRows))
        layouts = [leaf.layout for leaf in leaves if isinstance(leaf, PackedRows)]
        if len(layouts) != len(stack.slots):
            rule = f"hold {len(stack.slots)} variables"
            fix = "Use the slots that init_slots made for this plan."
            raise invalid(owner, rule, len(layouts), fix)
        for layout in layouts:
            _check_rows_of(owner, layout, stack)


def check_stack(rows: PackedRows, stack: StackPlan) -> None:
    """Checks rows, or a slot variable, that the host will read or set."""
    if isinstance(rows.lines, Tracer):
        names = [table.name for table in stack.tables]
        raise TypeError(
            "Table values can't be read or set inside jax.jit or nnx.jit, got traced "
            f"values of the tables {names}. Call the method outside of jit, such as "
            "layer.embedding_tables() after the step. Inside jit, use layer(ids)."
        )
    _check_rows_of(f"stacked[{stack.name!r}]", rows.layout, stack)
    _check_words(f"stacked[{stack.name!r}]", rows, stack)


def _check_words(owner: str, rows: PackedRows, stack: StackPlan) -> None:
    layout = rows.layout
    # Arithmetic on packed words, such as a moving average, makes them floats. A lookup
    # would fail on these lines with an unrelated error.
    if layout.narrow_dtype is None or rows.lines.dtype == layout.stored_dtype:
        return
    names = [table.name for table in stack.tables]
    raise invalid(
        owner,
        f"hold {layout.narrow_dtype} rows of the tables {names} packed in int32 words",
        rows.lines,
        "Arithmetic, such as jax.tree.map or optax.incremental_update, doesn't work on "
        "packed words, even if the result is cast back to int32. Average the float32 "
        "values: read them with layer.embedding_tables() or unstack_tables, and set "
        "them with layer.set_embedding_tables or with_table_values.",
    )


def _check_rows_of(owner: str, layout: RowLayout, stack: StackPlan) -> None:
    # Slot variables may have shorter rows than the table, packed in their own lines, so
    # only the tables and row counts must match.
    comparable = dataclasses.replace(
        stack.layout, contents=layout.contents, num_rows=layout.num_rows
    )
    _check_layout(owner, comparable, stack.layout)


def _entry(what: str, arrays: Any, stack: StackPlan, maker: str) -> tuple[str, Any]:
    """Finds the entry for a stack, and names it for errors."""
    if not isinstance(arrays, Mapping):
        rule = f"map stack names to the arrays of {maker}"
        raise invalid(what, rule, arrays, kind=TypeError)
    if stack.name not in arrays:
        names = [table.name for table in stack.tables]
        rule = f"hold stack {stack.name!r} with the tables {names}"
        fix = f"Use the {what} that {maker} made for this plan."
        raise invalid(what, rule, sorted(arrays), fix)
    return f"{what}[{stack.name!r}]", arrays[stack.name]


def _check_layout(owner: str, layout: RowLayout, planned: RowLayout) -> None:
    # Layouts with equal facts have equal rows in equal lanes, even if fields differ.
    if layout == planned or layout.facts == planned.facts:
        return
    only_array = [fact for fact in layout.facts if fact not in planned.facts]
    only_plan = [fact for fact in planned.facts if fact not in layout.facts]
    # If shards differ, the first fact is about shards. The last fact is about tables.
    listed = "; ".join(
        f"the {name} has {' and '.join(dict.fromkeys(facts[:1] + facts[-1:]))}"
        for name, facts in (("array", only_array), ("plan", only_plan))
        if facts
    )
    text = f"{owner} was made for another plan: {listed}. Use the same plan, or move "
    text += "tables with unstack_tables and with_table_values."
    raise about(ValueError(text), owner, layout.facts)
