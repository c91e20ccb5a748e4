"""Describes the leaves of a state for a checkpoint: tables, slots, and the rest.

Random keys are saved as their numbers, so files hold no type of JAX.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embedding.checkpoint.arrays import SavedArray, StackToSave, TableToSave
from tpu_embedding.checkpoint.dynamic_tables import (
    SavedIds,
    directory_records,
    saved_ids,
)
from tpu_embedding.checkpoint.records import ArrayRecord, Json, TableRecord
from tpu_embedding.checkpoint.split_state import LayerState
from tpu_embedding.dynamic.vocabulary import Dynamic
from tpu_embedding.optimizers.row_optimizer import InSequence, RowOptimizer, Touched
from tpu_embedding.plan.plan import StackPlan, TrainedStackPlan
from tpu_embedding.rows.file_rows import file_row
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.slot_values import NamedSlot, named_slots
from tpu_embedding.update.table_writer import RoundedState

Leaves = dict[tuple[str, str | None], Any]
"""Leaves by the names of a table and of its slot. Values of the table have None."""


def tables_to_save(layer: LayerState) -> tuple[dict[str, TableRecord], Leaves]:
    """Returns records and leaves of all tables of a layer, by names in the checkpoint.

    All processes must call it together.
    """
    records: dict[str, TableRecord] = {}
    leaves: Leaves = {}
    for stack in layer.plan.stacks:
        ids = {} if stack.vocabulary.ids_are_rows else saved_ids(layer, stack)
        records_of_stack = _records_of_stack(layer, stack, ids)
        records |= {layer.name_of(k): record for k, record in records_of_stack.items()}
        for table, saved in ids.items():
            for array_name, array in saved.arrays.items():
                # A copy: the next step may donate what the view of an array shows.
                leaves[layer.name_of(table), array_name] = np.array(array)
        chosen = {table: saved.rows for table, saved in ids.items()}
        packed: dict[str | None, PackedRows] = {None: layer.tables[stack.name]}
        for slot in slots_of(layer, stack):
            if slot.kind == "rows":
                packed[slot.name] = slot.leaf
                continue
            values = np.array(slot.leaf)
            for i, table in enumerate(stack.tables):
                value = values[i] if slot.kind == "tables" else values
                leaves[layer.name_of(table.name), slot.name] = np.asarray(value)
        for slot_name, rows in packed.items():
            stack_to_save = StackToSave(rows, stack, layer.plan, chosen)
            for table, record in records_of_stack.items():
                array = record.arrays[slot_name]
                leaf = TableToSave(table, stack_to_save, array.shape)
                leaves[layer.name_of(table), slot_name] = leaf
    return records, leaves


def table_records(layer: LayerState) -> dict[str, TableRecord]:
    """Returns the description of each table of a layer, by its name in the layer.

    The rows of dynamic tables are not known without their ids, and 0 here.
    """
    records: dict[str, TableRecord] = {}
    for stack in layer.plan.stacks:
        records |= _records_of_stack(layer, stack, {})
    return records


def slots_of(layer: LayerState, stack: StackPlan) -> list[NamedSlot]:
    """Returns the slot variables of a stack; none if it is not trained."""
    slots = layer.slots or {}
    if not isinstance(stack, TrainedStackPlan) or stack.name not in slots:
        return []
    return list(named_slots(slots[stack.name], stack))


def _records_of_stack(
    layer: LayerState, stack: StackPlan, ids: Mapping[str, SavedIds]
) -> dict[str, TableRecord]:
    """Returns the description of each table of a stack, by its name in the layer."""
    slots = slots_of(layer, stack)
    optimizer = None
    if layer.slots is not None and isinstance(stack, TrainedStackPlan):
        structure = jax.tree.structure(layer.slots[stack.name])
        optimizer = _optimizer_record(stack.optimizer, structure)
    records = {}
    for table in stack.tables:
        size, directory = table.config.max_rows, {}
        if not stack.vocabulary.ids_are_rows:
            size = 0
        if (saved := ids.get(table.name)) is not None:
            size, directory = len(saved.rows), directory_records(saved)
        dynamic, vocabulary = None, table.config.vocabulary
        if isinstance(vocabulary, Dynamic):
            dynamic = {
                "capacity": vocabulary.capacity,
                "default_row": vocabulary.default_row,
            }
        records[table.name] = TableRecord(
            vocabulary_size=size,
            dim=stack.dim,
            dtype=stack.layout.dtype_name,
            values=_rows_record(layer.tables[stack.name], size),
            slots={slot.name: _slot_record(slot, size) for slot in slots},
            optimizer=optimizer,
            dynamic=dynamic,
            directory=directory,
        )
    return records


def _rows_record(packed: PackedRows, num_rows: int) -> ArrayRecord:
    row = file_row(packed)
    dtype = np.dtype(row.dtype).name
    return ArrayRecord(shape=(num_rows, *row.shape), dtype=dtype, has_rows=True)


def _slot_record(slot: NamedSlot, num_rows: int) -> ArrayRecord:
    if slot.kind == "rows":
        return _rows_record(slot.leaf, num_rows)
    shape = slot.leaf.shape[1:] if slot.kind == "tables" else slot.leaf.shape
    return ArrayRecord(shape=shape, dtype=np.dtype(slot.leaf.dtype).name)


def _optimizer_record(optimizer: RowOptimizer, state: jax.tree_util.PyTreeDef) -> Json:
    """Returns what must be equal for a checkpoint's slot variables to be continued."""
    match optimizer.driver:
        case InSequence():
            duplicates = "sequence"
        case Touched(occurrence_norm=True):
            duplicates = "norm"
        case _:
            duplicates = "sum"
    return {
        "state": _type_names(state),
        "rows": "every" if optimizer.moves_every_row else "touched",
        "duplicates": duplicates,
        "gradient_steps": optimizer.gradient_steps,
    }


def _type_names(structure: jax.tree_util.PyTreeDef) -> list[str]:
    """Returns the types of an optimizer's state that have slot variables or counts.

    The state that rounds rows of narrow tables is left out: dtypes may change.
    """
    if structure.node_data() is None or not structure.num_leaves:
        return []
    name = structure.node_data()[0].__name__
    inner = [x for child in structure.children() for x in _type_names(child)]
    is_state = name.endswith("State") and name != RoundedState.__name__
    return [name, *inner] if is_state else inner


def array_of_leaf(leaf: Any) -> np.ndarray | jax.Array:
    """Returns the array to save for a leaf."""
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)


def leaf_records(leaf: Any) -> list[ArrayRecord]:
    """Returns the shape and type of a leaf's saved array; an int may have two."""
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        return [ArrayRecord(shape=(), dtype=name) for name in ("int64", "uint64")]
    data = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    if _is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
    return [ArrayRecord(shape=tuple(data.shape), dtype=np.dtype(data.dtype).name)]


def restored_leaf(
    saved: SavedArray, wanted: Any, sharding: jax.sharding.Sharding
) -> Any:
    """Returns a leaf with the type and sharding of a given one.

    Args:
      saved: array of the checkpoint.
      wanted: array, shape or number.
      sharding: placement of a leaf whose shape has none.

    Raises:
      CheckpointError: if a file is damaged.
    """
    if isinstance(wanted, np.ndarray):
        return saved.read()
    if isinstance(wanted, bool | int | float | np.generic):
        return type(wanted)(saved.read())
    if isinstance(wanted, jax.Array) and not wanted.committed:
        # Such an array may meet arrays of any devices in a program, and so must this.
        value = jnp.asarray(saved.read())
    else:
        data = wanted
        if _is_key(wanted) and isinstance(wanted, jax.Array):
            data = jax.random.key_data(wanted)
        elif _is_key(wanted):
            data = jax.eval_shape(jax.random.key_data, wanted)
        sharding = data.sharding or wanted.sharding or sharding
        value = jax.make_array_from_callback(data.shape, sharding, saved.read)
    if not _is_key(wanted):
        return value
    impls = []  # Tracing also tells the generator of the shape of a key.
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), wanted)
    return jax.random.wrap_key_data(value, impl=impls[0])


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
