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

from tpu_embedding.checkpoint.arrays import OpenCheckpoint, SavedArray
from tpu_embedding.checkpoint.dynamic_tables import (
    CLOCK,
    ID_ARRAYS,
    place_saved_ids,
    restored_directory,
    rows_of_sources,
)
from tpu_embedding.checkpoint.layer_tables import slots_of
from tpu_embedding.checkpoint.records import TableRecord, errors_of_reading
from tpu_embedding.checkpoint.split_state import LayerState
from tpu_embedding.dynamic.directory import directory_name, dynamic_tables
from tpu_embedding.dynamic.ids_on_host import PlacedIds
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.stack_plan import StackPlan
from tpu_embedding.rows.file_rows import decode_int8, file_row
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

    def verify(self, checkpoint: OpenCheckpoint, turn: int, num_turns: int) -> None:
        """Reads all chunks once, before any array of the layer is donated.

        Args:
          checkpoint: the checkpoint, whose threads read.
          turn: number of the process.
          num_turns: processes that share the work.

        Raises:
          CheckpointError: if a chunk is missing or damaged, or is another save's.
        """
        parts = [
            (array, index) for array in self.arrays.values() for index in array.parts()
        ]
        reads = [
            checkpoint.threads.submit(array.verify, index)
            for array, index in parts[turn::num_turns]
        ]
        for read in reads:
            read.result()


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
                assert dynamic is not None, "static tables were rejected"
                with errors_of_reading(f"The saved ids of table {table!r}"):
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
        reader = _StackReader(saved, placed, stack, layer.plan)
        tables[stack.name] = reader.with_rows(layer.tables[stack.name], None)
        if not stack.vocabulary.ids_are_rows:
            clocks = {
                x: int(of.read()) for x, of in saved.of_stack(stack, CLOCK).items()
            }
            directory = restored_directory(layer, stack, placed, clocks)
            tables[directory_name(stack.name)] = directory
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
        reader = _StackReader(saved, placed, stack, layer.plan)
        leaves = [
            reader.with_rows(slot.leaf, slot.name)
            if slot.kind == "rows"
            else reader.with_shared_value(slot)
            for slot in slots_of(layer, stack)
        ]
        structure = jax.tree.structure(slots[stack.name], is_leaf=_is_rows)
        slots[stack.name] = structure.unflatten(leaves)
    return dataclasses.replace(layer, slots=slots)


@dataclasses.dataclass(frozen=True)
class _StackReader:
    """Reads saved tables and slot variables into the arrays of a stack."""

    saved: SavedTables
    placed: Mapping[str, PlacedIds]
    stack: StackPlan
    plan: EmbeddingPlan

    def with_rows(self, packed: PackedRows, slot: str | None) -> PackedRows:
        """Returns the rows of a table or slot variable; shapes become zeros first."""
        shape = packed.lines
        if isinstance(shape, jax.ShapeDtypeStruct):
            sharding = self.plan.rows_sharding(self.stack)
            zeros = jnp.zeros(shape.shape, shape.dtype, device=sharding)
            packed = dataclasses.replace(packed, lines=zeros)
        arrays = self.saved.of_stack(self.stack, slot)
        dtype = None if slot is not None else file_row(packed).dtype

        def read(table: str, start: int, num_rows: int) -> np.ndarray:
            rows = arrays[table].read(slice(start, start + num_rows))
            return self._converted(rows, table, dtype)

        sizes = {x: self.saved.records[x].vocabulary_size for x in arrays}
        if self.stack.vocabulary.ids_are_rows and arrays:
            ranges = {table: (0, size) for table, size in sizes.items()}
            return write_blocks(packed, self.stack, self.plan, read, ranges)
        for table, size in sizes.items():
            rows, sources = read(table, 0, size), self.placed[table].sources

            def gather(_: str, start: int, n: int, rows=rows, sources=sources):
                return rows_of_sources(rows, sources[start : start + n])

            ranges = {table: (0, len(sources))}
            packed = write_blocks(packed, self.stack, self.plan, gather, ranges)
        return packed

    def _converted(self, rows: np.ndarray, table: str, dtype: Any) -> np.ndarray:
        """Returns rows of a table in the type of the stack; None: as they are."""
        saved = self.saved.records[table].dtype
        if dtype is None or saved == self.stack.layout.dtype_name:
            return rows
        return np.asarray(decode_int8(rows) if saved == "int8" else rows, dtype)

    def with_shared_value(self, slot: NamedSlot) -> jax.Array:
        """Returns a leaf with the saved values of whole tables."""
        leaf, arrays = slot.leaf, self.saved.of_stack(self.stack, slot.name)
        if not arrays:
            return leaf
        found = {table: array.read() for table, array in arrays.items()}
        new = next(iter(found.values()))  # `shared_differences` finds different ones.
        if slot.kind == "tables":
            is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
            new = np.zeros(leaf.shape, leaf.dtype) if is_shape else np.array(leaf)
            for i, table in enumerate(self.stack.tables):
                new[i] = found.get(table.name, new[i])
        sharding = getattr(leaf, "sharding", None) or self.plan.replicated
        return jax.device_put(new, sharding)


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, PackedRows)
