"""Writes the tables and slot variables of layers to files, and reads them back.

Rows stream block by block (`tables/row_stream.py`), so neither the devices nor the host
hold a second copy of a table. Every process writes and reads the blocks of its own
devices. Dynamic tables are the exception: the host of each process holds one whole
array of a stack at a time.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from etils import epath

from tpu_embedding.checkpoint.arrays import ArrayFile, HostBudget
from tpu_embedding.checkpoint.dynamic_tables import (
    ID_ARRAYS,
    PlacedIds,
    dynamic_fields,
    num_saved_rows,
    place_ids,
    restored_directory,
    saved_ids,
    warn_of_ids_left_out,
)
from tpu_embedding.checkpoint.format import (
    DIRECTORY_ARRAY,
    ArrayRecord,
    TableRecord,
    array_name,
)
from tpu_embedding.checkpoint.split_state import LayerState
from tpu_embedding.optimizers.analysis.initial_slots import initial_slot_values
from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.optimizers.rule_description import describe_rule
from tpu_embedding.plan.dynamic_rows import dynamic_tables
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.stack_plan import StackPlan, TrainedStackPlan
from tpu_embedding.rows.file_rows import decode_int8, file_row
from tpu_embedding.rows.id_directory import directory_name
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.row_stream import read_blocks, write_blocks
from tpu_embedding.tables.row_windows import rows_per_window
from tpu_embedding.tables.slot_values import NamedSlot, named_slots
from tpu_embedding.tables.table_values import unstack_tables

_MAX_PADDING: Final = 1 / 128
"""Bound on the padding of the last chunk, as a share of the array's rows."""


def table_records(layer: LayerState) -> dict[str, TableRecord]:
    """Returns the description of each table of a layer, by its name in the files."""
    records = {}
    for stack in layer.plan.stacks:
        slots = slots_of(layer, stack)
        initial = initial_row_values(stack, slots)
        for table in stack.tables:
            if stack.is_dynamic:
                size = num_saved_rows(layer, stack, table)
            else:
                size = table.config.max_rows
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
                **dynamic_fields(table, size),
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
        chunk_rows=_chunk_rows(rows_per_window(packed), num_rows),
    )


def _chunk_rows(block_rows: int, num_rows: int) -> int:
    """Returns the rows of a chunk: all, or a power of two that divides a block's.

    All chunks of an array have one size in its files. The last one is filled up with
    zeros, so chunks are smaller where it would be larger than its share.
    """
    if num_rows <= block_rows:
        return max(1, num_rows)
    size = block_rows
    while size > 1 and -num_rows % size > _MAX_PADDING * num_rows:
        size //= 2
    return size


def initial_row_values(
    stack: StackPlan, slots: Sequence[NamedSlot]
) -> dict[str, float | None]:
    """Returns the initial value of each slot variable, where all rows share one."""
    names = [slot.name for slot in slots if slot.kind == "rows"]
    if stack.optimizer is None or not names:
        return {}
    values = initial_slot_values(stack.optimizer, stack.dim)
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
      layers: the embedding layers of the state.
      directory: gets the arrays.
      budget: bounds the rows that wait to be written.

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
            if stack.is_dynamic:
                futures += _write_dynamic(layer, stack, files, budget)
            streamed = () if stack.is_dynamic else _arrays_of_rows(layer, stack)
            for slot, packed in streamed:
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
    return {
        (table, slot): ArrayFile(directory, array_name(name, slot), array)
        for table, name in layer.names.items()
        for slot, array in records[name].arrays.items()
    }


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


def _write_dynamic(
    layer: LayerState, stack: StackPlan, files: Files, budget: HostBudget
) -> list[ts.Future]:
    """Writes the ids of dynamic tables, and their rows in the order of the ids.

    Each process has whole tables on its host for that time, and the first one writes.
    """
    futures: list[ts.Future] = []
    is_first = jax.process_index() == 0
    saved = saved_ids(layer, stack)
    for table, ids in saved.items() if is_first else ():
        for name, array in ids.arrays.items():
            # A copy: the next step may donate what the view of an array shows.
            futures.append(files[table, name].write(np.array(array)))
    for slot, packed in _arrays_of_rows(layer, stack):
        row = file_row(packed)
        values = unstack_tables({stack.name: packed}, layer.plan)
        for table, ids in saved.items() if is_first else ():
            rows = values[table][ids.rows].astype(row.dtype, copy=False)
            futures.append(_write(files[table, slot], rows, 0, budget))
        futures = _unfinished(futures)
    return futures


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


@dataclasses.dataclass(frozen=True)
class SavedTables:
    """The tables in the files that a layer takes over.

    Attributes:
      directory: directory of the arrays.
      records: descriptions of the tables, by their name in the files.
      names: name of a table of the layer to its name in the files.
      slots: name of a table of the layer to its slot variables that are taken over;
        each has the name that it has in the files. Empty without slot variables.
    """

    directory: epath.Path
    records: Mapping[str, TableRecord]
    names: Mapping[str, str]
    slots: Mapping[str, Mapping[str, str]]

    def open(self, stack: StackPlan, slot: str | None) -> dict[str, ArrayFile]:
        """Returns the array of each table of a stack that the files hold.

        Args:
          stack: stack of the layer.
          slot: name of a slot variable in the layer; None: values of the tables.
        """
        files = {}
        for table in (table.name for table in stack.tables if table.name in self.names):
            name, slots = self.names[table], self.slots.get(table, {})
            if slot is None:
                saved, array = None, self.records[name].values
            elif slot.startswith(DIRECTORY_ARRAY):
                if slot not in self.records[name].directory:
                    continue
                saved, array = slot, self.records[name].directory[slot]
            elif slot in slots:
                saved, array = slots[slot], self.records[name].slots[slots[slot]]
            else:
                continue
            files[table] = ArrayFile(self.directory, array_name(name, saved), array)
        return files

    def array_names(self) -> Iterator[str]:
        """Yields the name of each array that is taken over."""
        for table, name in self.names.items():
            directory = self.records[name].directory
            for slot in (None, *self.slots.get(table, {}).values(), *directory):
                yield array_name(name, slot)

    def lacks_slots(self, layer: LayerState) -> bool:
        """Returns True if a table of a layer has slot variables of no saved array."""
        wanted = table_records(layer)
        return any(
            set(wanted[layer.name_of(table)].slots) - set(self.slots.get(table, {}))
            for table in self.names
        )

    def num_rows(self, table: str) -> int:
        """Returns the rows of a table of the layer that the files hold."""
        return self.records[self.names[table]].vocabulary_size


def saved_steps(
    layer: LayerState, stack: StackPlan, saved: SavedTables
) -> dict[str, tuple[int, ...]]:
    """Returns the counts of each table of a stack that the files hold, largest first.

    All tables share one step count. Checkpoints of earlier versions may hold several:
    a stack that a step did not look up stayed behind.

    Args:
      layer: layer of the stack.
      stack: stack of the layer.
      saved: tables of the files.

    Returns:
      Name of a table of the layer to its counts. The table with the largest ones has
      taken all steps.
    """
    counts: dict[str, list[int]] = {}
    for slot in slots_of(layer, stack):
        is_count = slot.kind == "shared" and np.issubdtype(slot.leaf.dtype, np.integer)
        if is_count and not slot.leaf.shape:
            for table, file in saved.open(stack, slot.name).items():
                counts.setdefault(table, []).append(int(file.read()))
    return {table: tuple(sorted(x, reverse=True)) for table, x in counts.items()}


def restored_tables(layer: LayerState, saved: SavedTables) -> LayerState:
    """Returns a layer with the rows of the files. The old tables are donated.

    Rows and tables that the files lack keep their values.

    Args:
      layer: arrays, or their shapes.
      saved: tables of the files.

    Raises:
      CheckpointError: if a chunk is damaged. Arrays of the layer are lost then.
    """
    tables = {}
    for stack in layer.plan.stacks:
        placed = _placed(saved, stack)
        packed = _on_devices(layer.tables[stack.name], stack, layer.plan)
        tables[stack.name] = _with_rows(packed, None, saved, placed, stack, layer.plan)
        if stack.is_dynamic:
            name = directory_name(stack.name)
            warn_of_ids_left_out(placed)
            tables[name] = restored_directory(layer, stack, placed)
    return dataclasses.replace(layer, tables=tables)


def restored_slots(layer: LayerState, saved: SavedTables) -> LayerState:
    """Returns a layer with the slot variables of the files; the old ones are donated.

    Rows, tables and slot variables that the files lack keep their values. If tables of
    one stack have different counts in the files, the stack gets those of the table that
    has taken the most steps.

    Args:
      layer: arrays, or their shapes.
      saved: tables of the files.

    Raises:
      CheckpointError: if a chunk is damaged. Arrays of the layer are lost then.
    """
    slots = dict(layer.slots or {})
    for stack in layer.plan.stacks:
        if stack.name not in slots:
            continue
        leaves = []
        placed = _placed(saved, stack)
        steps = saved_steps(layer, stack, saved)
        latest = max(steps, key=lambda table: steps[table], default=None)
        for slot in slots_of(layer, stack):
            if slot.kind == "rows":
                leaf = _on_devices(slot.leaf, stack, layer.plan)
                leaf = _with_rows(leaf, slot.name, saved, placed, stack, layer.plan)
            else:
                leaf = _with_shared_value(slot, saved, latest, stack, layer.plan)
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
    files = saved.open(stack, slot)
    if not files:
        return packed

    row_dtype = file_row(packed).dtype

    def read(table: str, start: int, num_rows: int) -> np.ndarray:
        rows = files[table].read(slice(start, start + num_rows))
        record = saved.records[saved.names[table]]
        if slot is not None or record.dtype == stack.layout.dtype_name:
            return rows
        return np.asarray(
            decode_int8(rows) if record.dtype == "int8" else rows, row_dtype
        )

    if stack.is_dynamic:
        for table in files:
            rows = read(table, 0, saved.num_rows(table))
            packed = _with_placed_rows(packed, table, rows, placed[table], stack, plan)
        return packed
    ranges = {table: (0, saved.num_rows(table)) for table in files}
    return write_blocks(packed, stack, plan, read, ranges)


def _with_placed_rows(
    packed: PackedRows,
    table: str,
    of_file: np.ndarray,
    placed: PlacedIds,
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> PackedRows:
    """Returns the rows of a dynamic table; those without an id are zeros."""

    def read(_: str, start: int, num_rows: int) -> np.ndarray:
        sources = placed.sources[start : start + num_rows]
        rows = np.zeros((num_rows, *of_file.shape[1:]), of_file.dtype)
        rows[sources >= 0] = of_file[sources[sources >= 0]]
        return rows

    ranges = {table: (0, len(placed.sources))}
    return write_blocks(packed, stack, plan, read, ranges)


def _placed(saved: SavedTables, stack: StackPlan) -> dict[str, PlacedIds]:
    """Returns the places of the saved ids of each table of a dynamic stack."""
    files = {name: saved.open(stack, name) for name in ID_ARRAYS}
    result = {}
    for member in dynamic_tables(stack):
        table = member.table.name
        if table in saved.names:
            arrays = {x: of[table].read() for x, of in files.items() if table in of}
            record = saved.records[saved.names[table]]
            assert record.dynamic is not None, "compare_table refuses static tables"
            result[table] = place_ids(arrays, record.dynamic["capacity"], member)
    return result


def _with_shared_value(
    slot: NamedSlot,
    saved: SavedTables,
    latest: str | None,
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> jax.Array:
    """Returns a leaf with the values of whole tables that the files hold.

    Tables of one stack share some values: these are those of the table `latest`.
    """
    leaf = slot.leaf
    files = saved.open(stack, slot.name)
    found = {table: file.read() for table, file in files.items()}
    if not found:
        return leaf
    if slot.kind == "tables":
        is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
        new = np.zeros(leaf.shape, leaf.dtype) if is_shape else np.array(leaf)
        for i, table in enumerate(stack.tables):
            if table.name in found:
                new[i] = found[table.name]
    else:
        new = found[latest if latest in found else next(iter(found))]
    return jax.device_put(new, getattr(leaf, "sharding", None) or plan.replicated)


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, PackedRows)
