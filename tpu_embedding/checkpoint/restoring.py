"""Restores a state from a checkpoint, under any plan.

First, every process compares and verifies everything. Rows are written into the donated
arrays, block by block (`tables/row_stream.py`), only if all processes succeed. So a bad
checkpoint leaves the state unchanged, and no process waits for a process that raised.
"""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from tpu_embedding import distributed
from tpu_embedding.argument_checks import about, invalid
from tpu_embedding.checkpoint.arrays import OpenCheckpoint, SavedArray, open_checkpoint
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
    describe_leaf,
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
from tpu_embedding.functional.derived_state import check_has_slots, restarted_slots
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.initial_values import init_guard
from tpu_embedding.tables.slot_values import NamedSlot


@dataclasses.dataclass
class RestoreState(ocp.args.CheckpointArgs):
    """The state to restore: an argument for `CheckpointManager.restore`.

    Attributes:
      state: state to restore into. `te.restore` explains all attributes.
      plan: table plan.
      tables: names of the tables to restore. Defaults to all tables.
      rename: maps a table's name to its name in the checkpoint.

    Example:
      >>> import tempfile
      >>> import tpu_embedding as te
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with ocp.CheckpointManager(folder) as manager:
      ...         manager.save(3, args=te.checkpoint.SaveState({"next_batch": 17}))
      ...         manager.wait_until_finished()
      ...         manager.restore(3, args=RestoreState({"next_batch": 0}))
      True
      {'next_batch': 17}
    """

    state: Any
    plan: EmbeddingPlan | None = None
    tables: Collection[str] | None = None
    rename: Mapping[str, str] | None = None

    def tables_of(self, layer: LayerState) -> dict[str, str]:
        """Selects the tables to restore into a layer, with their saved names."""
        return {
            table: (self.rename or {}).get(name, name)
            for table, name in layer.names.items()
            if self.tables is None or name in self.tables
        }


def restore_state(directory: str | os.PathLike[str], args: RestoreState) -> Any:
    state = SplitState(args.state, args.plan)
    _check_arguments(args, state.layers)
    with contextlib.ExitStack() as ends:
        # Either all processes complete this block or all raise. The checkpoint stays
        # open afterwards, because its rows are read below.
        with _checked_by_all(directory, state.layers) as digests:
            checkpoint = ends.enter_context(open_checkpoint(directory))
            digests.append(checkpoint.record.digest)
            restores = [_layer_restore(x, checkpoint, args) for x in state.layers]
            _check_fit(checkpoint, restores, state.dense, args)
            dense = _restored_leaves(checkpoint, state)
            placed = [restore.place_ids() for restore in restores]
            # `_LayerRestore.restored` donates the arrays, so damage must be found
            # before that. Shapes are not verified, because they have no values to lose.
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
    names = sorted(name for layer in layers for name in layer.names.values())
    for field in ("tables", "rename"):
        given = getattr(args, field) or ()
        if unknown := sorted(set(given) - set(names)):
            raise invalid(field, f"name tables of the state {names}", unknown)
    for layer in layers:
        if layer.slots is None:
            # An optimizer may have derived state from the old rows. This state would no
            # longer match the restored rows.
            derived = layer.tables_with_derived_state & set(args.tables_of(layer))
            check_has_slots(derived, "te.restore(directory, (model, optimizer))")


@contextlib.contextmanager
def _checked_by_all(
    directory: str | os.PathLike[str], layers: Sequence[LayerState]
) -> Iterator[list[str]]:
    """Raises on all processes if one of them raises or appends a different digest."""
    # All processes exchange data to write rows. If only one process raised, the other
    # processes would wait for it forever.
    digests: list[str] = []
    error = None
    try:
        yield digests
    except CheckpointError as raised:
        error = raised
    # A layer on this process's own devices may be restored by this process alone.
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
    """Compares checkpoint and state, and lists all differences in one error."""
    saved, now = _facts_of_both(checkpoint.record, restores, dense, args)
    names = sorted(saved.keys() | now.keys())
    changed = {
        name: (saved.get(name, "missing"), now.get(name, "missing"))
        for name in names
        if name not in saved or name not in now or saved[name] != now[name]
    }
    if not changed:  # Values can be compared only if their shapes are equal.
        for restore in restores:
            changed |= restore.shared_values()
    if changed:
        lines = [f"  {name}: {old}, now {new}" for name, (old, new) in changed.items()]
        text = (
            f"The checkpoint {checkpoint.root} does not fit the state in {len(lines)} "
        )
        text += "\n".join(["places:", *lines[:_MAX_LINES], _FIX])
        raise about(CheckpointError(text), next(iter(changed)), changed)
    # Opening the arrays finds missing arrays and wrong types, even if no chunk is
    # verified.
    for restore in restores:
        for array in restore.arrays.values():
            array.opened()


_MAX_LINES: Final = 30

_FIX: Final = """\
Restore the parts that are the same: pass tables= and rename=, or a model without its
optimizer as (model,), or a layer alone. Read other tables and slot variables with
te.checkpoint.read_table, change the arrays, and set them with set_embedding_tables and
set_slot_values, or te.functional.with_table_values and with_slot_values."""


def _facts_of_both(
    record: CheckpointRecord,
    restores: Sequence["_LayerRestore"],
    dense: Mapping[str, Any],
    args: RestoreState,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Collects facts, by name, that must be equal in the checkpoint and the state."""
    # The caller may restore only the model from a saved (model, optimizer). So a saved
    # leaf is ignored if its path starts with a position that the state lacks.
    positions = {name.partition(".")[0] for name in dense}
    saved: dict[str, Any] = {
        name: text
        for name, text in record.dense.items()
        if name.partition(".")[0] in positions
    }
    now: dict[str, Any] = {name: describe_leaf(leaf) for name, leaf in dense.items()}
    read = set()
    for restore in restores:
        layer = restore.layer
        for table, saved_name in args.tables_of(layer).items():
            read.add(saved_name)
            owner = f"table {layer.name_of(table)!r}"
            if (there := restore.saved.get(table)) is None:
                now[owner] = f"restored as {saved_name!r}"
                continue
            here = restore.wanted[table]
            if not _is_abstract(layer.tables):  # New rows keep the state's values.
                size = min(here.vocabulary_size, there.vocabulary_size)
                here = dataclasses.replace(here, vocabulary_size=size)
            for facts, record_of_table in ((saved, there), (now, here)):
                of_table = _facts_of_table(record_of_table, layer.slots is not None)
                facts |= {f"{owner} {key}": x for key, x in of_table.items()}
    if args.tables is None:
        saved |= {f"table {name!r}": "saved" for name in record.tables.keys() - read}
    return saved, now


def _facts_of_table(table: TableRecord, with_slots: bool) -> dict[str, Any]:
    facts = {"dim": table.dim, "dtype": table.dtype}
    facts["vocabulary"] = table.vocabulary_size
    if table.dynamic is not None:
        facts["vocabulary"] = f"default_row {table.dynamic['default_row']!r}"
    if with_slots:
        facts["optimizer"] = table.optimizer
        facts |= {f"slot {name!r}": x.row for name, x in table.slots.items()}
    return facts


def _restored_leaves(checkpoint: OpenCheckpoint, state: SplitState) -> dict[str, Any]:
    sharding: Any = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    # Shapes without a sharding become replicated arrays, like dense parameters in
    # `te.Optimizer`.
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
    """Starts to open the saved arrays that belong to a layer."""
    wanted, saved, arrays = table_records(layer), {}, {}
    for table, saved_name in args.tables_of(layer).items():
        if (record := checkpoint.record.tables.get(saved_name)) is None:
            continue
        saved[table] = record
        slots: list[str | None] = [None, *record.directory]
        if layer.slots is not None:
            slots += record.slots
        for slot in slots:
            keys = array_keys(saved_name, slot)
            array = SavedArray(checkpoint, keys, record.arrays[slot])
            arrays[table, slot] = array
    return _LayerRestore(layer, wanted, saved, arrays)


@dataclasses.dataclass(frozen=True)
class _LayerRestore:
    """A layer with arrays or shapes, and the saved arrays to restore into it.

    Attributes:
      wanted: table descriptions from the layer, by table name.
      saved: table descriptions from the checkpoint, by table name in the layer.
      arrays: arrays to read, by table and slot, as in `saved_leaves.Leaves`.
    """

    layer: LayerState
    wanted: Mapping[str, TableRecord]
    saved: Mapping[str, TableRecord]
    arrays: Mapping[tuple[str, str | None], SavedArray]

    def of_stack(self, stack: StackPlan, slot: str | None) -> dict[str, SavedArray]:
        names = [
            table.name for table in stack.tables if (table.name, slot) in self.arrays
        ]
        return {name: self.arrays[name, slot] for name in names}

    def shared_values(self) -> dict[str, tuple[Any, Any]]:
        """Finds saved values that differ, although stacked tables must share them."""
        differing = {}
        for stack in self.layer.plan.stacks:
            for slot in slots_of(self.layer, stack):
                arrays = self.of_stack(stack, slot.name)
                if not arrays or slot.kind not in ("shared", "hyperparameter"):
                    continue
                values = {table: array.read() for table, array in arrays.items()}
                # Tables that aren't restored keep their count. A count of zero may be
                # overwritten, because it means that the tables are untrained.
                if slot.kind == "shared" and not _is_abstract(slot.leaf):
                    for table in stack.tables:
                        if np.any(slot.leaf):
                            values.setdefault(table.name, np.asarray(slot.leaf))
                if any(not np.array_equal(*pair) for pair in pairwise(values.values())):
                    name = f"tables {sorted(values)}, which share {slot.name!r}"
                    differing[name] = list(map(str, values.values())), "one value"
        return differing

    def place_ids(self) -> dict[str, PlacedIds]:
        """Places saved ids, and warns if some don't fit."""
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
        """Reads all chunks once, before any array is donated."""
        # Processes that share the layer split the work, and `_checked_by_all` tells
        # each process if another process found damage.
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
        """Writes the saved rows and slot variables into the donated arrays.

        If a chunk turns out to be damaged here, the arrays are lost.
        """
        # The arithmetic guard isn't saved, because the plan determines it.
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
        slots = dict(layer.slots)
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
        # Totals are measured again, because tables may have more rows than were saved.
        slots = restarted_slots(slots, tables, self.saved, plan, ("total",))
        return dataclasses.replace(layer, slots=slots)

    def _read_rows(
        self,
        packed: PackedRows,
        stack: StackPlan,
        slot: str | None,
        placed: Mapping[str, PlacedIds],
    ) -> PackedRows:
        """Restores a stack or slot variable. A shape becomes zeros first."""
        plan, shape = self.layer.plan, packed.lines
        if isinstance(shape, jax.ShapeDtypeStruct) and packed.holds_all_rows:
            sharding = plan.rows_sharding(stack)
            lines = jnp.zeros(shape.shape, shape.dtype, device=sharding)
            packed = dataclasses.replace(packed, lines=lines)
        arrays = self.of_stack(stack, slot)

        def read(table: str, start: int, num_rows: int) -> np.ndarray:
            return arrays[table].read(slice(start, start + num_rows))

        num_rows = {table: self.saved[table].vocabulary_size for table in arrays}
        return write_table_rows(packed, stack, plan, read, num_rows, placed)

    def _read_shared_value(self, slot: NamedSlot, stack: StackPlan) -> jax.Array:
        leaf, arrays = slot.leaf, self.of_stack(stack, slot.name)
        if not arrays:
            return leaf
        values = {table: array.read() for table, array in arrays.items()}
        # `shared_values` rejected tables whose values differ.
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
