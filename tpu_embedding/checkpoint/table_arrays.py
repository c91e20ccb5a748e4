"""Writes the tables and slot variables of layers to files, and reads them back.

Rows stream block by block (`tables/row_blocks.py`), so neither the devices nor the host
hold a second copy of a table. Every process writes and reads the blocks of its own
devices.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from etils import epath

from tpu_embedding.checkpoint.arrays import ArrayFile, HostBudget
from tpu_embedding.checkpoint.format import ArrayRecord, TableRecord, array_name
from tpu_embedding.checkpoint.state_parts import LayerState
from tpu_embedding.optimizers.analysis.slots import uniform_initial_values
from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.optimizers.rule_description import describe_rule
from tpu_embedding.optimizers.rules.touched_rows import without_base
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan, TrainedStackPlan
from tpu_embedding.rows.file_rows import file_row
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.row_blocks import read_blocks, write_blocks
from tpu_embedding.tables.row_windows import rows_per_window
from tpu_embedding.tables.slot_values import NamedSlot, named_slots


def table_records(layer: LayerState) -> dict[str, TableRecord]:
    """Returns the description of each table of a layer, by its name in the files."""
    records = {}
    for stack in layer.plan.stacks:
        slots = slots_of(layer, stack)
        initial = _initial_values(stack, slots)
        for table in stack.tables:
            size = table.config.vocabulary_size
            records[layer.name_of(table.name)] = TableRecord(
                vocabulary_size=size,
                dim=stack.dim,
                dtype=stack.layout.dtype_name,
                values=_rows_record(layer.tables[stack.name], size),
                slots={
                    slot.name: _slot_record(slot, size, initial.get(slot.name))
                    for slot in slots
                },
                rule=_describe(stack.optimizer) if layer.slots is not None else None,
            )
    return records


def _describe(optimizer: RowOptimizer | None) -> dict[str, Any] | None:
    if optimizer is None:
        return None
    return {
        "rows": optimizer.rows,
        "duplicates": optimizer.duplicates,
        "gradient_steps": optimizer.gradient_steps,
        **describe_rule(optimizer.transformation),
    }


def slots_of(layer: LayerState, stack: StackPlan) -> list[NamedSlot]:
    """Returns the slot variables of a stack; none if it is not trained."""
    if layer.slots is None or not isinstance(stack, TrainedStackPlan):
        return []
    return list(named_slots(layer.slots[stack.name], stack))


def _rows_record(packed: PackedRows, num_rows: int) -> ArrayRecord:
    row = file_row(packed)
    return ArrayRecord(
        shape=(num_rows, *row.shape),
        dtype=np.dtype(row.dtype).name,
        chunk_rows=min(rows_per_window(packed), num_rows),
    )


def _initial_values(
    stack: StackPlan, slots: Sequence[NamedSlot]
) -> dict[str, float | None]:
    """Returns the initial value of each slot variable, where all rows share one."""
    names = [slot.name for slot in slots if slot.kind == "rows"]
    if stack.optimizer is None or not names:
        return {}
    values = uniform_initial_values(stack.optimizer, stack.dim)
    # Some slot variables are no part of the rule's own state.
    return dict(zip(names, values, strict=True)) if len(names) == len(values) else {}


def _slot_record(slot: NamedSlot, num_rows: int, initial: float | None) -> ArrayRecord:
    if isinstance(slot.leaf, PackedRows):
        record = _rows_record(slot.leaf, num_rows)
        return dataclasses.replace(record, initial=initial)
    shape = slot.leaf.shape[1:] if slot.kind == "tables" else slot.leaf.shape
    return ArrayRecord(shape=shape, dtype=np.dtype(slot.leaf.dtype).name)


Files = Mapping[tuple[str, str | None], ArrayFile]
"""Open arrays by table of a layer and by slot; None: the values."""


def start_writing(
    layers: Sequence[LayerState],
    directory: epath.Path,
    budget: HostBudget,
) -> list[ts.Future]:
    """Reads all rows from the devices, and starts to write them.

    Returns once the rest fits in the budget; the devices' arrays may then be donated.

    Args:
      layers: of the state.
      directory: for the arrays.
      budget: for the rows that wait to be written.

    Returns:
      The ends of the writes.
    """
    futures: list[ts.Future] = []
    is_first = jax.process_index() == 0
    for layer in layers:
        files = _open_files(layer, table_records(layer), directory)
        if is_first:
            futures += [file.create() for file in files.values()]
        for stack in layer.plan.stacks:
            for slot, packed in _arrays_of_rows(layer, stack):
                for turn in read_blocks(packed, stack, layer.plan):
                    for block in turn:
                        file = files[block.table, slot]
                        futures.append(_write(file, block.rows, block.start, budget))
                    futures = _unfinished(futures)
            if is_first:
                futures += _write_shared_values(layer, stack, files)
    return futures


def _open_files(
    layer: LayerState, records: Mapping[str, TableRecord], directory: epath.Path
) -> Files:
    files = {}
    for stack in layer.plan.stacks:
        for table in stack.tables:
            name = layer.name_of(table.name)
            record = records[name]
            for slot, array in {None: record.values, **record.slots}.items():
                file = ArrayFile(directory, array_name(name, slot), array)
                files[table.name, slot] = file
    return files


def _arrays_of_rows(
    layer: LayerState, stack: StackPlan
) -> Iterator[tuple[str | None, PackedRows]]:
    yield None, layer.tables[stack.name]
    for slot in slots_of(layer, stack):
        if slot.kind == "rows":
            yield slot.name, slot.leaf


def _write(
    file: ArrayFile, rows: np.ndarray, start: int, budget: HostBudget
) -> ts.Future:
    budget.take(rows.nbytes)
    future = file.write(rows, start)
    future.add_done_callback(lambda _: budget.give_back(rows.nbytes))
    return future


def _unfinished(futures: Sequence[ts.Future]) -> list[ts.Future]:
    """Returns the writes that go on; raises the error of one that failed."""
    for future in futures:
        if future.done():
            future.result()
    return [future for future in futures if not future.done()]


def _write_shared_values(
    layer: LayerState, stack: StackPlan, files: Files
) -> list[ts.Future]:
    """Writes values of whole tables, such as counts of steps, for each table."""
    futures = []
    for slot in slots_of(layer, stack):
        if slot.kind == "rows":
            continue
        values = np.asarray(slot.leaf)
        for i, table in enumerate(stack.tables):
            of_table = values[i] if slot.kind == "tables" else values
            futures.append(files[table.name, slot.name].write(of_table))
    return futures


def restored_layer(
    layer: LayerState,
    directory: epath.Path,
    records: Mapping[str, TableRecord],
    names: Mapping[str, str],
    *,
    with_slots: bool,
) -> LayerState:
    """Returns a layer with the rows of the files. The old arrays are donated.

    Rows and tables that the files lack keep their values.

    Args:
      layer: arrays, or their shapes.
      directory: of the arrays.
      records: of the tables in the files.
      names: table of the layer to its name in the files, for those to restore.
      with_slots: True to restore slot variables, too.

    Raises:
      CheckpointError: if a chunk is damaged. Arrays of the layer are lost then.
    """
    tables, slots = dict(layer.tables), dict(layer.slots or {})
    for stack in layer.plan.stacks:
        own = {t.name: names[t.name] for t in stack.tables if t.name in names}
        reader = _Reader(directory, records, own)
        packed = _on_devices(tables[stack.name], stack, layer.plan)
        tables[stack.name] = _with_rows(packed, None, reader, stack, layer.plan)
        if stack.name not in slots:
            continue
        leaves = []
        for slot in slots_of(layer, stack):
            if slot.kind == "rows":
                leaf = _on_devices(slot.leaf, stack, layer.plan)
                if with_slots:
                    leaf = _with_rows(leaf, slot.name, reader, stack, layer.plan)
            else:
                leaf = slot.leaf
                if with_slots and own:
                    leaf = _with_shared_value(slot, reader, stack, layer.plan)
            leaves.append(leaf)
        structure = jax.tree.structure(slots[stack.name], is_leaf=_is_rows)
        slots[stack.name] = structure.unflatten(leaves)
        is_as_saved = own == {t.name: layer.name_of(t.name) for t in stack.tables}
        if with_slots and own and not is_as_saved:
            # An export has these rows under other names, or knows no record of some.
            slots[stack.name] = without_base(slots[stack.name])
    return dataclasses.replace(
        layer, tables=tables, slots=None if layer.slots is None else slots
    )


class _Reader:
    """Reads arrays of some tables of a stack."""

    def __init__(
        self,
        directory: epath.Path,
        records: Mapping[str, TableRecord],
        names: Mapping[str, str],
    ):
        self.names = names
        self._directory, self._records = directory, records

    def ranges(self) -> dict[str, tuple[int, int]]:
        """Returns the rows of each table that the files hold."""
        return {
            table: (0, self._records[name].vocabulary_size)
            for table, name in self.names.items()
        }

    def open(self, table: str, slot: str | None) -> ArrayFile:
        """Returns the array of a table or of its slot variable."""
        name = self.names[table]
        record = self._records[name]
        array = record.values if slot is None else record.slots[slot]
        return ArrayFile(self._directory, array_name(name, slot), array)


def _on_devices(
    packed: PackedRows, stack: StackPlan, plan: EmbeddingPlan
) -> PackedRows:
    """Returns zeros for shapes, and arrays as they are."""
    lines = packed.lines
    if not isinstance(lines, jax.ShapeDtypeStruct):
        return packed
    sharding = plan.rows_sharding(stack)
    zeros = jnp.zeros(lines.shape, lines.dtype, device=sharding)
    return dataclasses.replace(packed, lines=zeros)


def _with_rows(
    packed: PackedRows,
    slot: str | None,
    reader: _Reader,
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> PackedRows:
    if not reader.names:
        return packed
    files = {table: reader.open(table, slot) for table in reader.names}

    def read(table: str, start: int, num_rows: int) -> np.ndarray:
        return files[table].read(start, num_rows)

    return write_blocks(packed, stack, plan, read, reader.ranges())


def _with_shared_value(
    slot: NamedSlot, reader: _Reader, stack: StackPlan, plan: EmbeddingPlan
) -> jax.Array:
    """Returns a leaf with the values of whole tables that the files hold."""
    leaf = slot.leaf
    found = {table: reader.open(table, slot.name).read() for table in reader.names}
    if slot.kind == "tables":
        is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
        new = np.zeros(leaf.shape, leaf.dtype) if is_shape else np.array(leaf)
        for i, table in enumerate(stack.tables):
            if table.name in found:
                new[i] = found[table.name]
    else:
        new = next(iter(found.values()))
    return jax.device_put(new, getattr(leaf, "sharding", None) or plan.replicated)


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, PackedRows)
