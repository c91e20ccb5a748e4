"""Restores a state from a checkpoint, under any plan.

Rows of tables and slot variables stream block by block into the arrays of the layer,
which are donated (`tables/row_stream.py`). Every process reads the blocks of its own
devices. Of dynamic tables, the host of each process holds one whole array at a time.
"""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
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
from tpu_embedding.checkpoint.dynamic_tables import (
    CLOCK,
    ID_ARRAYS,
    place_saved_ids,
    restored_directory,
    rows_of_sources,
)
from tpu_embedding.checkpoint.layer_tables import (
    leaf_records,
    restored_leaf,
    slots_of,
    table_records,
)
from tpu_embedding.checkpoint.records import (
    CheckpointError,
    CheckpointRecord,
    TableRecord,
    array_keys,
    dense_keys,
    errors_of_reading,
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
from tpu_embedding.tables.row_stream import write_blocks
from tpu_embedding.tables.slot_values import NamedSlot, slot_values, with_slot_values


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


@dataclasses.dataclass
class RestoreState(ocp.args.CheckpointArgs):
    """The state to restore: an argument for `CheckpointManager.restore`.

    Attributes:
      state: see `te.restore`, which explains all attributes.
      plan: the tables' plan.
      tables: names of the tables to restore; None: all.
      rename: name of a table to its name in the checkpoint.
      slots: where slot variables come from.
      rules: whether to compare optimizers.
      dense: where other leaves come from.
      dtypes: whether to convert rows to other types.
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

    def with_slots(self, layer: LayerState) -> bool:
        """Returns True if slot variables of a layer are to be read."""
        return self.slots == "restore" and layer.slots is not None


def restore_state(directory: str | os.PathLike[str], args: RestoreState) -> Any:
    """Restores a state; see `te.restore`.

    Args:
      directory: from `te.save`, or of one step of a `CheckpointManager`.
      args: the state, and the args.
    """
    parts = SplitState(args.state, args.plan)
    _check_names(args, parts.layers)
    for layer in parts.layers:
        _check_has_slots(layer, args)
    with contextlib.ExitStack() as ends:
        with _checked_by_all(directory, parts.layers) as digests:
            checkpoint = ends.enter_context(open_checkpoint(directory))
            digests.append(checkpoint.record.digest)
            pairs = [
                (layer, _saved_tables(layer, checkpoint, args))
                for layer in parts.layers
            ]
            _check_fit(checkpoint, pairs, parts.dense, args)
            dense = {}
            if args.dense == "restore":
                dense = _restored_leaves(checkpoint, parts)
            placed = [placed_ids(layer, saved) for layer, saved in pairs]
            for layer, saved in pairs:
                if not _is_abstract((layer.tables, layer.slots)):
                    saved.verify(checkpoint, *_turn_of(layer))
        layers = [
            _restored(layer, saved, of_layer, args)
            for (layer, saved), of_layer in zip(pairs, placed, strict=True)
        ]
        checkpoint.check_unchanged()
    return parts.rebuilt(layers, dense)


@contextlib.contextmanager
def _checked_by_all(
    directory: str | os.PathLike[str], layers: Sequence[LayerState]
) -> Iterator[list[str]]:
    """Raises on all processes that share the layers, if one of them finds damage.

    Otherwise some processes would write rows, and wait for those that raised.

    Args:
      directory: the checkpoint.
      layers: layers of the state.

    Yields:
      A list that gets the digest of the checkpoint.

    Raises:
      CheckpointError: if a process raises one, or processes read different saves.
    """
    digests: list[str] = []
    error = None
    try:
        yield digests
    except CheckpointError as found:
        error = found
    is_shared = any(not _is_local(layer) for layer in layers)
    value = digests[0] if error is None else ""
    values = distributed.exchange("restore", value) if is_shared else [value]
    if error is not None:
        raise error
    if len(set(values)) > 1:
        raise CheckpointError(
            f"Processes of the job read different saves from {directory}, or one found "
            "damage; see its error."
        )


def _is_local(layer: LayerState) -> bool:
    return layer.plan.replicated.is_fully_addressable


def _turn_of(layer: LayerState) -> tuple[int, int]:
    """Returns the number of this process, and how many verify a layer's chunks."""
    if _is_local(layer):
        return 0, 1
    return jax.process_index(), distributed.num_processes()


def _check_fit(
    checkpoint: OpenCheckpoint,
    pairs: "_Pairs",
    dense: Mapping[str, Any],
    args: RestoreState,
) -> None:
    """Raises `CheckpointError` if the checkpoint and the state differ."""
    found = list(_differences(checkpoint.record, pairs, dense, args))
    if found := found or list(_shared_differences(pairs)):
        raise CheckpointError(
            f"The checkpoint {checkpoint.root} does not fit the state:\n"
            f"{format_differences(found)}"
        )
    for _, saved in pairs:
        saved.check_files()


_Pairs = Sequence[tuple[LayerState, SavedTables]]
"""Each layer, with what it takes over from the checkpoint."""


def _check_names(args: RestoreState, layers: Sequence[LayerState]) -> None:
    """Raises ValueError if tables= or rename= name tables that the state lacks."""
    names = sorted(name for layer in layers for name in layer.names.values())
    for field in ("tables", "rename"):
        given = getattr(args, field) or ()
        if unknown := sorted(set(given) - set(names)):
            raise ValueError(
                f"{field} must name tables of the state, {names}, got {unknown}."
            )


def _saved_tables(
    layer: LayerState, checkpoint: OpenCheckpoint, args: RestoreState
) -> SavedTables:
    """Returns the tables and slot variables that a layer takes over."""
    wanted, record = table_records(layer), checkpoint.record
    records, arrays = {}, {}
    for table, saved_name in _wanted_tables(layer, args).items():
        if saved_name not in record.tables:
            continue
        records[table] = saved = record.tables[saved_name]
        slots: dict[str | None, str | None] = {None: None}
        slots |= {name: name for name in saved.directory}
        if args.with_slots(layer):
            slots |= saved_slots(saved, wanted[layer.name_of(table)])
        for slot, saved_slot in slots.items():
            keys = array_keys(saved_name, saved_slot)
            arrays[table, slot] = SavedArray(checkpoint, keys, saved.arrays[saved_slot])
    return SavedTables(records, arrays)


def _wanted_tables(layer: LayerState, args: RestoreState) -> dict[str, str]:
    """Returns the tables of a layer to restore, and their names in the checkpoint."""
    return {
        table: (args.rename or {}).get(name, name)
        for table, name in layer.names.items()
        if args.tables is None or name in args.tables
    }


def _check_has_slots(layer: LayerState, args: RestoreState) -> None:
    """Raises for tables alone if an optimizer has derived state from their values."""
    if layer.slots is None:
        names = layer.tables_with_derived_state & set(_wanted_tables(layer, args))
        check_has_slots(names, "te.restore(directory, (model, optimizer))")


def _differences(
    record: CheckpointRecord,
    pairs: _Pairs,
    dense: Mapping[str, Any],
    args: RestoreState,
) -> Iterator[Difference]:
    """Yields all differences of a checkpoint and a state."""
    names = {
        layer.name_of(table): saved_name
        for layer, _ in pairs
        for table, saved_name in _wanted_tables(layer, args).items()
    }
    for name, saved_name in sorted(names.items()):
        if saved_name not in record.tables:
            renamed = "" if saved_name == name else f" as {saved_name!r}"
            text = f"not in the checkpoint{renamed}"
            yield Difference(f"table {name!r}", text, "missing")
    if args.tables is None:
        for name in sorted(record.tables.keys() - set(names.values())):
            yield Difference(f"table {name!r}", "only in the checkpoint", "extra")
    for layer, saved in pairs:
        wanted = table_records(layer)
        rows = "shapes" if _is_abstract(layer.tables) else "arrays"
        for table, of_table in saved.records.items():
            name = layer.name_of(table)
            both = (name, of_table, wanted[name])
            yield from table_differences(*both, rows, args.dtypes)
            if args.with_slots(layer) and args.rules == "check":
                yield from optimizer_differences(*both)
    if args.dense == "restore":
        yield from dense_differences(record.dense, dense)


def _shared_differences(pairs: _Pairs) -> Iterator[Difference]:
    """Yields differences of what tables of a stack share, such as counts of steps."""
    for layer, saved in pairs:
        for stack in layer.plan.stacks:
            for slot in slots_of(layer, stack):
                arrays = saved.of_stack(stack, slot.name)
                if arrays and slot.kind in ("shared", "hyperparameter"):
                    values = {table: array.read() for table, array in arrays.items()}
                    yield from shared_differences(stack, slot, values)


def _is_abstract(tree: Any) -> bool:
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))


def _restored_leaves(checkpoint: OpenCheckpoint, parts: SplitState) -> dict[str, Any]:
    """Returns all other leaves; their copies are on the mesh of the layers."""
    sharding: Any = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if parts.layers:
        sharding = parts.layers[0].plan.replicated
    arrays = {
        name: SavedArray(checkpoint, dense_keys(name), *leaf_records(leaf))
        for name, leaf in parts.dense.items()
    }
    return {
        name: restored_leaf(arrays[name], leaf, sharding)
        for name, leaf in parts.dense.items()
    }


def _restored(
    layer: LayerState,
    saved: SavedTables,
    placed: Mapping[str, PlacedIds],
    args: RestoreState,
) -> LayerState:
    new = restored_tables(layer, saved, placed)
    if new.slots is None:
        return new
    if args.slots == "initialize" or _lacks_slots(layer, saved):
        new = dataclasses.replace(new, slots=_initialized(new, saved.records))
    if args.slots != "restore":
        return new
    new = restored_slots(new, saved, placed)
    # The tables may hold other rows than the saved ones, or round them otherwise.
    slots = restarted_slots(
        new.slots or {}, new.tables, saved.records, new.plan, ("total",)
    )
    return dataclasses.replace(new, slots=slots)


def _lacks_slots(layer: LayerState, saved: SavedTables) -> bool:
    """Returns True if a table has slot variables that the checkpoint lacks."""
    wanted = table_records(layer)
    return any(
        (table, slot) not in saved.arrays
        for table in saved.records
        for slot in wanted[layer.name_of(table)].slots
    )


def _initialized(layer: LayerState, tables: Collection[str]) -> dict[str, Any]:
    """Returns slots in which those of some tables have their initial values.

    All tables share one step count. If some tables stay, it is theirs.
    """
    # Initial slot variables may depend on the tables.
    fresh = init_slots(dict(layer.tables), layer.plan)
    trained = {t.name for s in layer.plan.trained_stacks for t in s.tables}
    if trained <= set(tables) or _is_abstract(layer.slots):
        return fresh
    slots = dict(layer.slots or {})
    for stack in layer.plan.trained_stacks:
        own = {t.name for t in stack.tables} & set(tables)
        if not own:
            continue
        counts = {s.name for s in slots_of(layer, stack) if s.kind == "shared"}
        values = slot_values({stack.name: fresh[stack.name]}, layer.plan, "all")
        new = {
            table: {k: v for k, v in values[table].items() if k not in counts}
            for table in own
        }
        slots |= with_slot_values({stack.name: slots[stack.name]}, new, layer.plan)
    return slots
