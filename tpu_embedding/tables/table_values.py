"""Converts between stacks on devices and one NumPy array per table.

Stack layouts depend on devices, stacking and packing. A table array holds the logical
rows, as the user declared them. Rows travel block by block, so the host needs little
more memory than the arrays take; see `row_stream.py`.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embedding.argument_checks import about, check_mapping, check_type, invalid
from tpu_embedding.plan.check_rows import check_stack
from tpu_embedding.plan.plan import PLAN, EmbeddingPlan, StackPlan
from tpu_embedding.rows.file_rows import file_rows_of_values, values_of_file_rows
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.line_exchange import rows_per_window
from tpu_embedding.tables.row_stream import read_blocks, write_blocks
from tpu_embedding.transfers import moves_arrays


class NotFinite:
    """Collects NaN and infinite numbers in new rows, for a single warning."""

    def __init__(self):
        self._counts: dict[str, tuple[int, int]] = {}

    def look_at(self, rows: np.ndarray, start: int, owner: str) -> None:
        """Examines rows `[rows, ...]` that begin at table row `start`."""
        if not jnp.issubdtype(rows.dtype, jnp.floating):
            return
        is_bad = ~np.isfinite(rows)
        if is_bad.any():
            row = start + int(np.argwhere(is_bad)[0, 0])
            count, row = self._counts.get(owner, (0, row))
            self._counts[owner] = count + int(is_bad.sum()), row

    def warn(self) -> None:
        if self._counts:
            counts = "; ".join(
                f"{owner} hold {count}, the first in row {row}"
                for owner, (count, row) in self._counts.items()
            )
            warnings.warn(
                f"NaN or infinite numbers were written to tables: {counts}. Lookups of "
                "these rows return them. Replace them in the source, for example with "
                "np.nan_to_num.",
                stacklevel=3,
            )


@moves_arrays
def unstack_tables(
    stacked: dict[str, PackedRows], plan: EmbeddingPlan
) -> dict[str, np.ndarray]:
    """Reads tables, or one slot variable, as NumPy arrays by table name.

    Args:
      stacked: global packed rows by stack name, either tables or one slot variable per
        stack. You can leave out stacks.
      plan: plan of the embedding layer.

    Returns:
      Arrays `[vocabulary_size, *row_shape]` by table name, in logical row order. Tables
      are float32, whatever their storage type.

    Raises:
      ValueError: if the arrays were made for another plan.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(te.FeatureConfig(table=table))
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> te.functional.unstack_tables(tables, plan)["movie"].shape
      (10, 4)
    """
    values = {}
    for stack in plan.stacks:
        if stack.name not in stacked:
            continue
        packed = stacked[stack.name]
        check_stack(packed, stack)
        layout = packed.layout
        dtype = packed.lines.dtype if layout.narrow_dtype is None else np.float32
        for table in stack.tables:
            shape = (table.num_rows, *layout.row_shape)
            values[table.name] = np.empty(shape, dtype)
        packed = _on_planned_devices(packed, stack, plan)
        # Every process returns whole tables, so each needs all blocks.
        for blocks in read_blocks(packed, stack, plan, receivers="all"):
            for table_name, start, rows in blocks:
                new = values_of_file_rows(rows, layout)
                values[table_name][start : start + len(rows)] = new
    return values


def replace_values(
    stacked: dict[str, PackedRows], values: dict[str, np.ndarray], plan: EmbeddingPlan
) -> dict[str, PackedRows]:
    """Replaces tables in the stacks. This is the inverse of `unstack_tables`.

    NaN and infinite numbers are written, with a warning that counts them. Narrow tables
    round to nearest. Values that a table can't hold raise ValueError.
    """
    known = {table.name for stack in plan.stacks for table in stack.tables}
    unknown = sorted(set(values) - known)
    if unknown:
        rule = f"name tables of the plan, {sorted(known)}"
        raise invalid("values", rule, unknown)
    result = dict(stacked)
    not_finite = NotFinite()
    for stack in plan.stacks:
        if stack.name in stacked:
            check_stack(stacked[stack.name], stack)
        new = {x.name: values[x.name] for x in stack.tables if x.name in values}
        if not new:
            continue
        if stack.name not in stacked:
            raise ValueError(
                f"stacked must contain stack {stack.name!r}, because values set its "
                f"table {next(iter(new))!r}, got stacks {sorted(stacked)}. Add that "
                "stack, or remove the table from values."
            )
        packed = stacked[stack.name]
        result[stack.name] = _with_values(packed, new, stack, plan, not_finite)
    not_finite.warn()
    return result


def check_values(values: Any, plan: EmbeddingPlan) -> None:
    line = "te.functional.with_table_values(stacked, values, plan)"
    check_type("te.functional.with_table_values: plan", PLAN, plan, line)
    name = plan.stacks[0].tables[0].name
    check_mapping("values", values, f"{{{name!r}: array}}, by table name")


def _with_values(
    packed: PackedRows,
    values: Mapping[str, Any],
    stack: StackPlan,
    plan: EmbeddingPlan,
    not_finite: NotFinite,
) -> PackedRows:
    layout, dtype = packed.layout, packed.lines.dtype
    arrays: dict[str, np.ndarray] = {}
    rows_at_once = rows_per_window(packed)
    for table in [table for table in stack.tables if table.name in values]:
        owner = f"values of table {table.name!r}"
        shape = (table.num_rows, *layout.row_shape)
        array = real_array(values[table.name], shape, owner)
        # Check all values before any is written.
        may_overflow = layout.narrow_dtype is not None or (
            jnp.issubdtype(dtype, jnp.floating) and not np.can_cast(array.dtype, dtype)
        )
        # Check in blocks, because the checks make temporaries as large as the rows.
        for start in range(0, table.num_rows, rows_at_once):
            rows = array[start : start + rows_at_once].reshape(-1, layout.dim)
            if may_overflow:
                check_range(rows, start, layout.narrow_dtype or dtype.name, owner)
            not_finite.look_at(rows, start, owner)
        arrays[table.name] = array
    packed = _on_planned_devices(packed, stack, plan)
    # `write_blocks` donates its rows, but the caller keeps the old rows.
    copy = dataclasses.replace(packed, lines=jnp.copy(packed.lines))

    def read(table: str, start: int, num_rows: int) -> np.ndarray:
        return file_rows_of_values(arrays[table][start : start + num_rows], copy)

    num_rows = {name: len(array) for name, array in arrays.items()}
    return write_blocks(copy, stack, plan, read, num_rows)


def real_array(values: Any, shape: tuple[int, ...], owner: str) -> np.ndarray:
    """Converts values to an array, and checks that they are real numbers.

    Errors name the `owner`.
    """
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise about(
            ValueError(f"{owner} must have shape {shape}: {error}"), owner, values
        ) from None
    if array.shape != shape:
        raise invalid(owner, f"have shape {shape}", array.shape)
    # NumPy does not recognize bfloat16 as a floating type.
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        raise invalid(owner, "be real numbers", array)
    return array


def check_range(rows: np.ndarray, start: int, dtype: str, owner: str) -> None:
    """Rejects rows that a narrower type cannot hold. `start` is the first row number.

    NaN and infinities are rejected only in int8 rows. In other rows, `NotFinite` warns
    about them.
    """
    if dtype == "int8":
        # The scale of a row is computed from the float32 difference between its
        # smallest and largest element. A NaN or infinity makes this difference NaN or
        # infinite.
        with np.errstate(invalid="ignore", over="ignore"):
            rows = rows.astype(np.float32, copy=False)
            ranges = rows.max(axis=1) - rows.min(axis=1)
        is_bad = ~np.isfinite(ranges)
        if is_bad.any():
            row = int(np.argmax(is_bad))
            value = float(rows[row].min()), float(rows[row].max())
            field = f"row {start + row}: {owner}"
            raise invalid(field, "be finite and have a finite range for int8", value)
        return
    largest = float(jnp.finfo(dtype).max)
    # Compare in at least float32, because the limit of bfloat16 is infinite in float16.
    rows = rows.astype(np.promote_types(rows.dtype, np.float32), copy=False)
    is_bad = np.isfinite(rows) & (np.abs(rows) > largest)
    if is_bad.any():
        row, *column = map(int, np.argwhere(is_bad)[0])
        place = f"row {start + row}" + (f", column {column[0]}" if column else "")
        rule = f"be within {largest:g} of zero for dtype {dtype}"
        raise invalid(f"{place}: {owner}", rule, rows[row, *column].item())


def _on_planned_devices(
    packed: PackedRows, stack: StackPlan, plan: EmbeddingPlan
) -> PackedRows:
    # A user's own program may have put the rows elsewhere.
    lines, sharding = packed.lines, plan.rows_sharding(stack)
    if lines.sharding.is_equivalent_to(sharding, lines.ndim):
        return packed
    return dataclasses.replace(packed, lines=jax.device_put(lines, sharding))
