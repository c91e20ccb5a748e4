"""Restores a state from a checkpoint, under any plan.

Rows of tables and slot variables are written block by block into the layer's arrays,
which are donated (`tables/row_stream.py`). Each process reads the blocks of its own
devices. For dynamic tables, each host holds one whole array of the files at a time.
"""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_args

import jax
import numpy as np
import orbax.checkpoint as ocp

from tpu_embedding import distributed
from tpu_embedding.checkpoint.arrays import OpenCheckpoint, SavedArray, open_checkpoint
from tpu_embedding.checkpoint.differences import (
    DenseChoice,
    Difference,
    DtypesChoice,
    RulesChoice,
    SlotsChoice,
    dense_differences,
    format_differences,
    optimizer_differences,
    saved_slots,
    shared_differences,
    table_differences,
)
from tpu_embedding.checkpoint.records import (
    CheckpointError,
    CheckpointRecord,
    TableRecord,
    array_keys,
    dense_keys,
    errors_of_reading,
)
from tpu_embedding.checkpoint.saved_leaves import (
    CLOCK,
    ID_ARRAYS,
    leaf_records,
    place_saved_ids,
    restored_directory,
    restored_leaf,
    slots_of,
    table_records,
    write_table_rows,
)
from tpu_embedding.checkpoint.split_state import LayerState, SplitState
from tpu_embedding.dynamic.directory import directory_name, dynamic_tables
from tpu_embedding.dynamic.ids_on_host import PlacedIds
from tpu_embedding.functional.derived_state import (
    check_has_slots,
    restarted_slots,
)
from tpu_embedding.functional.steps import init_slots
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.rows.file_rows import decode_int8, file_row
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.initial_values import init_guard
from tpu_embedding.tables.slot_values import NamedSlot, named_slots, with_slot_values


@dataclasses.dataclass
class RestoreState(ocp.args.CheckpointArgs):
    """The state to restore: an argument for `CheckpointManager.restore`.

    Attributes:
      state: state to restore into. `te.restore` explains all attributes.
      plan: the tables' plan.
      tables: names of the tables to restore. Defaults to all tables.
      rename: table name to its name in the checkpoint.
      slots: whether to restore or reset slot variables.
      rules: whether optimizers must match.
      dense: whether to restore or keep the other leaves.
      dtypes: whether row types must match or are converted.

    Example:
      >>> import tempfile
      >>> import tpu_embedding as te
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with ocp.CheckpointManager(folder) as manager:
      ...         manager.save(3, args=te.checkpoint.SaveState({"next_batch": 17}))
      ...         manager.wait_until_finished()
      ...         manager.restore(3, args=RestoreState({"next_batch": 0}, dense="keep"))
      True
      {'next_batch': 0}
    """

    state: Any
    plan: EmbeddingPlan | None = None
    tables: Collection[str] | None = None
    rename: Mapping[str, str] | None = None
    slots: SlotsChoice = "restore"
    rules: RulesChoice = "check"
    dense: DenseChoice = "restore"
    dtypes: DtypesChoice = "check"

    def __post_init__(self):
        for field, choices in (
            ("slots", SlotsChoice),
            ("rules", RulesChoice),
            ("dense", DenseChoice),
            ("dtypes", DtypesChoice),
        ):
            if (value := getattr(self, field)) not in get_args(choices):
                raise ValueError(
                    f"{field} must be one of {get_args(choices)}, got {value!r}."
                )

    def tables_of(self, layer: LayerState) -> dict[str, str]:
        """Returns a layer's tables to restore, with their saved names."""
        return {
            table: (self.rename or {}).get(name, name)
            for table, name in layer.names.items()
            if self.tables is None or name in self.tables
        }


def restore_state(directory: str | os.PathLike[str], args: RestoreState) -> Any:
    """Restores a state; see `te.restore`."""
    state = SplitState(args.state, args.plan)
    _check_arguments(args, state.layers)
    with contextlib.ExitStack() as ends:
        # Either all processes complete this block or all raise. The checkpoint stays
        # open after it.
        with _checked_by_all(directory, state.layers) as digests:
            checkpoint = ends.enter_context(open_checkpoint(directory))
            digests.append(checkpoint.record.digest)
            restores = [_layer_restore(x, checkpoint, args) for x in state.layers]
            _check_fit(checkpoint, restores, state.dense, args)
            dense = {}
            if args.dense == "restore":
                dense = _restored_leaves(checkpoint, state)
            placed = [restore.place_ids() for restore in restores]
            # `restored` donates the arrays, so damage must be found before that. Shapes
            # hold no values that could be lost.
            for restore in restores:
                if not _is_abstract((restore.layer.tables, restore.layer.slots)):
                    restore.verify(checkpoint)
        layers = [
            restore.restored(placed_ids)
            for restore, placed_ids in zip(restores, placed, strict=True)
        ]
        checkpoint.check_unchanged()
    return state.rebuilt(layers, dense)


def _check_arguments(args: RestoreState, layers: Sequence[LayerState]) -> None:
    """Raises ValueError for unknown tables, or if a table needs a missing optimizer."""
    names = sorted(name for layer in layers for name in layer.names.values())
    for field in ("tables", "rename"):
        given = getattr(args, field) or ()
        if unknown := sorted(set(given) - set(names)):
            raise ValueError(
                f"{field} must name tables of the state {names}, got {unknown}."
            )
    for layer in layers:
        if layer.slots is None:
            derived = layer.tables_with_derived_state & set(args.tables_of(layer))
            check_has_slots(derived, "te.restore(directory, (model, optimizer))")


@contextlib.contextmanager
def _checked_by_all(
    directory: str | os.PathLike[str], layers: Sequence[LayerState]
) -> Iterator[list[str]]:
    """Raises on all processes that share the layers if one of them finds damage.

    If only that process raised, the rest would start to write rows and wait for it
    forever.

    Yields:
      A list to which the caller appends the checkpoint's digest.

    Raises:
      CheckpointError: if any process raises a `CheckpointError`, or processes read
        different saves.
    """
    digests: list[str] = []
    error = None
    try:
        yield digests
    except CheckpointError as raised:
        error = raised
    is_shared = any(not _is_local(layer) for layer in layers)
    value = digests[0] if error is None else ""
    values = distributed.exchange("restore", value) if is_shared else [value]
    if error is not None:
        raise error
    if len(set(values)) > 1:
        raise CheckpointError(
            f"Processes of the job read different saves from {directory}, or one of "
            "them found damage; see its error."
        )


def _is_local(layer: LayerState) -> bool:
    return layer.plan.replicated.is_fully_addressable


def _is_abstract(tree: Any) -> bool:
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))


def _check_fit(
    checkpoint: OpenCheckpoint,
    restores: Sequence["_LayerRestore"],
    dense: Mapping[str, Any],
    args: RestoreState,
) -> None:
    differences = list(_differences(checkpoint.record, restores, dense, args))
    if not differences:  # Values can be compared only if their shapes are equal.
        for restore in restores:
            differences += restore.shared_differences()
    if differences:
        raise CheckpointError(
            f"The checkpoint {checkpoint.root} does not fit the state: "
            f"{format_differences(differences)}"
        )
    for restore in restores:
        for array in restore.arrays.values():
            array.opened()


def _differences(
    record: CheckpointRecord,
    restores: Sequence["_LayerRestore"],
    dense: Mapping[str, Any],
    args: RestoreState,
) -> Iterator[Difference]:
    names = {
        restore.layer.name_of(table): saved_name
        for restore in restores
        for table, saved_name in args.tables_of(restore.layer).items()
    }
    for name, saved_name in sorted(names.items()):
        if saved_name not in record.tables:
            renamed = "" if saved_name == name else f" as {saved_name!r}"
            text = f"not in the checkpoint{renamed}"
            yield Difference(f"table {name!r}", text, "missing")
    if args.tables is None:
        for name in sorted(record.tables.keys() - set(names.values())):
            yield Difference(f"table {name!r}", "only in the checkpoint", "extra")
    for restore in restores:
        layer = restore.layer
        rows = "shapes" if _is_abstract(layer.tables) else "arrays"
        for table, saved in restore.saved.items():
            both = (layer.name_of(table), saved, restore.wanted[table])
            yield from table_differences(*both, rows, args.dtypes)
            with_slots = args.slots == "restore" and layer.slots is not None
            if with_slots and args.rules == "check":
                yield from optimizer_differences(*both)
    if args.dense == "restore":
        yield from dense_differences(record.dense, dense)


def _restored_leaves(checkpoint: OpenCheckpoint, state: SplitState) -> dict[str, Any]:
    """Returns the dense leaves.

    Shapes without a sharding are replicated on the mesh of the first layer. If there
    are no layers, they are put on a single device.
    """
    sharding: Any = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if state.layers:
        sharding = state.layers[0].plan.replicated
    # All arrays start to open in the background before the first one is read.
    arrays = {
        name: SavedArray(checkpoint, dense_keys(name), *leaf_records(leaf))
        for name, leaf in state.dense.items()
    }
    return {
        name: restored_leaf(arrays[name], leaf, sharding)
        for name, leaf in state.dense.items()
    }


def _layer_restore(
    layer: LayerState, checkpoint: OpenCheckpoint, args: RestoreState
) -> "_LayerRestore":
    """Starts to open the arrays to restore into a layer."""
    wanted, saved, arrays = table_records(layer), {}, {}
    for table, saved_name in args.tables_of(layer).items():
        if (record := checkpoint.record.tables.get(saved_name)) is None:
            continue
        saved[table] = record
        saved_slot_of: dict[str | None, str | None] = {None: None}
        saved_slot_of |= {name: name for name in record.directory}
        if args.slots == "restore" and layer.slots is not None:
            saved_slot_of |= saved_slots(record, wanted[table])
        for slot, saved_slot in saved_slot_of.items():
            keys = array_keys(saved_name, saved_slot)
            array = SavedArray(checkpoint, keys, record.arrays[saved_slot])
            arrays[table, slot] = array
    return _LayerRestore(layer, args.slots, wanted, saved, arrays)


@dataclasses.dataclass(frozen=True)
class _LayerRestore:
    """A layer of the state, and what to restore into it.

    Attributes:
      layer: the layer, with arrays or their shapes.
      slots: whether to restore or reset slot variables.
      wanted: the layer's description of each table, by name in the layer.
      saved: the checkpoint's description of each table to restore, by the same name.
      arrays: arrays to read, by two names in the layer: the table's name, and the name
        of the slot variable or directory array. The second name is None for the table's
        values.
    """

    layer: LayerState
    slots: SlotsChoice
    wanted: Mapping[str, TableRecord]
    saved: Mapping[str, TableRecord]
    arrays: Mapping[tuple[str, str | None], SavedArray]

    def of_stack(self, stack: StackPlan, slot: str | None) -> dict[str, SavedArray]:
        """Returns the arrays to restore into a slot variable of a stack, by table."""
        names = [
            table.name for table in stack.tables if (table.name, slot) in self.arrays
        ]
        return {name: self.arrays[name, slot] for name in names}

    def shared_differences(self) -> Iterator[Difference]:
        """Yields differences in values that stacked tables share, such as counts."""
        for stack in self.layer.plan.stacks:
            for slot in slots_of(self.layer, stack):
                arrays = self.of_stack(stack, slot.name)
                if arrays and slot.kind in ("shared", "hyperparameter"):
                    values = {table: array.read() for table, array in arrays.items()}
                    yield from shared_differences(stack, slot, values)

    def place_ids(self) -> dict[str, PlacedIds]:
        """Returns the places of each dynamic table's saved ids.

        Warns about ids that don't fit.
        """
        placed, left_out = {}, []
        for stack in self.layer.plan.stacks:
            arrays = {name: self.of_stack(stack, name) for name in ID_ARRAYS}
            for member in dynamic_tables(stack):
                table = member.table.name
                if table not in self.saved:
                    continue
                ids = {k: x[table].read() for k, x in arrays.items() if table in x}
                dynamic = self.saved[table].dynamic
                assert dynamic is not None, "static tables were rejected"
                with errors_of_reading(f"The saved ids of table {table!r}"):
                    placed[table] = place_saved_ids(ids, dynamic["capacity"], member)
                num_left_out = placed[table].num_left_out
                if num_left_out:
                    num_ids = num_left_out + len(placed[table].kept)
                    left_out.append(f"{num_left_out} of {num_ids} of table {table!r}")
        if left_out:
            warnings.warn(
                f"Dropped saved ids whose buckets are full: {', '.join(left_out)}. Ids "
                "that would be evicted first were dropped first. To keep all ids, use "
                "a capacity that is a multiple of the saved one.",
                stacklevel=2,
            )
        return placed

    def verify(self, checkpoint: OpenCheckpoint) -> None:
        """Reads all chunks once, before any array of the layer is donated.

        Processes that share the layer split the work.

        Raises:
          CheckpointError: if a chunk is missing, damaged, or from another save.
        """
        first, step = 0, 1
        if not _is_local(self.layer):
            first, step = jax.process_index(), distributed.num_processes()
        arrays = self.arrays.values()
        chunks = [(array, rows) for array in arrays for rows in array.ranges()]
        reads = [
            checkpoint.threads.submit(array.read, rows)
            for array, rows in chunks[first::step]
        ]
        for read in reads:
            read.result()

    def restored(self, placed: Mapping[str, PlacedIds]) -> LayerState:
        """Returns the layer with the saved rows and slot variables.

        Rows and tables that the checkpoint lacks keep their values. If it lacks a slot
        variable of a restored table, the slot variable is reset. The old arrays are
        donated.

        Raises:
          CheckpointError: if a chunk is damaged. The layer's arrays are then lost.
        """
        plan, tables = self.layer.plan, init_guard(self.layer.plan)
        for stack in plan.stacks:
            packed = self.layer.tables[stack.name]
            tables[stack.name] = self._read_rows(packed, stack, None, placed)
            if not stack.vocabulary.ids_are_rows:
                clocks = self.of_stack(stack, CLOCK)
                clocks = {table: int(clock.read()) for table, clock in clocks.items()}
                directory = restored_directory(self.layer, stack, placed, clocks)
                tables[directory_name(stack.name)] = directory
        layer = dataclasses.replace(self.layer, tables=tables)
        if layer.slots is None:
            return layer
        lacks_slots = any(
            (table, slot) not in self.arrays
            for table in self.saved
            for slot in self.wanted[table].slots
        )
        slots = dict(layer.slots)
        if self.slots == "initialize" or lacks_slots:
            slots = _restarted_slots(layer, self.saved)
        if self.slots == "initialize":
            return dataclasses.replace(layer, slots=slots)
        layer = dataclasses.replace(layer, slots=slots)
        for stack in plan.stacks:
            if stack.name not in slots:
                continue
            leaves = [
                self._read_rows(slot.leaf, stack, slot.name, placed)
                if slot.kind == "rows"
                else self._read_shared_value(slot, stack)
                for slot in slots_of(layer, stack)
            ]
            structure = jax.tree.structure(slots[stack.name], is_leaf=_is_rows)
            slots[stack.name] = structure.unflatten(leaves)
        # The tables may hold additional rows, or rows of another type.
        slots = restarted_slots(slots, tables, self.saved, plan, ("total",))
        return dataclasses.replace(layer, slots=slots)

    def _read_rows(
        self,
        packed: PackedRows,
        stack: StackPlan,
        slot: str | None,
        placed: Mapping[str, PlacedIds],
    ) -> PackedRows:
        """Returns restored rows of a stack or slot variable. Shapes start as zeros."""
        plan, shape = self.layer.plan, packed.lines
        if isinstance(shape, jax.ShapeDtypeStruct):
            packed = packed.zeros(plan.rows_sharding(stack))
        arrays = self.of_stack(stack, slot)

        def read(table: str, start: int, num_rows: int) -> np.ndarray:
            rows = arrays[table].read(slice(start, start + num_rows))
            saved_dtype = self.saved[table].dtype
            if slot is not None or saved_dtype == stack.layout.dtype_name:
                return rows
            rows = decode_int8(rows) if saved_dtype == "int8" else rows
            return np.asarray(rows, file_row(packed).dtype)

        num_rows = {table: self.saved[table].vocabulary_size for table in arrays}
        return write_table_rows(packed, stack, plan, read, num_rows, placed)

    def _read_shared_value(self, slot: NamedSlot, stack: StackPlan) -> jax.Array:
        """Returns a leaf of whole tables' values, with the saved values filled in."""
        leaf, arrays = slot.leaf, self.of_stack(stack, slot.name)
        if not arrays:
            return leaf
        values = {table: array.read() for table, array in arrays.items()}
        # `shared_differences` rejected tables whose values differ.
        new = next(iter(values.values()))
        if slot.kind == "tables":
            is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
            new = np.zeros(leaf.shape, leaf.dtype) if is_shape else np.array(leaf)
            for i, table in enumerate(stack.tables):
                new[i] = values.get(table.name, new[i])
        sharding = getattr(leaf, "sharding", None) or self.layer.plan.replicated
        return jax.device_put(new, sharding)


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, PackedRows)


def _restarted_slots(layer: LayerState, restored: Collection[str]) -> dict[str, Any]:
    """Returns slots, reset for restored tables and unchanged for all other tables.

    Tables share step counts, so these are reset only if all trained tables are
    restored.
    """
    fresh = init_slots(dict(layer.tables), layer.plan)
    trained = {table.name for x in layer.plan.trained_stacks for table in x.tables}
    # Shapes hold no values to keep.
    if trained <= set(restored) or _is_abstract(layer.slots):
        return fresh
    slots = dict(layer.slots or {})
    for stack in layer.plan.trained_stacks:
        values = {table.name: {} for table in stack.tables if table.name in restored}
        if not values:
            continue
        for slot in named_slots(fresh[stack.name], stack):
            if slot.kind in ("rows", "tables"):  # Step counts are shared.
                for table, array in slot.read(stack, layer.plan).items():
                    if table in values:
                        values[table][slot.name] = array
        one_stack = {stack.name: slots[stack.name]}
        slots |= with_slot_values(one_stack, values, layer.plan)
    return slots
