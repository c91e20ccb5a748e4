"""Turns leaves into arrays and records to save, and saved arrays into leaves.

The rows of static tables are streamed. A dynamic table is saved as its ids in ascending
order, with rows in the same order, so files don't depend on devices.
docs/guides/checkpoints.md says where ids are placed if the restored table has a
different capacity.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embedding.checkpoint.arrays import SavedArray, StackToSave, TableToSave
from tpu_embedding.checkpoint.records import (
    DIRECTORY_ARRAY,
    ArrayRecord,
    Json,
    TableRecord,
)
from tpu_embedding.checkpoint.split_state import LayerState
from tpu_embedding.dynamic.directory import (
    LINE_LANES,
    DynamicTablePlan,
    IdDirectory,
    directory_name,
    dynamic_tables,
)
from tpu_embedding.dynamic.ids_64 import NO_ID, Ids64, mix_ids
from tpu_embedding.dynamic.ids_on_host import (
    PlacedIds,
    on_host,
    place_ids,
    rows_in_directory,
    with_placed_ids,
)
from tpu_embedding.dynamic.vocabulary import Dynamic, Eviction, LeastFrequentlyUsed
from tpu_embedding.optimizers.row_optimizer import InSequence, RowOptimizer, Touched
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.rows.file_rows import file_row
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.row_stream import ReadTableRows, write_blocks
from tpu_embedding.tables.slot_values import NamedSlot, named_slots
from tpu_embedding.update.state import RoundedState

IDS: Final = f"{DIRECTORY_ARRAY}ids"
NATURAL_ROWS: Final = f"{DIRECTORY_ARRAY}natural_rows"
LAST_USED: Final = f"{DIRECTORY_ARRAY}last_used"
COUNTS: Final = f"{DIRECTORY_ARRAY}counts"
CLOCK: Final = f"{DIRECTORY_ARRAY}clock"
INIT_KEY: Final = f"{DIRECTORY_ARRAY}init_key"
SKETCH: Final = f"{DIRECTORY_ARRAY}sketch"
ID_ARRAYS: Final = (IDS, NATURAL_ROWS, LAST_USED, COUNTS, CLOCK, INIT_KEY, SKETCH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedIds:
    """Directory arrays to write, by name, and the table row of each saved row."""

    arrays: Mapping[str, np.ndarray]
    rows: np.ndarray


def saved_ids(layer: LayerState, stack: StackPlan) -> dict[str, SavedIds]:
    """Gathers a stack's ids by table.

    All processes must call this together. Each host temporarily holds the whole
    directory.
    """
    directory = layer.tables[directory_name(stack.name)]
    sketch = None if directory.sketch is None else on_host(directory.sketch)
    # All shards have the same clock and the same `init_keys`.
    clock = on_host(directory.clock)[0]
    rows_by_table = rows_in_directory(directory, stack)
    init_keys = on_host(directory.init_keys).reshape(stack.num_shards, -1, 2)[0]
    result = {}
    for i, member in enumerate(dynamic_tables(stack)):
        rows = rows_by_table[member.table.name]
        arrays = {
            IDS: rows.ids,
            NATURAL_ROWS: rows.natural_rows,
            LAST_USED: rows.last_used,
            COUNTS: rows.counts,
            CLOCK: clock,
            INIT_KEY: init_keys[i],
        }
        if sketch is not None:
            # Take the buckets' lines in natural order, and leave out the unused buckets
            # on the last shards.
            first, size = member.first_bucket, member.buckets_per_shard
            lines = sketch.reshape(member.num_shards, -1, LINE_LANES)
            lines = lines[:, first : first + size].reshape(-1, LINE_LANES)
            arrays[SKETCH] = lines[: member.dynamic.num_buckets]
        saved_rows = rows.rows
        # A learned default row has no id, so it comes last.
        if member.default_row is not None:
            saved_rows = np.append(saved_rows, np.int64(member.default_row))
        result[member.table.name] = SavedIds(arrays=arrays, rows=saved_rows)
    return result


def place_saved_ids(
    arrays: Mapping[str, np.ndarray],
    capacity: int,
    member: DynamicTablePlan,
) -> PlacedIds:
    """Finds places for ids that were saved from a table with `capacity`.

    In the result, `sources` are row numbers in the files, including the default row's.
    """
    ids, natural_rows, sketch = arrays[IDS], arrays[NATURAL_ROWS], arrays.get(SKETCH)
    order = np.arange(len(ids))
    # If the bucket count is the same as in the files, each id returns to its bucket and
    # lane, on any number of devices.
    if Dynamic(capacity=capacity).num_buckets != member.dynamic.num_buckets:
        natural_rows = sketch = None
        value, next_value = _values(arrays, member.dynamic.evict)
        words = Ids64.of_array(ids)
        first, second = mix_ids(np.asarray(words.high), np.asarray(words.low))
        # A bucket takes its first 64 ids, so `~` sorts the most valuable ids first.
        # Hashes of the ids break ties.
        order = np.lexsort((second, first, ~next_value, ~value))
    placed = place_ids(ids[order], member, natural_rows)
    kept = order[placed.kept]
    sources = np.full(member.table.num_rows, -1, np.int64)
    # An empty place has source -1, which selects the -1 that is appended here.
    sources[: len(placed.sources)] = np.append(order, -1)[placed.sources]
    if member.default_row is not None:
        sources[member.default_row] = len(ids)
    return dataclasses.replace(
        placed,
        sources=sources,
        kept=kept,
        last_used=arrays[LAST_USED][kept],
        counts=arrays[COUNTS][kept],
        init_key=arrays[INIT_KEY],
        sketch=sketch,
    )


def _values(
    arrays: Mapping[str, np.ndarray], evict: Eviction | None
) -> tuple[np.ndarray, np.ndarray]:
    """Computes each id's value for a policy, and a second value that breaks ties."""
    last_used, counts = arrays[LAST_USED], arrays[COUNTS]
    if not isinstance(evict, LeastFrequentlyUsed):
        return last_used, counts
    if evict.half_life is not None:
        # Decay the counts as a training step would at the time of the latest use. The
        # clock doesn't tell that time, because each step advances it by 1, even if the
        # caller's `now` counts hours.
        age = last_used.max(initial=0) - last_used
        counts = counts >> np.minimum(age // np.uint32(evict.half_life), 31)
    return counts, last_used


def write_table_rows(
    packed: PackedRows,
    stack: StackPlan,
    plan: EmbeddingPlan,
    read: ReadTableRows,
    num_rows: Mapping[str, int],
    placed: Mapping[str, PlacedIds],
) -> PackedRows:
    """Replaces table or slot rows in place. All processes must call it together.

    Args:
      packed: rows of all shards. They are donated.
      read: reads rows in file order.
      num_rows: row count in the file for each table to write, by name.
    """
    sizes = {table: size for table, size in num_rows.items() if table not in placed}
    # If rows in host memory are still shapes, they become arrays here, even if no row
    # is written.
    if sizes or isinstance(packed.lines, jax.ShapeDtypeStruct):
        packed = write_blocks(packed, stack, plan, read, sizes)
    # A block of a dynamic table takes rows from anywhere in the file, so a host holds
    # one whole table at a time.
    for table in [name for name in num_rows if name in placed]:
        rows, sources = read(table, 0, num_rows[table]), placed[table].sources

        def gather(_: str, start: int, size: int, rows=rows, sources=sources):
            block = sources[start : start + size]
            gathered = np.zeros((len(block), *rows.shape[1:]), rows.dtype)
            gathered[block >= 0] = rows[block[block >= 0]]  # -1 is an empty place.
            return gathered

        packed = write_blocks(packed, stack, plan, gather, {table: len(sources)})
    return packed


def restored_directory(
    layer: LayerState,
    stack: StackPlan,
    placed: Mapping[str, PlacedIds],
    clocks: Mapping[str, int],
) -> IdDirectory:
    """Puts saved ids into the directory. Its arrays may be `jax.ShapeDtypeStruct`s."""
    old = layer.tables[directory_name(stack.name)]
    if isinstance(old.keys, jax.ShapeDtypeStruct):
        old = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), old)
        old.keys[:] = NO_ID
    # Stacked tables share a clock, which must not go back for tables that keep their
    # ids.
    latest = max(clocks.values(), default=0)
    if len(clocks) < len(stack.tables):
        latest = max(latest, int(on_host(old.clock).max()))
    return with_placed_ids(old, placed, stack, layer.plan, clock=latest)


Leaves = dict[tuple[str, str | None], Any]
"""Leaves by table and slot name. Table values have the slot name None."""


def tables_to_save(layer: LayerState) -> tuple[dict[str, TableRecord], Leaves]:
    """Collects records and leaves, by table name in the checkpoint.

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
                # Copy the array, because it may be a view of a device array that the
                # next step donates while the write is still running.
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
    """Describes each table, by name. The row counts of dynamic tables are set to 0."""
    records: dict[str, TableRecord] = {}
    for stack in layer.plan.stacks:
        records |= _records_of_stack(layer, stack, {})
    return records


def slots_of(layer: LayerState, stack: StackPlan) -> list[NamedSlot]:
    slots = layer.slots or {}
    if not stack.is_trained or stack.name not in slots:
        return []
    return list(named_slots(slots[stack.name], stack))


def _records_of_stack(
    layer: LayerState, stack: StackPlan, ids: Mapping[str, SavedIds]
) -> dict[str, TableRecord]:
    slots = slots_of(layer, stack)
    optimizer = None
    if layer.slots is not None and stack.is_trained:
        structure = jax.tree.structure(layer.slots[stack.name])
        optimizer = _optimizer_record(stack.optimizer, structure)
    records = {}
    for table in stack.tables:
        size, directory = table.config.max_rows, {}
        if not stack.vocabulary.ids_are_rows:
            size = 0
        if (saved := ids.get(table.name)) is not None:
            size = len(saved.rows)
            directory = {
                name: ArrayRecord(
                    shape=array.shape,
                    dtype=array.dtype.name,
                    has_rows=name in (IDS, NATURAL_ROWS, LAST_USED, COUNTS),
                )
                for name, array in saved.arrays.items()
            }
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
    """Lists what must match to reuse slot variables. Learning rates may differ."""
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
    """Lists the state types that hold slot variables or counts."""
    if structure.node_data() is None or not structure.num_leaves:
        return []
    # `RoundedState` is skipped, because it only says that the table is narrow, and the
    # record already has the table's dtype.
    name = structure.node_data()[0].__name__
    inner = [x for child in structure.children() for x in _type_names(child)]
    is_state = name.endswith("State") and name != RoundedState.__name__
    return [name, *inner] if is_state else inner


def describe_leaf(leaf: Any) -> str:
    """Describes a leaf's type and shape, such as `float32[2, 3]`."""
    if isinstance(leaf, bool | int | float):
        return type(leaf).__name__
    return f"{leaf.dtype}{list(leaf.shape)}"


def array_of_leaf(leaf: Any) -> np.ndarray | jax.Array:
    # Random keys are saved as plain integers, so that files don't depend on JAX.
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)


def leaf_records(leaf: Any) -> list[ArrayRecord]:
    """Lists the array records that a save may have written for a leaf."""
    # NumPy saves an int as int64, and as uint64 from 2**63 on.
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        return [ArrayRecord(shape=(), dtype=name) for name in ("int64", "uint64")]
    data = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    if _is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
    return [ArrayRecord(shape=tuple(data.shape), dtype=np.dtype(data.dtype).name)]


def restored_leaf(
    saved: SavedArray, wanted: Any, sharding: jax.sharding.Sharding
) -> Any:
    """Reads a leaf, with the type and sharding of `wanted`.

    `wanted` is an array, a shape or a number. If it is a shape without a sharding,
    `sharding` is used.
    """
    if isinstance(wanted, np.ndarray):
        return saved.read()
    if isinstance(wanted, bool | int | float | np.generic):
        return type(wanted)(saved.read())
    if isinstance(wanted, jax.Array) and not wanted.committed:
        # Keep the array uncommitted, so that programs on any devices can use it.
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
    # `key_impl` needs an array. If `wanted` is a shape, tracing turns it into an array.
    impls = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), wanted)
    return jax.random.wrap_key_data(value, impl=impls[0])


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
