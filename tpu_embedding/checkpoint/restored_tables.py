"""Reads the tables and slot variables of a checkpoint into a layer.

Rows stream block by block into the arrays of the layer, which are donated
(`tables/row_stream.py`). Every process reads the blocks of its own devices. Of dynamic
tables, the host of each process holds one whole array at a time.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embedding.checkpoint.arrays import SavedArray
from tpu_embedding.checkpoint.dynamic_tables import (
    CLOCK,
    ID_ARRAYS,
    place_saved_ids,
    restored_directory,
)
from tpu_embedding.checkpoint.layer_tables import slots_of
from tpu_embedding.checkpoint.records import TableRecord
from tpu_embedding.checkpoint.split_state import LayerState
from tpu_embedding.functional.placed_ids import PlacedIds
from tpu_embedding.plan.dynamic_rows import dynamic_tables
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.stack_plan import StackPlan
from tpu_embedding.rows.file_rows import decode_int8, file_row
from tpu_embedding.rows.id_directory import directory_name
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.row_stream import write_blocks
from tpu_embedding.tables.slot_values import NamedSlot


@dataclasses.dataclass(frozen=True)
class SavedTables:
    """The tables of a checkpoint that a layer takes over.

    Attributes:
      records: name of a table of the layer to its description in the checkpoint.
      arrays: arrays that are taken over, by name of a table of the layer and of a slot
        variable or array of a directory; None: the values.
    """

    records: Mapping[str, TableRecord]
    arrays: Mapping[tuple[str, str | None], SavedArray]

    def of_stack(self, stack: StackPlan, slot: str | None) -> dict[str, SavedArray]:
        """Returns an array of each table of a stack that has it.

        Args:
          stack: stack of the layer.
          slot: name of the array in the layer; None: values of the tables.
        """
        names = [table.name for table in stack.tables]
        return {x: self.arrays[x, slot] for x in names if (x, slot) in self.arrays}

    def check_files(self) -> None:
        """Opens all arrays, before any array of the layer changes.

        Raises:
          CheckpointError: if an array is missing, or is not the saved one.
        """
        for array in self.arrays.values():
            array.opened()


def placed_ids(layer: LayerState, saved: SavedTables) -> dict[str, PlacedIds]:
    """Returns the places of the saved ids of each dynamic table of a layer.

    It warns of ids that have none.
    """
    placed = {}
    for stack in layer.plan.stacks:
        arrays = {name: saved.of_stack(stack, name) for name in ID_ARRAYS}
        for member in dynamic_tables(stack):
            table = member.table.name
            if table in saved.records:
                found = {x: of[table].read() for x, of in arrays.items() if table in of}
                dynamic = saved.records[table].dynamic
                assert dynamic is not None, "static tables are refused"
                placed[table] = place_saved_ids(found, dynamic["capacity"], member)
    left_out = ", ".join(
        f"{x.num_left_out} of {x.num_left_out + len(x.kept)} of table {table!r}"
        for table, x in placed.items()
        if x.num_left_out
    )
    if left_out:
        warnings.warn(
            "Ids of the checkpoint whose buckets are full are left out, the least "
            f"valuable first: {left_out}. A capacity that is a multiple of the saved "
            "one keeps all ids.",
            stacklevel=2,
        )
    return placed


def restored_tables(
    layer: LayerState, saved: SavedTables, placed: Mapping[str, PlacedIds]
) -> LayerState:
    """Returns a layer with the saved rows. The old tables are donated.

    Rows and tables that the checkpoint lacks keep their values.

    Args:
      layer: arrays, or their shapes.
      saved: tables of the checkpoint.
      placed: from `placed_ids`.

    Raises:
      CheckpointError: if a chunk is damaged. Arrays of the layer are lost then.
    """
    tables = {}
    for stack in layer.plan.stacks:
        packed = _on_devices(layer.tables[stack.name], stack, layer.plan)
        tables[stack.name] = _with_rows(packed, None, saved, placed, stack, layer.plan)
        if stack.is_dynamic:
            name = directory_name(stack.name)
            clocks = {
                table: int(array.read())
                for table, array in saved.of_stack(stack, CLOCK).items()
            }
            tables[name] = restored_directory(layer, stack, placed, clocks)
    return dataclasses.replace(layer, tables=tables)


def restored_slots(
    layer: LayerState, saved: SavedTables, placed: Mapping[str, PlacedIds]
) -> LayerState:
    """Returns a layer with the saved slot variables; the old ones are donated.

    Rows, tables and slot variables that the checkpoint lacks keep their values.

    Args:
      layer: arrays, or their shapes.
      saved: tables of the checkpoint.
      placed: from `placed_ids`.

    Raises:
      CheckpointError: if a chunk is damaged. Arrays of the layer are lost then.
    """
    slots = dict(layer.slots or {})
    for stack in layer.plan.stacks:
        if stack.name not in slots:
            continue
        leaves = []
        for slot in slots_of(layer, stack):
            if slot.kind == "rows":
                leaf = _on_devices(slot.leaf, stack, layer.plan)
                leaf = _with_rows(leaf, slot.name, saved, placed, stack, layer.plan)
            else:
                leaf = _with_shared_value(slot, saved, stack, layer.plan)
            leaves.append(leaf)
        structure = jax.tree.structure(slots[stack.name], is_leaf=_is_rows)
        slots[stack.name] = structure.unflatten(leaves)
    return dataclasses.replace(layer, slots=slots)


def _on_devices(
    packed: PackedRows, stack: StackPlan, plan: EmbeddingPlan
) -> PackedRows:
    """Returns zeros for shapes, and arrays as they are."""
    if not isinstance(packed.arrays[0], jax.ShapeDtypeStruct):
        return packed
    sharding = plan.rows_sharding(stack)
    return packed.with_arrays(
        [jnp.zeros(x.shape, x.dtype, device=sharding) for x in packed.arrays]
    )


def _with_rows(
    packed: PackedRows,
    slot: str | None,
    saved: SavedTables,
    placed: Mapping[str, PlacedIds],
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> PackedRows:
    arrays = saved.of_stack(stack, slot)
    if not arrays:
        return packed
    row_dtype = file_row(packed).dtype

    def read(table: str, start: int, num_rows: int) -> np.ndarray:
        rows = arrays[table].read(slice(start, start + num_rows))
        dtype = saved.records[table].dtype
        if slot is not None or dtype == stack.layout.dtype_name:
            return rows
        return np.asarray(decode_int8(rows) if dtype == "int8" else rows, row_dtype)

    if not stack.is_dynamic:
        ranges = {table: (0, saved.records[table].vocabulary_size) for table in arrays}
        return write_blocks(packed, stack, plan, read, ranges)
    for table in arrays:
        rows = read(table, 0, saved.records[table].vocabulary_size)
        packed = _with_placed_rows(packed, table, rows, placed[table], stack, plan)
    return packed


def _with_placed_rows(
    packed: PackedRows,
    table: str,
    saved_rows: np.ndarray,
    placed: PlacedIds,
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> PackedRows:
    """Returns the rows of a dynamic table; those without an id are zeros."""

    def read(_: str, start: int, num_rows: int) -> np.ndarray:
        sources = placed.sources[start : start + num_rows]
        rows = np.zeros((num_rows, *saved_rows.shape[1:]), saved_rows.dtype)
        rows[sources >= 0] = saved_rows[sources[sources >= 0]]
        return rows

    ranges = {table: (0, len(placed.sources))}
    return write_blocks(packed, stack, plan, read, ranges)


def _with_shared_value(
    slot: NamedSlot, saved: SavedTables, stack: StackPlan, plan: EmbeddingPlan
) -> jax.Array:
    """Returns a leaf with the saved values of whole tables."""
    leaf = slot.leaf
    found = {x: of.read() for x, of in saved.of_stack(stack, slot.name).items()}
    if not found:
        return leaf
    new = next(iter(found.values()))  # `shared_differences` refuses different ones.
    if slot.kind == "tables":
        is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
        new = np.zeros(leaf.shape, leaf.dtype) if is_shape else np.array(leaf)
        for i, table in enumerate(stack.tables):
            if table.name in found:
                new[i] = found[table.name]
    return jax.device_put(new, getattr(leaf, "sharding", None) or plan.replicated)


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, PackedRows)
