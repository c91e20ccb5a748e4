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
from tpu_embedding.optimizers.row_optimizer import Driver, InSequence, Touched
from tpu_embedding.plan.plan import StackPlan, TablePlan, TrainedStackPlan
from tpu_embedding.rows.file_rows import file_row
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.slot_values import NamedSlot, named_slots
from tpu_embedding.update.table_writer import RoundedState

Leaves = dict[tuple[str, str | None], Any]
"""Leaves by name of a table in the checkpoint, and of a slot; None: the values."""


def tables_to_save(layer: LayerState) -> tuple[dict[str, TableRecord], Leaves]:
    """Returns records and leaves of all tables of a layer, by names in the checkpoint.

    All processes must call it together.
    """
    records: dict[str, TableRecord] = {}
    leaves: Leaves = {}
    for stack in layer.plan.stacks:
        ids = {} if stack.vocabulary.ids_are_rows else saved_ids(layer, stack)
        records |= _records_of_stack(layer, stack, ids)
        for table, of_table in ids.items():
            for slot, array in of_table.arrays.items():
                # A copy: the next step may donate what the view of an array shows.
                leaves[layer.name_of(table), slot] = np.array(array)
        chosen = {table: of_table.rows for table, of_table in ids.items()}
        packed: dict[str | None, PackedRows] = {None: layer.tables[stack.name]}
        for slot in slots_of(layer, stack):
            if slot.kind == "rows":
                packed[slot.name] = slot.leaf
                continue
            values = np.array(slot.leaf)
            for i, table in enumerate(stack.tables):
                of_table = values[i] if slot.kind == "tables" else values
                leaves[layer.name_of(table.name), slot.name] = np.asarray(of_table)
        for slot, array in packed.items():
            rows = StackToSave(array, stack, layer.plan, chosen)
            for table in stack.tables:
                name = layer.name_of(table.name)
                record = records[name].arrays[slot]
                leaves[name, slot] = TableToSave(table.name, record, rows)
    return records, leaves


def table_records(layer: LayerState) -> dict[str, TableRecord]:
    """Returns the description of each table of a layer, by name in the checkpoint.

    The rows of dynamic tables are not known without their ids, and 0 here.
    """
    records: dict[str, TableRecord] = {}
    for stack in layer.plan.stacks:
        records |= _records_of_stack(layer, stack, {})
    return records


def slots_of(layer: LayerState, stack: StackPlan) -> list[NamedSlot]:
    """Returns the slot variables of a stack; none if it is not trained."""
    if layer.slots is None or not isinstance(stack, TrainedStackPlan):
        return []
    return list(named_slots(layer.slots[stack.name], stack))


def _records_of_stack(
    layer: LayerState, stack: StackPlan, ids: Mapping[str, SavedIds]
) -> dict[str, TableRecord]:
    slots = slots_of(layer, stack)
    records = {}
    for table in stack.tables:
        of_table = ids.get(table.name)
        size = table.config.max_rows
        if not stack.vocabulary.ids_are_rows:
            size = 0 if of_table is None else len(of_table.rows)
        records[layer.name_of(table.name)] = TableRecord(
            vocabulary_size=size,
            dim=stack.dim,
            dtype=stack.layout.dtype_name,
            values=_rows_record(layer.tables[stack.name], size),
            slots={slot.name: _slot_record(slot, size) for slot in slots},
            optimizer=_optimizer_record(layer, stack),
            dynamic=_dynamic_record(table),
            directory={} if of_table is None else directory_records(of_table),
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


def _optimizer_record(layer: LayerState, stack: StackPlan) -> Json | None:
    if layer.slots is None or not isinstance(stack, TrainedStackPlan):
        return None
    optimizer = stack.optimizer
    return {
        "state": _type_names(jax.tree.structure(layer.slots[stack.name])),
        "rows": "every" if optimizer.moves_every_row else "touched",
        "duplicates": _duplicates(optimizer.driver),
        "gradient_steps": optimizer.gradient_steps,
    }


def _duplicates(driver: Driver) -> str:
    match driver:
        case InSequence():
            return "sequence"
        case Touched(occurrence_norm=True):
            return "norm"
    return "sum"


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


def _dynamic_record(table: TablePlan) -> Json | None:
    dynamic = table.config.vocabulary
    if not isinstance(dynamic, Dynamic):
        return None
    return {"capacity": dynamic.capacity, "default_row": dynamic.default_row}


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
    if _is_key(wanted):
        return jax.random.wrap_key_data(value, impl=_key_impl(wanted))
    return value


def _key_impl(leaf: Any) -> Any:
    """Returns the generator of a random key, or of its shape."""
    impls = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), leaf)
    return impls[0]


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
