"""Restores a state from a checkpoint, under any plan."""

import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_args

import jax
import orbax.checkpoint as ocp
from etils import epath

from tpu_embedding.checkpoint.arrays import SavedArray
from tpu_embedding.checkpoint.dense_leaves import restored_leaf
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
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.layer_tables import slots_of, table_records
from tpu_embedding.checkpoint.records import (
    CheckpointRecord,
    array_keys,
    dense_keys,
    describe,
    state_directory,
)
from tpu_embedding.checkpoint.restored_tables import (
    SavedTables,
    placed_ids,
    restored_slots,
    restored_tables,
)
from tpu_embedding.checkpoint.split_state import LayerState, SplitState
from tpu_embedding.functional.following_slots import (
    check_no_followers,
    with_following_slots,
)
from tpu_embedding.functional.steps import init_slots
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.tables.slot_values import slot_values, with_slot_values


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
    root = state_directory(directory)
    record = describe(root)
    parts = SplitState(args.state, args.plan)
    _check_names(args, parts.layers)
    pairs = [
        (layer, _saved_tables(layer, root, record, args)) for layer in parts.layers
    ]
    for layer in parts.layers:
        _check_followers(layer, args)
    found = list(_differences(record, pairs, parts.dense, args))
    if found := found or list(_shared_differences(pairs)):
        raise CheckpointError(
            f"The checkpoint {root} does not fit the state:\n"
            f"{format_differences(found)}"
        )
    for _, saved in pairs:
        saved.check_files()
    dense = {}
    if args.dense == "restore":
        dense = _restored_leaves(root, parts)
    layers = [_restored(layer, saved, args) for layer, saved in pairs]
    return parts.rebuilt(layers, dense)


_Pairs = Sequence[tuple[LayerState, SavedTables]]
"""Each layer, with what it takes over from the checkpoint."""


def _check_names(args: RestoreState, layers: Sequence[LayerState]) -> None:
    """Refuses tables= and rename= that name no tables of the state."""
    names = sorted(name for layer in layers for name in layer.names.values())
    for field in ("tables", "rename"):
        given = getattr(args, field) or ()
        if unknown := sorted(set(given) - set(names)):
            raise ValueError(
                f"{field} must name tables of the state, {names}, got {unknown}."
            )


def _saved_tables(
    layer: LayerState, root: epath.Path, record: CheckpointRecord, args: RestoreState
) -> SavedTables:
    """Returns the tables and slot variables that a layer takes over."""
    wanted = table_records(layer)
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
            arrays[table, slot] = SavedArray(root, keys, saved.arrays[saved_slot])
    return SavedTables(records, arrays)


def _wanted_tables(layer: LayerState, args: RestoreState) -> dict[str, str]:
    """Returns the tables of a layer to restore, and their names in the checkpoint."""
    return {
        table: (args.rename or {}).get(name, name)
        for table, name in layer.names.items()
        if args.tables is None or name in args.tables
    }


def _check_followers(layer: LayerState, args: RestoreState) -> None:
    """Refuses tables alone, if an optimizer has made state from their values."""
    if layer.slots is None:
        names = layer.followed_tables & set(_wanted_tables(layer, args))
        check_no_followers(names, "te.restore(directory, (model, optimizer))")


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


def _restored_leaves(root: epath.Path, parts: SplitState) -> dict[str, Any]:
    """Returns all other leaves; their copies lie on the mesh of the layers."""
    sharding: Any = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if parts.layers:
        sharding = parts.layers[0].plan.replicated
    arrays = {name: SavedArray(root, dense_keys(name)) for name in parts.dense}
    return {
        name: restored_leaf(arrays[name], leaf, sharding)
        for name, leaf in parts.dense.items()
    }


def _restored(layer: LayerState, saved: SavedTables, args: RestoreState) -> LayerState:
    placed = placed_ids(layer, saved)
    new = restored_tables(layer, saved, placed)
    if new.slots is None:
        return new
    if args.slots == "initialize" or _lacks_slots(layer, saved):
        new = dataclasses.replace(new, slots=_initialized(new, saved.records))
    if args.slots != "restore":
        return new
    new = restored_slots(new, saved, placed)
    # The tables may hold other rows than the saved ones, or round them otherwise.
    slots = with_following_slots(
        new.slots or {},
        dict(new.tables),
        dict.fromkeys(saved.records, 1),
        new.plan,
        parts="totals",
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
